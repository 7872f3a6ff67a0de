"""Whether an engine with an 8-bit KV cache finds one sentence in a long text.

    python -m benchmarks.pretrained.needle --checkpoint runs/smollm2

A text of neutral sentences has a code at some depth; the request asks for it and begins the answer.
``found``: the greedy answer has the code, which decode reads out of the cache. ``logprob``: of the
code's tokens in that place, which prefill reads; its digits are drawn, so their mean over texts
says how sure the model is.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.pretrained import measured
from benchmarks.pretrained.arms import ARMS, BF16, INT8_KV, KV8, OURS, Arm
from benchmarks.pretrained.checkpoint import convert

CONTEXTS = (2000, 7000)
DEPTHS = (0.1, 0.5, 0.9)
TEXTS = 3
"""Of each context and depth, with codes of their own."""
SUBJECTS = ("The ferry", "A gardener", "The clerk", "An old bridge", "The choir", "A trader")
VERBS = ("waited near", "walked past", "looked over", "stood behind", "turned towards", "left")
PLACES = ("the market", "a quiet lake", "the town hall", "the orchard", "a stone wall", "the mill")
QUESTION = "\n\nWhat is the secret code of the harbour?"
ANSWER = "The secret code of the harbour is "
# all weights in BF16, so that the cache alone differs
ONLY_KV = OURS | {"fp8rl_ignored_layers": ("re:.*",)}
CACHES = (
    ARMS[BF16],
    Arm("kv8", "BF16 weights, E4M3 KV", ONLY_KV | KV8),
    Arm("int8kv", "BF16 weights, INT8 KV", ONLY_KV | INT8_KV),
    ARMS["fp8-kv8"],
)
Row = dict[str, Any]


def texts(
    tokenizer: Any, context: int, depth: float, count: int
) -> Iterator[tuple[list[int], str]]:
    """Token ids of ``context`` tokens or a few less, up to where the code begins; and the code."""
    for number in range(count):
        drawn = random.Random(f"{context} {depth} {number}")
        code = str(drawn.randrange(1000, 10000))
        needle = f" The secret code of the harbour is {code}."
        room = context - len(ids(tokenizer, needle, code))
        sentences: list[str] = []
        size = 0
        while True:
            words = (drawn.choice(SUBJECTS), drawn.choice(VERBS), drawn.choice(PLACES))
            sentence = f" {' '.join(words)} on day {drawn.randrange(100)}."
            size += len(tokenizer(sentence, add_special_tokens=False).input_ids)
            if size > room:
                break
            sentences.append(sentence)
        sentences.insert(round(depth * len(sentences)), needle)
        yield ids(tokenizer, "".join(sentences), ""), code


def ids(tokenizer: Any, text: str, code: str) -> list[int]:
    """Token ids of the request about a text, with the answer up to ``code``."""
    asked = measured.chat(tokenizer, text.strip() + QUESTION)
    begun: list[int] = tokenizer(ANSWER + code, add_special_tokens=False).input_ids
    return asked + begun


def rows(engine: Any, tokenizer: Any, arm: Arm, args: argparse.Namespace) -> Iterator[Row]:
    """What one engine finds, a row for each context and depth."""
    count = args.texts
    for context in args.contexts:
        for depth in args.depths:
            found, logprobs, size = 0, [], 0
            for prompt, code in texts(tokenizer, context, depth, count):
                digits = tokenizer(code, add_special_tokens=False).input_ids
                size, sampling = len(prompt), {"temperature": 0.0}
                reply = engine.generate(
                    input_ids=prompt, sampling_params={**sampling, "max_new_tokens": len(digits)}
                )
                found += list(reply["output_ids"]) == digits
                reply = engine.generate(
                    input_ids=prompt + digits,
                    sampling_params={**sampling, "max_new_tokens": 1},
                    return_logprob=True,
                    logprob_start_len=len(prompt) - 1,
                )
                given = reply["meta_info"]["input_token_logprobs"][-len(digits) :]
                logprobs.append(sum(logprob for logprob, *_ in given))
            yield {
                "arm": arm.name,
                "context": size,
                "depth": depth,
                "found": found,
                "of": count,
                "logprob": sum(logprobs) / count,
            }


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="One sentence in a long text, by KV cache.")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/smollm2"), help="made if absent"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--depths", type=float, nargs="+", default=list(DEPTHS))
    parser.add_argument("--texts", type=int, default=TEXTS)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    checkpoint = convert(args.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for arm in CACHES:
        with measured.running(checkpoint, arm, device) as engine:
            for row in rows(engine, tokenizer, arm, args):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
