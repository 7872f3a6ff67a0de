"""What a trainer does to its shards between two updates: no engine reads where they lay before."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from sgl_fp8rl.protocol.host_memory import HostMemory
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import fake_ipc, ranks
from tests.trainer_bridge.test_placed_shards import (
    COLLECTIVE_TIMEOUT_S,
    WORLD,
    GpuEngine,
    Trainer,
)
from trainer_bridge.shards.placed_shards import PlacedShards, ShardRegistry
from trainer_bridge.updates.update import update

FIRST, SECOND = "attn.q.weight", "attn.k.weight"
"""Of one shape."""


class Changes:
    """Each method is one change; the parameters are left as they are otherwise."""

    def __init__(self, memories: fake_ipc.Memories, rank: int) -> None:
        self._memories, self._rank = memories, rank
        self.named = Trainer(memories, rank, torch.bfloat16).named
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


def told_anew(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
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


def not_read_where_they_lay(rank: int, folder: Path) -> None:
    """The memory of before is still there, with old values."""
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        trainer = Trainer(memories, rank, torch.bfloat16)
        engine = GpuEngine(interpreter.writable) if rank == 0 else None
        moved, cast_at = 2, 5
        for version in range(8):
            if version == moved:
                for tensor in trainer.named.values():
                    parameter: Any = tensor
                    shard = parameter._local_tensor
                    content = memories.allocate(max(shard.nbytes, 2))[: shard.nbytes]
                    parameter._local_tensor = content.view(shard.dtype).view(shard.shape)
            if version == cast_at:
                trainer = Trainer(memories, rank, torch.float32)
            tensors = toy.checkpoint(version)
            result = update(trainer.become(tensors), engine, version=version)
            assert engine is None or engine.holds(tensors), version
            assert (result.mapped_bytes > 0) == (version not in (0, moved, cast_at)), version


@pytest.mark.guarantee("memory", fault="shards that are swapped, cast, tied or moved")
@pytest.mark.parametrize("case", [told_anew, not_read_where_they_lay])
@pytest.mark.timeout(240)
def test_what_changed_is_not_read_where_it_lay(tmp_path: Path, case: Any) -> None:
    ranks.run(case, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
