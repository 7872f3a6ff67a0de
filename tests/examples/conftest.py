"""The examples are scripts beside each other, not a package."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"
# The processes that a test spawns must find both as well.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A gloo process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
