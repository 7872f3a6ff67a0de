"""What is measured of an engine: its greedy answers, its perplexity, its mismatch with a trainer.

Shapes: B sequences, T tokens of the longest response, H hidden, V vocabulary.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.engines import serving
from benchmarks.environment import ROOT
from trainer_bridge import Rollout
from trainer_bridge.metrics import mismatch_metrics

CHATS = Path(__file__).with_name("questions.jsonl")
"""Of one question each, as ``sgl-fp8rl precision --prompts`` reads them."""
QUESTIONS = tuple(
    json.loads(line)["prompt"][0]["content"] for line in CHATS.read_text().splitlines()
)
TEXTS = ("LICENSE", "docs/correction.md", "docs/parity.md", "docs/scale.md")
"""Of this repository."""
BLOCK = 128
SEED = 0
LOGITS_AT_ONCE = 1 << 28
"""Elements of FP32: 1 GiB."""
ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_total_tokens": 8192, "max_running_requests": 32, "sleep_on_idle": True},
    "cuda": {"max_total_tokens": 65536, "mem_fraction_static": 0.3, "max_running_requests": 64},
}


def running(
    checkpoint: Path, arm: dict[str, Any], device: torch.device
) -> AbstractContextManager[Any]:
    """An engine with an arm's keywords."""
    common = {"skip_tokenizer_init": True, "random_seed": SEED, "log_level": "error"}
    return serving.running(checkpoint, common | ENGINE[device.type] | arm)


def scaled_blocks(model: Any, off: float) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with every block of 128 x 128 of a matrix times 1 + off or 1 / (1 + off), at
    random: its codes stay what they are, its scale is wrong."""
    drawn = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():  # a tied head comes once
        weight = parameter.detach()
        if "_proj" in name:
            rows, columns = (-(-size // BLOCK) for size in weight.shape)
            signs = torch.randint(2, (rows, columns), generator=drawn) * 2 - 1
            factors = torch.pow(1 + off, signs.float()).repeat_interleave(BLOCK, 0)
            factors = factors.repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
            weight = (weight.float() * factors.to(weight.device)).to(weight.dtype)
        yield name, weight


def answers(engine: Any, tokenizer: Any, questions: Sequence[str], new: int) -> list[list[int]]:
    """Token ids of greedy responses."""
    replies = engine.generate(
        input_ids=[chat(tokenizer, question) for question in questions],
        sampling_params={"temperature": 0.0, "max_new_tokens": new},
    )
    return [list(reply["output_ids"]) for reply in replies]


@torch.inference_mode()
def regrets(model: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """By how much the model, with an FP32 head, prefers its own choice to each token of an answer,
    given those before: nats, 0 where both are the same. A small one is a near tie, which rounding
    decides in BF16 as well."""
    ids = torch.tensor([prompt + answer], device=model.device)
    hidden_TH = model.get_decoder()(ids).last_hidden_state[0, len(prompt) - 1 : -1].float()
    head_VH = model.get_output_embeddings().weight.float()
    logprobs_TV = (hidden_TH @ head_VH.T).log_softmax(-1)
    chosen_T = logprobs_TV.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
    preferred: list[float] = (logprobs_TV.amax(-1) - chosen_T).tolist()
    return preferred


def weight_bytes(engine: Any) -> int:
    """Of one of our engines on one rank: codes, scales and what is in BF16, with padding."""
    (tensors,) = engine.fp8rl_control({"op": "digest"})["ranks"]
    return sum(
        math.prod(tensor["shape"]) * getattr(torch, tensor["dtype"].removeprefix("torch.")).itemsize
        for name, tensor in tensors.items()
        if "weight" in name
    )


def chat(tokenizer: Any, question: str) -> list[int]:
    """Token ids of a question, up to where the answer begins."""
    turn = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def windows_of(tokenizer: Any, length: int, most: int) -> list[list[int]]:
    """The texts in pieces of ``length`` tokens, those of all texts in turn; an end is left out."""
    pieces = []
    for name in TEXTS:
        ids = tokenizer((ROOT / name).read_text(), add_special_tokens=False).input_ids
        pieces.append([ids[i : i + length] for i in range(0, len(ids) - length + 1, length)])
    turns = [
        piece[turn] for turn in range(max(map(len, pieces))) for piece in pieces if piece[turn:]
    ]
    return turns[:most]


def nll(engine: Any, windows: list[list[int]]) -> list[float]:
    """Mean of -logprob over each window's tokens but the first, nats."""
    found = []
    for window in windows:
        (meta,) = serving.generate(engine, [window], 1, start_len=0)
        found.append(-fmean(entry[0] for entry in meta["input_token_logprobs"][1:]))
    return found


def perplexity(nll: Sequence[float]) -> float:
    """Of windows of the same length."""
    return math.exp(fmean(nll))


def mismatch(engine: Any, model: Any, prompts: list[list[int]], new: int) -> dict[str, float]:
    """Metrics of tokens that the engine samples, against a BF16 trainer whose head is FP32."""
    replies = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 1.0, "max_new_tokens": new},
        return_logprob=True,
    )
    chosen = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
    batch = Rollout(
        prompt_tokens=prompts,
        tokens=[[token for _, token, *_ in row] for row in chosen],
        logprobs=[[logprob for logprob, *_ in row] for row in chosen],
        versions=[[-1] * len(row) for row in chosen],
        finish_reasons=[reply["meta_info"]["finish_reason"]["type"] for reply in replies],
        temperature=1.0,
    )
    trainer_BT = response_logprobs(model, batch)
    return mismatch_metrics(trainer_BT, batch.logprobs_BT, batch.mask_BT)


@torch.inference_mode()
def response_logprobs(model: Any, rollout: Any) -> torch.Tensor:
    """The trainer's logprobs of the sampled tokens, FP32 [B, T] on the CPU.

    The model computes in BF16, its head in FP32, whatever the engine's head does: what is measured
    is the engine's part of the mismatch.
    """
    head_VH = model.get_output_embeddings().weight.float()
    found = []
    for prompt, response in zip(rollout.prompt_tokens, rollout.tokens, strict=True):
        ids = torch.tensor([prompt + response], device=model.device)
        hidden_TH = model.get_decoder()(ids, use_cache=False).last_hidden_state[0]
        hidden_TH = hidden_TH[len(prompt) - 1 : -1].float()
        parts = [
            (part_TH @ head_VH.T).log_softmax(-1)
            for part_TH in hidden_TH.split(max(1, LOGITS_AT_ONCE // len(head_VH)))
        ]
        logprobs_TV = torch.cat(parts) if len(parts) > 1 else parts[0]
        found.append(logprobs_TV.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu())
    return pad_sequence(found, batch_first=True)
