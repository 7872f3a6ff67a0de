"""A pretrained checkpoint on two CPU cores, in some minutes: convert, answer, measure, learn.

    python -m benchmarks.pretrained.demo

BF16 and FP8 with FP8 KV, each in a real engine: greedy answers, the perplexity of this repository's
pages, the mismatch with a trainer, and a few steps of GRPO with an update each. So few show that
the whole loop runs, not that it learns: docs/pretrained.md has the runs for that.
"""

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.parity import models, run, start
from benchmarks.parity.arms import ARMS
from benchmarks.parity.run_log import LOG, rows_of
from benchmarks.parity.settings import SIZES, Study
from benchmarks.pretrained import run as formats
from benchmarks.pretrained.run import Row, Work

MEASURED = ("bf16", "fp8-kv8")
TRAINED = ("smollm2-bf16", "smollm2-fp8-kv8")
WORK = Work(length=128, windows=4, answers=2, new=24, samples=1)
SETTINGS = replace(
    SIZES[models.PRETRAINED], steps=2, prompts=2, group=4, evaluation_problems=2, evaluate_every=2
)
SEED = 0


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning")
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct on a CPU: FP8 beside BF16.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo-pretrained"), help="folder of all files"
    )
    out: Path = parser.parse_args().out
    study = Study(out, models.PRETRAINED, SETTINGS, torch.device("cpu"))
    checkpoint = start.start_of(study, models.PRETRAINED)
    log = out / "formats.jsonl"
    log.unlink(missing_ok=True)
    rows = formats.run(checkpoint, list(MEASURED), log, WORK, float("inf"))
    steps = {}
    for arm in TRAINED:
        shutil.rmtree(study.run_folder(arm, SEED), ignore_errors=True)
        run.run(study, ARMS[arm], SEED, float("inf"))
        every = rows_of(study.run_folder(arm, SEED) / LOG)
        steps[arm] = [row for row in every if row["kind"] == "step"]
    print(summary({row["arm"]: row for row in rows if row["kind"] == "arm"}, steps))


def summary(measured: dict[str, Row], steps: dict[str, list[Row]]) -> str:
    """What a reader is told at the end."""
    bf16, fp8 = (measured[arm] for arm in MEASURED)
    lines = ["", "SmolLM2-135M-Instruct, from a 4-bit file: not the published BF16 checkpoint.", ""]
    for question, answer in bf16["answers"].items():
        lines += [question, f"  BF16  {answer!r}", f"  FP8   {fp8['answers'][question]!r}"]
    lines += [
        "",
        f"perplexity of {bf16['tokens']} tokens: {bf16['perplexity']:.2f} in BF16, "
        f"{fp8['perplexity']:.2f} in FP8 with FP8 KV ({fp8['quantized_matrices']} FP8 matrices)",
        f"mismatch KL with a BF16 trainer: {bf16['mismatch_kl_k3']:.1e} and "
        f"{fp8['mismatch_kl_k3']:.1e} nats a token",
    ]
    for arm, mine in steps.items():
        seconds = max(row["update_s"] for row in mine)
        lines.append(
            f"{arm}: {len(mine)} steps of GRPO, an update took {seconds:.1f} s at most, mismatch "
            f"KL at the first {mine[0]['mismatch_kl_k3']:.1e}"
        )
    lines.append("So few steps do not show learning (docs/pretrained.md). Times are of a CPU.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
