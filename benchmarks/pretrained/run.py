"""What a format does to a pretrained checkpoint: answers, perplexity, mismatch with a BF16 trainer.

    python -m benchmarks.pretrained.run --output runs/pretrained.jsonl

A row an arm, after one of the environment and one of the weights. Arms that the output has already
are left out, so a run may be cut into calls.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import commit
from benchmarks.pretrained import measured, weights
from benchmarks.pretrained.arms import ARMS, Arm
from benchmarks.pretrained.checkpoint import convert
from examples.grpo.environment import environment

Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """How much each engine does."""

    length: int
    """Tokens of a window of text."""
    windows: int
    answers: int
    """Questions that are answered."""
    new: int
    """Tokens of an answer, and of a sampled response, at most."""
    samples: int
    """Responses to each question, for the mismatch."""


WORK = {"cpu": Work(256, 4, 3, 32, 1), "cuda": Work(512, 32, 8, 96, 16)}


def measure(checkpoint: Path, arm: Arm, work: Work, device: torch.device) -> Row:
    """A row of one arm."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    questions = measured.QUESTIONS[: work.answers]
    with measured.running(checkpoint, arm, device, model) as engine:
        formats: list[str] = []
        weight_bytes = sum(2 * parameter.numel() for parameter in model.parameters())
        if "quantization" in arm.engine:
            layers = engine.fp8rl_control({"op": "layers"})["layers"]
            formats = [layer["format"] for layer in layers]
            weight_bytes = measured.weight_bytes(engine)
        # the first prefill: an FP8 KV cache measures its scales here
        answers = measured.answers(engine, tokenizer, questions, work.new)
        windows = measured.windows_of(tokenizer, work.length, work.windows)
        nll = measured.nll(engine, windows)
        prompts = [measured.chat(tokenizer, question) for question in measured.QUESTIONS]
        metrics = measured.mismatch(engine, model, prompts * work.samples, work.new)
    return {
        "kind": "arm",
        "arm": arm.name,
        "matrices": len(formats),
        "quantized_matrices": len(formats) - formats.count("bf16"),
        "weight_bytes": weight_bytes,
        "answers": dict(zip(questions, map(decode, answers), strict=True)),
        "regret": {
            question: round(max(measured.regrets(model, prompt, answer)), 3)
            for question, prompt, answer in zip(questions, prompts, answers, strict=False)
        },
        "perplexity": round(measured.perplexity(nll), 4),
        "nll": [round(value, 5) for value in nll],
        "tokens": len(windows) * (work.length - 1),
        **{
            name: float(f"{metrics[name]:.4g}")
            for name in ("mismatch_kl_k3", "ess", "logprob_abs_diff_mean", "tokens")
            if name != "tokens"
        },
        "sampled_tokens": int(metrics["tokens"]),
        "seconds": round(time.perf_counter() - started),
    }


def run(checkpoint: Path, arms: list[str], output: Path, work: Work, limit_s: float) -> list[Row]:
    """Measure the arms that ``output`` has not, while there is time; returns all rows.

    Raises:
        ValueError: ``output`` holds rows of other settings, texts, commit or versions.
    """
    until = time.monotonic() + limit_s
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"texts": measured.digests(), "work": vars(work)}
    facts = {"kind": "environment", **environment(device), "commit": commit(), **about}
    rows = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    if rows and {**rows[0], "date": ""} != {**facts, "date": ""}:
        raise ValueError(f"{output} is of another run; remove it, or name another --output")
    if not rows:
        output.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            _add(output, row) for row in (facts, {"kind": "weights", **weights.look(checkpoint)})
        ]
    for name in arms:
        if name not in {row.get("arm") for row in rows} and time.monotonic() < until:
            rows.append(_add(output, measure(checkpoint, ARMS[name], work, device)))
    return rows


def _add(output: Path, row: Row) -> Row:
    with output.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description="Answers, perplexity and mismatch by format.")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/smollm2"), help="made if absent"
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--output", type=Path, required=True, help="JSONL")
    parser.add_argument("--windows", type=int, help="of text, fewer or more than usual")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no arm after it")
    args = parser.parse_args()
    work = WORK["cuda" if torch.cuda.is_available() else "cpu"]
    if args.windows is not None:
        work = Work(**{**vars(work), "windows": args.windows})
    run(convert(args.checkpoint), args.arms, args.output, work, args.limit_s)


if __name__ == "__main__":
    main()
