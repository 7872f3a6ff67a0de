"""What a trainer does to its shards between two updates: no engine reads where they lay before."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from sgl_fp8rl.protocol.host_memory import HostMemory
from tests.trainer_bridge import fake_ipc
from tests.trainer_bridge.shards_job import Trainer, run
from trainer_bridge.shards.placed_shards import PlacedShards, ShardRegistry

FIRST, SECOND = "attn.q.weight", "attn.k.weight"
"""Of one shape."""


class Changes:
    """Each method is one change; the parameters are left as they are otherwise."""

    def __init__(self, memories: fake_ipc.Memories, rank: int) -> None:
        self._memories, self._rank = memories, rank
        self.named = Trainer(memories, rank).named
        self._kept: list[Any] = []

    def swap_the_shard(self) -> None:
        self._set(FIRST, self._elsewhere(FIRST))

    def replace_data(self) -> None:
        self.shard(FIRST).data = self._elsewhere(FIRST)

    def exchange_two(self) -> None:
        first, second = self.shard(FIRST), self.shard(SECOND)
        self._set(FIRST, second)
        self._set(SECOND, first)

    def read_as_another_dtype(self) -> None:
        self.shard(FIRST).data = self.shard(FIRST).view(torch.float16)

    def cast(self) -> None:
        self.named = Trainer(self._memories, self._rank, torch.float32).named

    def hold_it_whole(self) -> None:
        """In the same memory, with fewer rows in all."""
        mesh = cast(DTensor, self.named[FIRST]).device_mesh
        self.named[FIRST] = DTensor.from_local(
            self.shard(FIRST), mesh, (Replicate(),), run_check=False
        )

    def rename(self) -> None:
        self.named["other.weight"] = self.named.pop(SECOND)

    def reorder(self) -> None:
        self.named[FIRST] = self.named.pop(FIRST)

    def add(self) -> None:
        self.named["added.weight"] = torch.ones(3)

    def tie(self) -> None:
        self.named["tied.weight"] = self.named[FIRST]

    def take_away(self) -> None:
        del self.named["norm.weight"]

    def allocate_again_at_the_address(self) -> None:
        address, made = self.shard(FIRST).data_ptr(), self._memories.made
        self._kept.append(made[address])
        made[address] = HostMemory(self.shard(FIRST).nbytes)

    def shard(self, name: str) -> torch.Tensor:
        shard: torch.Tensor = cast(Any, self.named[name])._local_tensor
        return shard

    def _set(self, name: str, shard: torch.Tensor) -> None:
        cast(Any, self.named[name])._local_tensor = shard

    def _elsewhere(self, name: str) -> torch.Tensor:
        shard = self.shard(name)
        content = self._memories.allocate(shard.nbytes)
        return content.view(shard.dtype).view(shard.shape).copy_(shard)


def told_anew(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    memories, _ = fake_ipc.install(patch)
    changes, registry = Changes(memories, rank), ShardRegistry()

    def place() -> PlacedShards | str | None:
        return registry.place(list(changes.named.items()))

    assert isinstance(place(), PlacedShards)
    for name, change in vars(Changes).items():
        if name.startswith("_") or name == "shard":
            continue
        known = place()
        assert isinstance(known, str), name
        assert place() == known, "the control: nothing has changed"
        change(changes)
        assert isinstance(place(), PlacedShards), name


@pytest.mark.guarantee("memory", fault="shards that are swapped, cast, tied or moved")
@pytest.mark.timeout(240)
def test_what_changed_is_told_anew(tmp_path: Path) -> None:
    """Where it is told, ``test_placed_shards.py`` has what engines hold then."""
    run([told_anew], tmp_path)
