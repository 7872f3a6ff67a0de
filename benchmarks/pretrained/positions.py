"""Mismatch by the position of a token, with weights and KV cache in 8 bits, each alone and both.

    python -m benchmarks.pretrained.positions runs/smollm2

Six engines continue the same texts; the k3 of what each samples is against transformers in BF16,
whose head, as the engines', is FP32. Prints a table in markdown.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.environment import environment
from benchmarks.learning.study import ALL_BF16
from benchmarks.pretrained.arms import HEAD, INT8_KV, OURS
from benchmarks.pretrained.measured import mismatch, running, windows_of

WEIGHTS: dict[str, dict[str, Any]] = {"BF16": {"fp8rl_ignored_layers": (ALL_BF16,)}, "FP8": {}}
CACHES: dict[str, dict[str, Any]] = {
    "BF16": {},
    "E4M3": {"kv_cache_dtype": "fp8_e4m3"},
    "INT8": INT8_KV,
}
PROMPT = 64
"""Tokens of text that a response continues."""
POSITIONS = (0, 16, 64, 256)
"""Where groups of tokens begin, of ``mismatch_metrics``; each ends where the next begins."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Mismatch by position, by format.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--new", type=int, default=640, help="most tokens of a response")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts = windows_of(AutoTokenizer.from_pretrained(args.checkpoint), PROMPT, args.prompts)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16).to(device)
    print("| weights, KV cache | tokens |", " | ".join(f"k3 from {p}" for p in POSITIONS), "|")
    print("|---|---|" + "---|" * len(POSITIONS))
    for weights, layers in WEIGHTS.items():
        for cache, codes in CACHES.items():
            with running(args.checkpoint, OURS | HEAD | layers | codes, device) as engine:
                found = mismatch(engine, model, prompts, args.new)
            k3 = [found.get(f"position_{p}/mismatch_kl_k3", float("nan")) for p in POSITIONS]
            cells = [f"{weights}, {cache}", f"{found['tokens']:,.0f}", *(f"{x:.1e}" for x in k3)]
            print("|", " | ".join(cells), "|", flush=True)
    print(environment("python -m benchmarks.pretrained.positions"))


if __name__ == "__main__":
    main()
