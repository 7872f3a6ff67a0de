"""Merge the logs of all runs into the result file, and make docs/parity.md and its picture of it.

python examples/parity/report.py runs/parity
"""

import argparse
from pathlib import Path

from benchmarks import readme
from benchmarks.parity import summary

RESULTS = readme.RESULTS / "parity.jsonl"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Merge logs into the result file and the page.")
    parser.add_argument("states", nargs="+", type=Path, help="folders given to run_all.py --state")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    summary.write(args.output, summary.summarize(args.states))
    if args.output == RESULTS:
        readme.main()


if __name__ == "__main__":
    main()
