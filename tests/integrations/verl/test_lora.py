"""Merged adapters: verl's own generator of an FSDP2 model of PEFT's, read by our adapter.

The engine is not here (``test_verl`` has it).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
import torch.distributed as dist

from sgl_fp8rl.verl import adapter
from tests.engine import models
from tests.integrations.verl import lora
from tests.integrations.verl.cluster import handed_over, sharded
from tests.integrations.verl.test_plugin import an_adapter

FAMILIES = {"qwen3": {"tie_word_embeddings": True}, "qwen3_moe": {}}
"""In the first, the head is the embedding; in the second, a layer's experts are one parameter."""
Tensors = dict[str, torch.Tensor]


class SendError(Exception):
    """Ends an update before its end."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the only rank, on a CPU as verl's GPU."""
    from verl.utils import fsdp_utils
    from verl.workers.engine.fsdp import transformer_impl

    store = tmp_path_factory.mktemp("rank") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patched:  # what `handed_over` sets
        for module in (fsdp_utils, transformer_impl):
            patched.setattr(module, "get_device_id", None)
        patched.setattr(transformer_impl, "log_gpu_memory_usage", None)
        yield
    dist.destroy_process_group()


class Trainer:
    """A model with an adapter, and what it is merged."""

    def __init__(self, family: str, folder: Path) -> None:
        start = models.make_checkpoint(family, folder / "start", **FAMILIES[family])
        path, merged = lora.make(start, folder)
        self.family, self.model = family, sharded(start, path)
        self.merged = dict(models.named_tensors(merged))
        self.before = self.held()
        self.adapter = [name for name in self.before if "lora_" in name]
        assert self.adapter

    def held(self) -> Tensors:
        return {name: t.full_tensor().clone() for name, t in self.model.state_dict().items()}

    def is_merged(self) -> bool:
        now = self.held()
        flags = {m.merged for m in self.model.modules() if hasattr(m, "merged_adapters")}
        (flag,) = flags
        moved = {name for name in now if not torch.equal(now[name], self.before[name])}
        assert bool(moved) is flag, moved
        return bool(flag)

    def update(self, leads: bool = True) -> None:
        rank = an_adapter(leads)
        rank.model_config.hf_config.model_type = self.family
        asyncio.run(rank.update_weights(handed_over(self.model), global_steps=0))


@pytest.fixture(scope="module", params=FAMILIES)
def trainer(
    request: pytest.FixtureRequest, alone: None, tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    return Trainer(request.param, tmp_path_factory.mktemp(request.param))


def test_the_merged_policy_is_sent_and_the_trainers_stays(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Tensors = {}
    monkeypatch.setattr(
        adapter.trainer_bridge, "update", lambda stream, **_: sent.update(dict(stream))
    )
    trainer.update()
    sent.setdefault("lm_head.weight", sent["model.embed_tokens.weight"])
    wanted = {"lm_head.weight": trainer.merged["model.embed_tokens.weight"], **trainer.merged}
    assert sent.keys() == wanted.keys()
    assert all(torch.equal(sent[name].bfloat16(), wanted[name]) for name in wanted)
    assert not trainer.is_merged()


@pytest.mark.parametrize("limit", [0, 1, 10])
def test_a_failed_update_takes_the_adapter_out_again(
    trainer: Trainer, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of it, it is in."""
    merged = []

    def fail(stream: Iterator[Any], **_: Any) -> None:
        for _pair in zip(range(limit), stream, strict=False):
            merged.append(trainer.is_merged())
        raise SendError

    monkeypatch.setattr(adapter.trainer_bridge, "update", fail)
    with pytest.raises(SendError):
        trainer.update()
    assert merged == [True] * limit
    assert not trainer.is_merged()


def test_a_rank_that_does_not_lead_takes_it_out_too(trainer: Trainer) -> None:
    trainer.update(leads=False)
    assert not trainer.is_merged()
