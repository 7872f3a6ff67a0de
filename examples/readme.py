"""Write the README's measured blocks from the committed result files: python examples/readme.py."""

import json
import re
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "examples" / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def grpo() -> str:
    """The demo's closing table."""
    rows = [json.loads(line) for line in (RESULTS / "grpo.jsonl").read_text().splitlines()]
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    lines = [
        "| rollouts | reward before | after | mismatch KL (k3, nats) | ESS | update | rollout |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s['arm'].upper()} | {s['before']:.2f} | {s['after']:.2f} | {s['mismatch_kl_k3']:.1e} "
        f"| {s['ess']:.4f} | {1e3 * s['update_s']:.0f} ms | {s['tokens_per_s']:.0f} tokens/s |"
        for s in report.summaries(rows)
    ]
    lines += [
        "",
        f"`make demo`, {first['parameters'] / 1e6:.1f} M parameters, two CPU cores, {versions}. "
        f"KL and ESS are means over {first['steps']} steps, times are medians. On a CPU "
        f"FP8 arithmetic is emulated, so FP8 is slower there, not faster.",
    ]
    return "\n".join(lines)


BLOCKS = {"grpo": grpo}


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    readme.write_text(BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n{match[3]}", text))


if __name__ == "__main__":
    main()
