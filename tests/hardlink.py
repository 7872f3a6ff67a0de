"""Make the large files that two environments have in common one file on the disk.

``python -m tests.hardlink .venv/0.5.23`` compares it with its siblings: 2.6 GB of CUDA libraries.
Each environment stays whole; pip replaces files and does not write into them.
"""

import filecmp
import os
import sys
from pathlib import Path

SMALLEST = 1 << 20
"""Bytes; below this there is little to gain."""


def share(environment: Path) -> int:
    """Link files of an environment to equal ones at the same place in a sibling.

    Returns:
        bytes that were freed.
    """
    freed = 0
    siblings = [path for path in environment.parent.iterdir() if path != environment]
    for path in environment.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.stat().st_size < SMALLEST:
            continue
        for sibling in siblings:
            other = sibling / path.relative_to(environment)
            if other.is_symlink() or not other.is_file() or other.samefile(path):
                continue
            if filecmp.cmp(path, other, shallow=False):
                freed += path.stat().st_size
                link = path.with_name(path.name + ".link")
                os.link(other, link)
                link.replace(path)
                break
    return freed


if __name__ == "__main__":
    print(f"{share(Path(sys.argv[1])) / 1e9:.1f} GB are shared with other environments")
