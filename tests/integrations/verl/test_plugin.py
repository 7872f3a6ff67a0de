"""verl finds the plugin by its entry point; without the key nothing of verl changes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

pytest.importorskip("verl")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.workers.config import RolloutConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.sglang_rollout import async_sglang_server
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from sgl_fp8rl.verl import adapter, server
from sgl_fp8rl.verl.replica import Replica
from tests.integrations.verl.cluster import handed_over

REGISTRIES = """
import verl
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry
print(_ROLLOUT_REGISTRY["sglang", "async"], RolloutReplicaRegistry._registry["sglang"].__module__)
"""
TAKEN = """
import importlib.metadata, types, sys
def entry_points(**of):
    found = real(**of)
    def load():
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY
        _ROLLOUT_REGISTRY["sglang", "async"] = "other.Adapter"
    other = types.SimpleNamespace(name="other", load=load)
    return [other, *found] if of.get("group") == "verl.plugins" else found
real, importlib.metadata.entry_points = importlib.metadata.entry_points, entry_points
"""
PREFIX = "sgl_fp8rl.verl"
STOCK = "verl.workers.rollout"


def printed(code: str, **environment: str) -> tuple[list[str], str]:
    """The words that code prints last in an interpreter of its own, and what it logs."""
    line = [sys.executable, "-c", code]
    child = subprocess.run(
        line, env=os.environ | environment, capture_output=True, text=True, timeout=250
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.splitlines()[-1].split(), child.stderr


@pytest.mark.parametrize(
    ("before", "plugins", "adapter_of", "loader_of", "error"),
    [
        ("", "auto", f"{PREFIX}.adapter.Adapter", f"{PREFIX}.plugin", None),
        ("", "none", f"{STOCK}.sglang_rollout.sglang_rollout.ServerAdapter", STOCK, None),
        (TAKEN, "auto", "other.Adapter", STOCK, "other.Adapter, not verl's own"),
        (TAKEN, "fp8rl", f"{PREFIX}.adapter.Adapter", f"{PREFIX}.plugin", None),
    ],
)
def test_verl_loads_it_from_its_entry_point(
    before: str, plugins: str, adapter_of: str, loader_of: str, error: str | None
) -> None:
    """A failure is logged where everyone sees it."""
    (found, loader), logged = printed(before + REGISTRIES, VERL_USE_EXTERNAL_PLUGINS=plugins)
    assert found == adapter_of
    assert loader.startswith(loader_of)
    said = "sgl-fp8rl is not available in verl" in logged
    assert said is (error is not None) and (error or "") in logged


BROKEN = "import sys; sys.modules['sgl_fp8rl.verl.trainer'] = None\n"
TRAINERS = """
import sys, verl
early = "verl.trainer.ppo.v1" in sys.modules
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
print(early, *(TRAINER_REGISTRY[n].__module__ for n in ("sync", "fp8rl") if n in TRAINER_REGISTRY))
"""
STOCK_TRAINER = "verl.trainer.ppo.v1.trainer_sync"


@pytest.mark.parametrize("before", ["", BROKEN])
def test_our_trainer_is_registered_after_verls(before: str) -> None:
    """Not earlier: most processes of verl do without. One that cannot be imported is loud."""
    (early, *trainers), logged = printed(before + TRAINERS)
    assert early == "False"
    assert trainers == [STOCK_TRAINER, f"{PREFIX}.trainer"][: 1 if before else 2]
    assert ("trainer.v1.trainer_mode=fp8rl will be refused" in logged) is bool(before)


@pytest.mark.parametrize("quantization", ["fp8rl", "fp8", None])
def test_a_replica_starts_our_server_under_the_key_only(quantization: str | None) -> None:
    config = RolloutConfig(name="sglang", quantization=quantization, tensor_model_parallel_size=1)
    replica: Any = Replica(replica_rank=0, config=config, model_config=SimpleNamespace())
    started = replica.server_class.__ray_metadata__.modified_class
    assert issubclass(started, async_sglang_server.SGLangHttpServer)
    assert issubclass(started, server.Server) is (quantization == "fp8rl")


# ---- the adapter, without a server


def an_adapter(leads: bool, quantization: str | None = "fp8rl") -> Any:
    made: Any = object.__new__(get_rollout_class("sglang"))
    made.config = RolloutConfig(name="sglang", quantization=quantization)
    made.model_config = SimpleNamespace(
        local_path="the checkpoint", hf_config=SimpleNamespace(model_type="qwen3")
    )
    made.server_actor, made._init_server_adapter = AsyncMock(), AsyncMock()
    made._is_server_tp_leader = lambda: leads
    return made


def test_offloaded_parameters_come_whole_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``fsdp_config.param_offload=True`` verl brings each there in its turn; none stays."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model.config = SimpleNamespace(model_type="qwen3")
        monkeypatch.setattr(transformer_impl, "get_device_id", None)  # undone at the end
        weights = handed_over(model, device="meta", offloaded=True)
        got: dict[str, Any] = {}
        monkeypatch.setattr(
            adapter.trainer_bridge, "update", lambda stream, **_: got.update(dict(stream))
        )
        asyncio.run(an_adapter(leads=True).update_weights(weights, global_steps=0))
    finally:
        dist.destroy_process_group()
    assert got.keys() == dict(model.named_parameters()).keys()
    assert {(type(tensor), tensor.device.type) for tensor in got.values()} == {
        (torch.Tensor, "meta")
    }
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


# ``test_verl.py`` and ``test_contract.py`` have what an adapter does with an engine


def test_each_call_notes_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without a number."""
    update = Mock()
    monkeypatch.setattr(adapter.trainer_bridge, "update", update)
    leader = an_adapter(leads=True)
    for step in (0, 0, None, 7, 5):
        asyncio.run(leader.update_weights(iter(()), global_steps=step))
    assert [call.kwargs["version"] for call in update.mock_calls] == [0, 1, 2, 7, 8]
    noted = leader.server_actor.fp8rl_note_step.remote.mock_calls
    assert [call.args for call in noted] == [(0, 0), (1, 0), (2, None), (7, 7), (8, 5)]


