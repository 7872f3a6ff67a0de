"""Fuzz every decoder: ``python -m tests.fuzz [--inputs N] [--seed S] [--only NAME]``."""

import argparse
import itertools
import time
from collections import Counter

from tests.fuzz.decoder import watched
from tests.fuzz.groups import GROUPS, SHARES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all decoders together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one decoder")
    options = parser.parse_args()
    count = options.inputs if options.only else -(-options.inputs // SHARES)
    total, start = 0, time.monotonic()
    print("| decoder | inputs | outcomes | seconds |\n|---|---|---|---|")
    for group in GROUPS:
        with watched(), group.decoders() as decoders:
            for decoder in decoders:
                if options.only not in (None, decoder.name):
                    continue
                began = time.monotonic()
                inputs = itertools.islice(decoder.inputs(options.seed), count)
                outcomes = Counter(map(decoder.check, inputs))
                total += sum(outcomes.values())
                shown = ", ".join(f"{name} {n}" for name, n in outcomes.most_common())
                seconds = time.monotonic() - began
                print(f"| {decoder.name} | {count} | {shown} | {seconds:.0f} |", flush=True)
    print(f"\n{total} inputs, seed {options.seed}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
