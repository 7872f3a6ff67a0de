"""Lines by folder, words of the pages, and caps that only fall: ``python -m tests.sizes``.

``tests/sizes.json`` has the most that each part may have; a part beyond it fails CI. ``--lower``
puts today's size, to the next hundred, in the place of each larger cap. Standard library only.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
CAPS = ROOT / "tests" / "sizes.json"
STEP = 100
"""Room for a bug fix and its test."""
CODE = ("sgl_fp8rl", "trainer_bridge", "server_args", "benchmarks", "tests")
"""Folders of which lines are counted."""
PAGES = "docs"
"""The folder of which words are counted."""
SUFFIXES = (".py", ".cu")
ROW = "{:<34}{:>6}{:>9}{:>8}{:>6}  {}"
Lines = dict[Path, int]


def lines_of(folder: Path) -> Lines:
    """The lines of each source file under a folder."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES)
    return {file: len(file.read_text().splitlines()) for file in files}


def sizes(root: Path = ROOT) -> dict[str, int]:
    """Lines of each folder of code, and words of the pages."""
    counts = {name: sum(lines_of(root / name).values()) for name in CODE}
    words = sum(len(page.read_text().split()) for page in (root / PAGES).rglob("*.md"))
    return counts | {PAGES: words}


def table(root: Path = ROOT) -> str:
    """Files, lines, and the median and the largest file, of every folder of code."""
    rows = [ROW.format("folder", "files", "lines", "median", "max", "largest file")]
    for name in CODE:
        by_folder = defaultdict[Path, Lines](dict)
        for file, count in lines_of(root / name).items():
            by_folder[file.parent][file] = count
        whole = {file: count for lines in by_folder.values() for file, count in lines.items()}
        rows += ["", _row(name, whole)]
        if len(by_folder) > 1:
            rows += [_row(f"  {f.relative_to(root)}", by_folder[f]) for f in sorted(by_folder)]
    return "\n".join(rows)


def _row(name: str, lines: Lines) -> str:
    largest = max(lines, key=lines.__getitem__)
    counts = lines.values()
    return ROW.format(
        name, len(lines), f"{sum(counts):,}", f"{median(counts):.0f}", max(counts), largest.name
    )


def beyond(now: dict[str, int], caps: dict[str, int]) -> Iterable[str]:
    """A sentence for each part that is larger than its cap."""
    for name, count in now.items():
        if count > caps[name]:
            unit = "words" if name == PAGES else "lines"
            yield (
                f"{name}/ has {count:,} {unit}, {count - caps[name]:,} more than its cap in "
                "tests/sizes.json: delete as many there"
            )


def lowered(now: dict[str, int], caps: dict[str, int]) -> dict[str, int]:
    """The caps, where a part is smaller its size, to the next whole ``STEP``."""
    whole = {name: -(-count // STEP) * STEP for name, count in now.items()}
    return {name: min(count, caps.get(name, count)) for name, count in whole.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sizes", description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower caps to today's sizes")
    arguments = parser.parse_args()
    now, caps = sizes(), json.loads(CAPS.read_text())
    print(table(), "\n")
    for name, count in now.items():
        print(f"{name:<16}{count:>8,} of {caps[name]:,} {'words' if name == PAGES else 'lines'}")
    if arguments.lower:
        CAPS.write_text(json.dumps(lowered(now, caps), indent=1) + "\n")
        return 0
    too_large = list(beyond(now, caps))
    print(*too_large, sep="\n", file=sys.stderr, end="\n" if too_large else "")
    return int(bool(too_large))


if __name__ == "__main__":
    sys.exit(main())