def test_without_the_key_verls_own_update_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = AsyncMock()
    monkeypatch.setattr(ServerAdapter, "update_weights", stock)
    other = an_adapter(leads=True, quantization="fp8")
    asyncio.run(other.update_weights("weights", global_steps=3, base_sync_done=True))
    stock.assert_awaited_once_with("weights", 3, "named_tensors", base_sync_done=True)


# ---- the server, without an engine


def labelled(versions: list[int] | None, tokens: int, reason: str = "stop") -> TokenOutput:
    made: Any = object.__new__(server.Server)
    made._steps = {0: 0, 1: 0, 2: None, 7: 7}
    meta = {} if versions is None else {"policy_version": versions}
    output = TokenOutput(
        token_ids=[1] * tokens,
        log_probs=[0.0] * tokens,
        stop_reason=reason,
        extra_fields={"global_steps": 5},
    )
    return made._with_versions(output, meta)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("versions", "steps"),
    [([7, 7], (7, 7, 7)), ([1, 7], (7, 0, 7)), ([2, 2], (5, None, None)), ([2, 7], (7, 7, 7))],
)
def test_steps_are_those_that_sampled(versions: list[int], steps: tuple[Any, ...]) -> None:
    """verl's own ``global_steps`` is that of the server when the reply came."""
    fields = labelled(versions, len(versions)).extra_fields
    assert fields["policy_versions"] == versions
    names = ("global_steps", "min_global_steps", "max_global_steps")
    assert tuple(fields.get(name) for name in names) == steps


def test_tokens_of_an_unknown_policy_are_not_returned() -> None:
    output = labelled(None, 3, "abort")
    assert (output.token_ids, output.log_probs) == ([], [])
    for versions, reason in ((None, "stop"), ([1], "abort"), ([1], "stop")):
        with pytest.raises(RuntimeError, match="3 tokens"):
            labelled(versions, 3, reason)


def test_a_reply_reaches_the_call_that_awaits_it() -> None:
    """Two calls at once, and one of SGLang's own that nobody records."""

    class Manager:
        name = "manager"

        async def generate_request(self, obj: int, request: Any) -> AsyncIterator[Any]:
            await asyncio.sleep(0.01 * obj)
            yield {"meta_info": {"policy_version": [obj]}}

    recording: Any = server._Recording(Manager())
    assert recording.name == "manager"

    async def call(obj: int) -> Any:
        meta: dict[str, Any] = {}
        server._meta.set(meta)
        await recording.generate_request(obj, None).__anext__()
        return meta["policy_version"]

    async def calls() -> Any:
        await recording.generate_request(0, None).__anext__()
        return await asyncio.gather(call(2), call(1))

    assert asyncio.run(calls()) == [[2], [1]]
