"""The tokens that precision measures on: given, or sampled from the model itself.

Samples at temperature 1 are what a rollout would be, so KL is averaged over the tokens that
training will see.

Shapes: B sequences, L tokens of the longest.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

LENGTH = 128
"""Response tokens of a sequence without a prompt."""
LEAST_RESPONSE = 64
"""Minimum of response tokens; if there would be fewer, fewer prompts are used."""
BATCH_TOKENS = {"cuda": 8192, "cpu": 1024}
SAMPLED_AT_ONCE = 64


@dataclass(frozen=True)
class Sequences:
    """A batch, padded on the right."""

    tokens_BL: torch.Tensor
    """int64."""
    measured: torch.Tensor
    """Bool [B, L - 1]: whether the token after this one is measured."""


@dataclass(frozen=True)
class Text:
    """One sequence of token ids."""

    prompt: list[int]
    response: list[int] | None
    """None if the model samples it."""

    @property
    def ids(self) -> list[int]:
        """Both, as far as they are known."""
        return self.prompt + (self.response or [])


Tokenize = Callable[..., list[int]]
"""Token ids of a string or of a list of chat messages; ``begins``: whether this text begins a
sequence, with the tokenizer's BOS."""


def read_texts(path: Path, tokenize: Tokenize) -> list[Text]:
    """Read prompts, with responses if present, from a JSONL file.

    Each line is an object with ``prompt`` and perhaps ``response``: a string, or a list of token
    ids; a prompt may also be a list of chat messages.

    Raises:
        ValueError: a line is something else or has no tokens, or there are no lines.
        OSError: the file cannot be read.
    """
    texts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            prompt, response = found["prompt"], found.get("response", [0])
            if not (_is_text(prompt) or _is_chat(prompt)) or not _is_text(response):
                raise TypeError("prompt or response is neither text nor token ids, or empty")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {path} is not a prompt ({error!r}); each line is an object like "
                f'{{"prompt": "..."}} or {{"prompt": [1, 2], "response": [3]}}'
            ) from None
        prompt = _ids(prompt, tokenize, begins=True)
        response = _ids(response, tokenize, begins=False)
        if not prompt or not response:
            raise ValueError(
                f"line {number} of {path} has no tokens in its prompt or response after "
                f"tokenization; remove the line"
            )
        texts.append(Text(prompt, response if "response" in found else None))
    if not texts:
        raise ValueError(f"{path} has no prompts; add at least one line")
    return texts


def _is_text(given: Any) -> bool:
    """Whether it is a string or token ids."""
    return bool(given) and (isinstance(given, str) or _is_ids(given))


def _is_ids(given: Any) -> bool:
    return isinstance(given, list) and all(type(token) is int for token in given)


def _is_chat(given: Any) -> bool:
    """Whether it is messages for a chat template."""
    is_list = bool(given) and isinstance(given, list)
    return is_list and all(isinstance(x, dict) and {"role", "content"} <= x.keys() for x in given)


def _ids(given: Any, tokenize: Tokenize, *, begins: bool) -> list[int]:
    return list(given) if _is_ids(given) else tokenize(given, begins=begins)


def from_nothing(model: Any, tokens: int, seed: int) -> list[Text]:
    """Prompts of one token each: the model's BOS, or a random one where it has none."""
    config = model.config.get_text_config()
    count = -(-tokens // LENGTH)
    if isinstance(config.bos_token_id, int):
        return [Text([config.bos_token_id], None)] * count
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(config.vocab_size, (count,), generator=generator)
    return [Text([token], None) for token in drawn.tolist()]


def complete(model: Any, texts: Sequence[Text], tokens: int, seed: int) -> list[Text]:
    """Texts with about this many response tokens in total.

    Texts with a response come first. The model answers the other prompts in turn, repeatedly if
    responses are short.

    Raises:
        ValueError: a token id is outside the vocabulary, or logits are NaN or Inf.
    """
    vocab = model.config.get_text_config().vocab_size
    ids = {token for text in texts for token in text.ids}
    if min(ids) < 0 or max(ids) >= vocab:
        raise ValueError(f"a token id is outside the model's vocabulary of {vocab}")
    whole: list[Text] = []
    left = tokens
    for text in texts:
        if text.response is not None and left > 0:
            whole.append(text)
            left -= len(text.response)
    prompts = [text.prompt for text in texts if text.response is None]
    in_turn = itertools.cycle(prompts)
    most = max(LEAST_RESPONSE, -(-left // max(1, len(prompts))))
    typical = most
    while prompts and left > 0:
        count = min(SAMPLED_AT_ONCE, -(-left // typical))
        some = sorted((next(in_turn) for _ in range(count)), key=len)
        found = sample(model, some, most, seed + len(whole))
        whole += found
        length = sum(len(text.response or []) for text in found)
        left -= length
        typical = -(-length // count)
    return whole


@torch.inference_mode()
def sample(model: Any, prompts: list[list[int]], new: int, seed: int) -> list[Text]:
    """A response to each prompt, sampled at temperature 1 from the whole vocabulary.

    It ends after ``new`` tokens, or with a stop token of the model.

    Raises:
        ValueError: logits are NaN or Inf.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    rows = [torch.tensor(prompt) for prompt in prompts]
    lengths_B = torch.tensor([len(row) for row in rows], device=device)
    # no padding: while a prompt continues, its own token is the next
    tokens_BL = pad_sequence([torch.cat([row, row.new_zeros(new)]) for row in rows], True).to(
        device
    )
    at, cache = int(lengths_B.min()), None
    given = tokens_BL[:, :at]
    for position in range(at, tokens_BL.shape[1]):
        reply = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits_BV, cache = reply.logits[:, -1].float(), reply.past_key_values
        if not bool(logits_BV.isfinite().all()):
            raise ValueError("the model's own logits are NaN or Inf; check its weights")
        drawn_B = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator).squeeze(1)
        in_prompt_B = position < lengths_B
        tokens_BL[:, position] = torch.where(in_prompt_B, tokens_BL[:, position], drawn_B)
        given = tokens_BL[:, position : position + 1]
    ends = _ends(model)
    found = []
    for prompt, row in zip(prompts, tokens_BL.tolist(), strict=True):
        response = row[len(prompt) : len(prompt) + new]
        end = next((n for n, token in enumerate(response, start=1) if token in ends), new)
        found.append(Text(prompt, response[:end]))
    return found


def _ends(model: Any) -> set[int]:
    """The stop tokens of the model."""
    generation = getattr(model, "generation_config", None)
    eos: Any = getattr(generation, "eos_token_id", None)
    return {token for token in (eos if isinstance(eos, list) else [eos]) if token is not None}


def batches_of(texts: Sequence[Text], device: torch.device) -> list[Sequences]:
    """Batches of sequences of similar length."""
    at_once = BATCH_TOKENS["cuda" if device.type == "cuda" else "cpu"]
    rows = sorted(texts, key=lambda text: len(text.ids))
    batches, first = [], 0
    while first < len(rows):
        last = first + 1
        # the last sequence of a batch is the longest
        while last < len(rows) and (last + 1 - first) * len(rows[last].ids) <= at_once:
            last += 1
        batches.append(_batch(rows[first:last], device))
        first = last
    return batches


def _batch(texts: Sequence[Text], device: torch.device) -> Sequences:
    rows = [torch.tensor(text.ids) for text in texts]
    measured = [
        torch.tensor([False] * (len(text.prompt) - 1) + [True] * len(text.response or []))
        for text in texts
    ]
    padded = (pad_sequence(tensors, batch_first=True).to(device) for tensors in (rows, measured))
    return Sequences(*padded)
