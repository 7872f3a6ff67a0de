"""verl's adapters on two ranks and the contract of adapters; the engine is without SGLang."""

import asyncio
import secrets
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
import torch.distributed as dist

from tests.integrations.verl.test_plugin import an_adapter
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge.adapters.contract import check_resume, check_updates

pytestmark = pytest.mark.timeout(400)
COLLECTIVE_TIMEOUT_S, JOIN_S = 60.0, 300.0
TENSORS = toy.checkpoint()


def walk() -> Iterator[tuple[str, torch.Tensor]]:
    """As verl's: both ranks take part in each tensor."""
    for name, tensor in TENSORS.items():
        dist.barrier()
        yield name, tensor


def two_ranks(rank: int, folder: Path) -> None:
    engine = engine_of(1) if rank == 0 else None

    def start() -> Any:
        # as in a new process
        import_module("trainer_bridge.updates.update").RUN = secrets.token_hex(4)
        adapter = an_adapter(leads=rank == 0)
        adapter._fp8rl_engine, adapter.model_config.local_path = engine, None

        def sync(pairs: Any, step: int | None) -> int:
            asyncio.run(adapter.update_weights(pairs, global_steps=step))
            return adapter._fp8rl_version  # type: ignore[no-any-return]

        return sync

    def sample() -> list[int]:
        return [] if engine is None else engine.sampled()

    check_updates(engine, walk, start(), sample, dist.group.WORLD)
    check_resume(engine, walk, start, sample, dist.group.WORLD)
    assert engine is None or holds(engine, TENSORS)
    (folder / f"passed-{rank}").touch()


def test_updates_and_resumes(tmp_path: Path) -> None:
    ranks.run(two_ranks, tmp_path, 2, COLLECTIVE_TIMEOUT_S, JOIN_S)
    assert len(list(tmp_path.glob("passed-*"))) == 2
