"""Whether an engine with an FP8 KV cache answers the same, whatever came before.

    python -m benchmarks.pretrained.kv_orders --checkpoint runs/smollm2

Each round sends the same weights in an update, then six prompts of 1 to 37 tokens in another order,
the first one alone, then a fixed request. KV scales are measured on the first prefill.
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.pretrained import measured
from benchmarks.pretrained.arms import ARMS
from benchmarks.pretrained.checkpoint import convert
from trainer_bridge import update

ROUNDS = 20
NEW = 6
"""Tokens of the fixed request's answer."""
TEXTS = ("Hello there!", "The sky is blue because", "1 2 3 4 5 6 7 8 9 10 11 12")
ARM = "fp8-kv8"
Row = dict[str, Any]


def orders(rounds: int) -> Iterator[list[int]]:
    """Permutations of six; each prompt is the first in turn."""
    drawn = random.Random(0)
    for number in range(rounds):
        first = number % 6
        rest = [other for other in range(6) if other != first]
        yield [first, *drawn.sample(rest, len(rest))]


def prompts(tokenizer: Any) -> list[list[int]]:
    """One BOS token, some words, and two chats, one of them cut short."""
    chats = [measured.chat(tokenizer, question) for question in measured.QUESTIONS[:2]]
    texts = [tokenizer(text, add_special_tokens=False).input_ids for text in TEXTS]
    return [[tokenizer.bos_token_id], *texts, chats[1][:30], chats[0]]


def answers(
    tokenizer: Any,
    rounds: int,
    commit: Callable[[int], object],
    generate: Callable[[Row], Row],
    flush: Callable[[], object],
) -> Iterator[Row]:
    """Of each round its order, and the tokens and logprobs of the fixed request.

    Args:
        commit: sends the weights, in the update of this number.
        generate: the reply to SGLang's request.
        flush: empties the prefix cache: tokens that are taken from it were prefilled with others,
            and rounded otherwise, which turns codes whatever the scales.
    """
    known = prompts(tokenizer)
    sampling = {"temperature": 0.0, "max_new_tokens": 1}
    fixed = {"sampling_params": {**sampling, "max_new_tokens": NEW}, "return_logprob": True}
    for number, order in enumerate(orders(rounds)):
        commit(number)
        first, *rest = (known[index] for index in order)
        for ids in (first, rest):
            generate({"input_ids": ids, "sampling_params": sampling})
        flush()
        chosen = generate({"input_ids": known[-1], **fixed})["meta_info"]["output_token_logprobs"]
        yield {
            "order": order,
            "text": tokenizer.decode([token for _, token, *_ in chosen]),
            "logprobs": [logprob for logprob, *_ in chosen],
        }


def flush(engine: Any) -> None:
    """Empty the prefix cache of an ``sglang.Engine`` as soon as nothing runs."""
    emptied = engine.loop.run_until_complete(engine.tokenizer_manager.flush_cache(timeout_s=30.0))
    assert emptied.success, "a request does not end"


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Answers by the order of earlier prompts.")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/smollm2"), help="made if absent"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = convert(args.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with measured.running(checkpoint, ARMS[ARM], device, model) as engine:
        rows = []
        for row in answers(
            tokenizer,
            args.rounds,
            lambda number: update(model, engine, version=number),
            lambda request: engine.generate(**request),
            lambda: flush(engine),
        ):
            rows.append(row)
            print(json.dumps(row), flush=True)
        first = [row["logprobs"][0] for row in rows]
        print(
            f"{len({row['text'] for row in rows})} answers in {len(rows)} rounds; logprob of the "
            f"first token from {min(first):.4f} to {max(first):.4f}"
        )


if __name__ == "__main__":
    main()
