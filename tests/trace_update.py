"""Which files a weight passes from ``trainer_bridge.update`` to the engine's storage:
``python -m tests.trace_update`` lists them by folder.

The engine is a ``FakeEngine`` of one rank: real update steps over real sockets, in threads of this
process, on a CPU. From storage to the GEMM it is ``engine/layers/linear.py`` and what
``engine/gemm/linear.py`` calls, which are not counted.
"""

import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server_args", "sgl_fp8rl", "trainer_bridge")


MOST = 35
"""What ``test_sizes.py`` allows; it only falls."""


def files() -> dict[str, list[str]]:
    """By folder, those in which a function was called."""
    import trainer_bridge

    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    engine = FakeEngine([toy.engine(toy.toy(0, 1), toy.SHAPES)])
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        trainer_bridge.update(toy.checkpoint(), engine, version=0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    folders = defaultdict(list)
    for path in map(Path, sorted(seen)):
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            folders[str(path.relative_to(ROOT).parent)].append(path.name)
    return folders


def main() -> None:
    found = files()
    for folder, names in sorted(found.items()):
        print(f"{folder} ({len(names)}): {' '.join(names)}")
    print(f"{sum(map(len, found.values()))} files, of at most {MOST}")


if __name__ == "__main__":
    main()
