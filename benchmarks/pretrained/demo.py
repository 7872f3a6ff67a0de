"""A pretrained checkpoint on two CPU cores, in some minutes: convert, answer, measure, learn.

    python -m benchmarks.pretrained.demo

BF16, FP8, and FP8 but for layers that ``sgl-fp8rl precision`` keeps in BF16, the last two with INT8
KV, each in a real engine: greedy answers, the perplexity of this repository's pages, the mismatch
with a trainer, and a few steps of GRPO with an update each. So few show that the whole loop runs,
not that it learns: docs/pretrained.md has the runs for that.
"""

import argparse
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.learning import run, start
from benchmarks.learning.run import Row
from benchmarks.learning.study import ALL_BF16, LOG, PRETRAINED, SIZES, Arm, Study
from benchmarks.pretrained import measured
from benchmarks.pretrained.arms import ARMS, INT8_KV, KEPT

MEASURED = {"bf16-head": "BF16", "fp8-int8kv": "FP8", "mixed-int8kv": "mixed"}
"""Names in ``ARMS``, and what the summary calls them."""
TRAINED = (
    Arm("smollm2-bf16", ALL_BF16),
    Arm(
        "smollm2-mixed-int8kv",
        " ".join(*KEPT.values()),
        INT8_KV | {"attention_backend": None},
    ),
)
LENGTH, WINDOWS = 128, 4
"""Tokens of a window of text, and how many."""
ANSWERS, NEW, SAMPLES = 3, 24, 2
"""Questions that are answered, tokens of a response, and responses that the mismatch is of."""
SETTINGS = replace(
    SIZES[PRETRAINED], steps=2, prompts=2, group=4, evaluation_problems=2, evaluate_every=2
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
    study = Study(out, PRETRAINED, SETTINGS, torch.device("cpu"))
    start.make(study)
    rows = {name: measure(study.start, name, study.device) for name in MEASURED}
    steps = {}
    for arm in TRAINED:
        shutil.rmtree(study.run_folder(arm.name, SEED), ignore_errors=True)
        run.run(study, arm, SEED)
        every = run.rows_of(study.run_folder(arm.name, SEED) / LOG)
        steps[arm.name] = [row for row in every if row["kind"] == "step"]
    print(summary(rows, steps))


def measure(checkpoint: Path, name: str, device: torch.device) -> Row:
    """What an arm's engine answers, and how far it is from a BF16 trainer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    keywords, questions = ARMS[name], measured.QUESTIONS[:ANSWERS]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    prompts = [measured.chat(tokenizer, question) for question in measured.QUESTIONS]
    with measured.running(checkpoint, keywords, device) as engine:
        formats: list[str] = []
        weight_bytes = sum(2 * parameter.numel() for parameter in model.parameters())
        if "quantization" in keywords:
            layers = engine.fp8rl_control({"op": "layers"})["layers"]
            formats = [layer["format"] for layer in layers]
            weight_bytes = measured.weight_bytes(engine)
        # the first prefill: an FP8 KV cache measures its scales here
        answers = measured.answers(engine, tokenizer, questions, NEW)
        windows = measured.windows_of(tokenizer, LENGTH, WINDOWS)
        nll = measured.nll(engine, windows)
        metrics = measured.mismatch(engine, model, prompts * SAMPLES, NEW)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return {
        "quantized_matrices": len(formats) - formats.count("bf16"),
        "weight_bytes": weight_bytes,
        "answers": dict(zip(questions, map(decode, answers), strict=True)),
        "regret": {
            question: max(measured.regrets(model, prompt, answer))
            for question, prompt, answer in zip(questions, prompts, answers, strict=False)
        },
        "perplexity": measured.perplexity(nll),
        "tokens": len(windows) * (LENGTH - 1),
        "mismatch_kl_k3": metrics["mismatch_kl_k3"],
    }


def summary(found: dict[str, Row], steps: dict[str, list[Row]]) -> str:
    """What a reader is told at the end."""
    lines = ["", "SmolLM2-135M-Instruct, from a 4-bit file: not the published BF16 checkpoint."]
    lines += [
        "FP8 and mixed: INT8 KV. In brackets: by how much the BF16 trainer prefers another token"
    ]
    lines += ["at most; near 0, rounding decides, which differs by machine in BF16 as well.", ""]
    bf16 = found["bf16-head"]
    for question in bf16["answers"]:
        lines.append(question)
        for arm, name in MEASURED.items():
            row = found[arm]
            answer, regret = row["answers"][question], row["regret"][question]
            lines.append(f"  {name:5} {answer!r} ({regret:.2f} nats)")
    lines.append("")
    for arm, name in MEASURED.items():
        row = found[arm]
        lines.append(
            f"{name:5} mismatch KL with a BF16 trainer {row['mismatch_kl_k3']:.1e} nats a token, "
            f"perplexity of {row['tokens']} tokens {row['perplexity']:.2f}, weights "
            f"{row['weight_bytes'] / 1e6:.0f} MB ({row['quantized_matrices']} matrices in FP8)"
        )
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
