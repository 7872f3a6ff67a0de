"""Ranks of a trainer whose shards engines read where they lie, and engines on GPUs."""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sgl_fp8rl.receiver.writers.shared_memory import SharedMemory
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.sgl_fp8rl.receiver.fake_gpu import span_of
from tests.trainer_bridge import fake_ipc, ranks
from tests.trainer_bridge.test_update import holds
from trainer_bridge.shards.codes_memory import CodesMemory
from trainer_bridge.updates.update import UpdateResult, update

WORLD, TP = 2, 2
COLLECTIVE_TIMEOUT_S = 30
GPU, OTHER = fake_ipc.GPU, "GPU-00000000-0000-0000-0000-000000000001"
BF16 = torch.bfloat16
CODED = {name for name in toy.FP8_NAMES if not name.endswith(("attn.o.weight", "down.weight"))}
"""What ranks quantize for several engines; of the others each of two ranks has half a block."""


class GpuEngine(FakeEngine):
    """Of two ranks, which run the writer of a GPU.

    Args:
        is_elsewhere: on other GPUs than the trainer's.
    """

    def __init__(self, writable: list[tuple[int, int]], is_elsewhere: bool = False) -> None:
        super().__init__([toy.engine(toy.toy(rank, TP), toy.SHAPES) for rank in range(TP)])
        self.visible_gpus = [GPU, OTHER] if is_elsewhere else [GPU]
        self.told["gpus"] = [OTHER] if is_elsewhere else [GPU] * TP
        for weights in self.ranks:
            weights.memory = SharedMemory(torch.device("cuda", 0))
            writable += [span_of(parameter) for parameter in weights.model.parameters()]


Elsewhere = partial(GpuEngine, is_elsewhere=True)
Make = Callable[[list[tuple[int, int]]], GpuEngine]


class Trainer:
    """The shards of this rank, as FSDP2 has them, in memory that can be shared."""

    def __init__(self, memories: fake_ipc.Memories, rank: int, dtype: torch.dtype = BF16) -> None:
        self._memories, self._rank, self._dtype = memories, rank, dtype
        self.named: dict[str, torch.Tensor] = {}
        mesh = init_device_mesh("cpu", (WORLD,))
        for name, shape in toy.SHAPES.items():
            size = -(-shape[0] // WORLD)
            rows = max(min(size, shape[0] - rank * size), 0)
            shard = self._shard((rows, *shape[1:]))
            strides = torch.empty(shape, device="meta").stride()
            self.named[name] = DTensor.from_local(
                shard, mesh, (Shard(0),), shape=torch.Size(shape), stride=strides
            )

    def _shard(self, shape: Sequence[int]) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * self._dtype.itemsize
        content = self._memories.allocate(max(nbytes, self._dtype.itemsize))
        return content[:nbytes].view(self._dtype).view(*shape)

    def move(self) -> None:
        """Let the shards lie elsewhere from now on; where they lay, old values stay."""
        for tensor in self.named.values():
            parameter = cast(Any, tensor)
            parameter._local_tensor = self._shard(parameter._local_tensor.shape)

    def become(self, tensors: toy.Tensors) -> dict[str, torch.Tensor]:
        """Write weights into the shards, where they lie."""
        for name, tensor in tensors.items():
            size = -(-tensor.shape[0] // WORLD)
            shard = cast(Any, self.named[name]).to_local()
            shard.copy_(tensor[self._rank * size :][: len(shard)].to(self._dtype))
        return self.named


def mapped_bytes(tensors: toy.Tensors, coded: Collection[str] = (), itemsize: int = 2) -> int:
    """What engines read in place of such weights, where some are codes with their scales."""
    codes = sum(t.numel() + 4 * (t.numel() >> 14) for n, t in tensors.items() if n in coded)
    return codes + sum(t.numel() * itemsize for n, t in tensors.items() if n not in coded)


PLAIN = mapped_bytes(toy.checkpoint())
AS_CODES = mapped_bytes(toy.checkpoint(), CODED)


def counted_gathers(patch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what is gathered from now on."""
    gathered: list[torch.Size] = []
    full_tensor = DTensor.full_tensor

    def counted(tensor: DTensor, **options: Any) -> torch.Tensor:
        gathered.append(tensor.shape)
        return full_tensor(tensor, **options)

    patch.setattr(DTensor, "full_tensor", counted)
    return gathered


class Job:
    """One rank of a trainer, and on the first rank engines."""

    def __init__(
        self, patch: pytest.MonkeyPatch, rank: int, *make: Make, dtype: torch.dtype = BF16
    ) -> None:
        self.memories, interpreter = fake_ipc.install(patch)
        self.writable = interpreter.writable
        self.trainer = Trainer(self.memories, rank, dtype)
        self.engines = [each(self.writable) for each in make] if rank == 0 else []
        self.launches = 0
        launch = CodesMemory.launch

        def counted(memory: CodesMemory, weights: Any = None) -> None:
            self.launches += 1
            launch(memory, weights)

        patch.setattr(CodesMemory, "launch", counted)
        self.gathered = counted_gathers(patch)
        self.versions = count()

    def step(self, **options: Any) -> UpdateResult:
        """An update to other weights; all engines hold the oracle's bytes."""
        version = next(self.versions)
        tensors = toy.checkpoint(version)
        self.gathered.clear()
        named = self.trainer.become(tensors)
        return self.check(update(named, self.engines or None, version=version, **options), tensors)

    def check(self, result: UpdateResult, tensors: toy.Tensors) -> UpdateResult:
        assert not self.memories.torn
        assert all(holds(engine, tensors) for engine in self.engines), result.version
        return result

    def read(self, steps: int) -> list[int]:
        """How many bytes engines read in place in so many updates."""
        return [self.step().mapped_bytes for _ in range(steps)]

    def step_to(self, version: int) -> UpdateResult:
        self.versions = count(version)
        return self.step()

    def fails(self, why: str, error: type[BaseException] = Exception, **bad: float) -> None:
        """An update that fails: of sound weights, but for the last value of some."""
        version = next(self.versions)
        tensors = toy.checkpoint(version)
        for name, value in bad.items():
            tensors[name].view(-1)[-1] = value
        with pytest.raises(error, match=why):
            update(self.trainer.become(tensors), self.engines or None, version=version)


Case = Callable[[pytest.MonkeyPatch, int, Path], None]


def each_case(rank: int, folder: Path, cases: Sequence[Case]) -> None:
    logging.disable(logging.CRITICAL)
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            case(patch, rank, folder)
        ranks.meet(rank, folder, case.__name__, WORLD)


def run(cases: Sequence[Case], folder: Path, join_s: float = ranks.JOIN_S) -> None:
    """All cases in one job: processes take seconds to start."""
    work = partial(each_case, cases=cases)
    ranks.run(work, folder, WORLD, COLLECTIVE_TIMEOUT_S, join_s=join_s)
