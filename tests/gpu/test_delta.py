"""Deltas on the GPU, byte for byte those of the CPU and of an oracle."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from sgl_fp8rl.ops import delta, delta_triton
from sgl_fp8rl.ops.delta import DeltaError
from sgl_fp8rl.ops.delta_triton import Comparison, Records
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.snapshot import Snapshot
from sgl_fp8rl.protocol.states import State
from tests.gpu.conftest import INTERPRETED
from tests.sgl_fp8rl.kv import test_updates as with_kv
from tests.sgl_fp8rl.protocol.test_snapshot import change_to
from tests.sgl_fp8rl.receiver import test_changes, toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_remote_engine import (
    SMALL,
    SNAPSHOT_BYTES,
    holds,
    remote_engine,
    step,
)
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT
from trainer_bridge.updates.update import update

Tensor = torch.Tensor
BLOCK = delta_triton._BYTES
KERNELS = delta_triton._compare, delta_triton._encode, delta_triton._sum, delta_triton._apply
SIZES = (
    *(1, 7, 8, 9, 15, 16, 17, 127),
    *(BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 7, BLOCK + 8, BLOCK + 9),
    *(65534, 65535, 65543, 131071),
    200_003,
)
"""Around the ends of words, of programs, and of regular distances."""
PARTS = (0.0, 0.002, 0.05, 0.17, 1.0)
"""Of bytes that are drawn anew; a delta of a sixth is not worth it."""


def difference(old: Tensor, new: Tensor) -> Tensor | None:
    """As of ``delta``."""
    comparison = Comparison(old, new)
    return comparison.delta() if comparison.encode() else None


def records_of(size: int) -> Tensor:
    """A delta of so many bytes."""
    found = delta.difference(*edited(size, 0.01))
    assert found is not None
    return found


def edited(size: int, part: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes before and after."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    drawn = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return old, torch.where(torch.rand(size, generator=generator) < part, drawn, old)


def check(old: Tensor, new: Tensor, device: str) -> Tensor | None:
    """Kernel and CPU make the same, and leave what they read."""
    wanted = delta.difference(old, new)
    mine = old.to(device, copy=True), new.to(device, copy=True)
    found = difference(*mine)
    assert torch.equal(mine[0].cpu(), old) and torch.equal(mine[1].cpu(), new)
    assert (found is None) == (wanted is None)
    if found is None or wanted is None:
        return None
    assert found.dtype == torch.uint8 and torch.equal(found, wanted)
    assert found.device.type == "cpu"
    there = found.to(device, copy=True)
    delta_triton.apply(mine[0], there)
    assert torch.equal(mine[0].cpu(), new)
    assert torch.equal(there.cpu(), delta.undoing(found, delta.apply(old.clone(), found)))
    delta_triton.apply(mine[0], there)
    assert torch.equal(mine[0].cpu(), old)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_is_that_of_the_cpu(device: str, size: int) -> None:
    found = [check(*edited(size, part), device) for part in PARTS]
    assert found[-1] is None, "all of it changed"
    assert found[0] is not None and found[0].numel() == 3 * (size // delta.MOST_DISTANCE)


SINGLE = {
    "first": (0,),
    "regular": (65533, 65534, 65535),
    "borders": (0, 15, 16, 17, BLOCK - 1, BLOCK, 5 * BLOCK + 3),
    "last": (199_998, 199_999),
    "run": range(BLOCK - 40, BLOCK + 40),
}


@pytest.mark.parametrize("name", SINGLE)
def test_single_bytes(device: str, name: str) -> None:
    old = edited(200_000, 0.0)[0]
    new = old.clone()
    new[list(SINGLE[name])] ^= 0x80
    assert check(old, new, device) is not None


def test_the_limits_are_those_of_the_cpu(device: str) -> None:
    """One word more, and one record more, than a delta may have."""
    old = torch.zeros(8 * 6000, dtype=torch.uint8)
    for words, each in ((3000, 1), (1000, 8)):
        for more in (0, 1):
            new = old.clone()
            new.view(-1, 8)[:words, :each] = 1
            new.view(-1, 8)[words : words + more] = 1
            assert (check(old, new, device) is None) == bool(more)


@pytest.mark.skipif(INTERPRETED, reason="many programs at once")
def test_large_chunks_are_the_same_each_time(device: str) -> None:
    size = (64 << 20) + 5
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    new = torch.where(torch.rand(size, device=device) < 0.01, old ^ 3, old)
    found = [difference(old, new) for _ in range(3)]
    wanted = delta.difference(old.cpu(), new.cpu())
    assert wanted is not None
    assert all(each is not None and torch.equal(each, wanted) for each in found)


@given(st.binary(max_size=40), st.integers(0, 70_000))
@example(b"\x05\x00\x00\x00\x01\x02", 64)
@example(b"\x05\x00\x07", 5)
def test_malformed_deltas_are_found(device: str, data: bytes, size: int) -> None:
    malformed = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    malformed = malformed.to(torch.uint8)
    content = torch.zeros(size, dtype=torch.uint8)
    there = content.to(device, copy=True)
    try:
        delta.apply(content, malformed)
    except DeltaError:
        with pytest.raises(DeltaError, match="does not fit"):
            Records(malformed.to(device), size).check()
    else:
        Records(malformed.to(device), size).check()
        delta_triton.apply(there, malformed.to(device))
    assert torch.equal(there.cpu(), content)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_no_size_compiles_anew_or_spills(device: str) -> None:
    for size in (BLOCK, BLOCK + 1, 5 * BLOCK + 8):
        difference(*(each.to(device) for each in edited(size, 0.01)))
        delta_triton.apply(*(each.to(device) for each in (edited(size, 0)[0], records_of(size))))
    for kernel in KERNELS:
        made = [each for cache in kernel.device_caches.values() for each in cache[0].values()]
        assert len(made) == 1 and not made[0].n_spills


def test_a_snapshot_goes_on_where_it_lies(device: str) -> None:
    """On a GPU as on the CPU, with a chunk that changes too much and updates that fail."""
    torch.manual_seed(0)
    sizes = (BLOCK + 8, 70_000, 4000)
    now = {n: torch.randint(0, 256, (size,), dtype=torch.uint8) for n, size in enumerate(sizes)}
    whole = {n: change_to(Snapshot("", {}), n, chunk.to(device)) for n, chunk in now.items()}
    there = Snapshot("", {}).advance(whole, "0", device)
    here = Snapshot("", {}).advance(whole, "0")
    for version, part in enumerate([0.001, 0.013, 0.0, 0.01], 1):
        torn = {n: edited(len(chunk), 0.02, seed=9)[1] for n, chunk in now.items()}
        for n, chunk in torn.items():
            change_to(there, n, chunk.to(device))  # an update that does not commit
        for n, chunk in now.items():
            more = 1.0 if n == version % 3 else part
            drawn = edited(len(chunk), 1.0, seed=version)[1]
            now[n] = torch.where(torch.rand(len(chunk)) < more, drawn, chunk)
        changes = {n: change_to(there, n, chunk.to(device)) for n, chunk in now.items()}
        wanted = {n: change_to(here, n, chunk) for n, chunk in now.items()}
        assert [c.is_delta for c in changes.values()] == [n != version % 3 for n in now]
        for found, same in zip(changes.values(), wanted.values(), strict=True):
            assert found.is_delta == same.is_delta and torch.equal(found.payload, same.payload)
            assert found.payload.device.type == "cpu"
        there = there.advance(changes, str(version), device)
        here = here.advance(wanted, str(version))
        for n, chunk in now.items():
            assert there._chunks[n].device.type == torch.device(device).type
            assert torch.equal(there._chunks[n].cpu(), chunk)
            assert torch.equal(here._chunks[n], chunk)


class RemoteEngine(FakeEngine):
    """Its ranks are on another host, and say that they are on GPUs, wherever they write."""

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        reply = super().control(message)
        return {**reply, "gpus": ["GPU-1"]} if message["op"] == "layout" else reply


@pytest.mark.skipif(INTERPRETED, reason="a trainer on a GPU")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("writes_on", ["cpu", "cuda"])
def test_a_trainer_on_a_gpu_sends_what_changed(
    writes_on: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through real sessions and TCP, with NaN in an update between if it ``fails``."""
    engine = remote_engine(2, SMALL, SNAPSHOT_BYTES, RemoteEngine, writes_on)
    tensors = toy.checkpoint(0)
    for version in range(0, 12, 2):
        tensors = step(tensors, version)
        named = {name: tensor.cuda() for name, tensor in tensors.items()}
        result = update(named, engine, version=version)
        assert holds(engine, tensors)
        if version:
            assert result.network_bytes < 0.1 * result.bytes
        base = KEPT.connection_to(engine).base
        assert base is not None and all(c.is_cuda for c in base.snapshot._chunks.values())
        if fails:
            named[toy.FP8_NAMES[0]].view(-1)[0] = torch.nan
            with pytest.raises(EngineError, match="NaN"):
                update(named, engine, version=version + 1)
            assert {weights.state for weights in engine.ranks} == {State.SERVING}


@pytest.mark.skipif(INTERPRETED, reason="an engine on a GPU")
@pytest.mark.parametrize("name", ["norm.weight", "mlp.router.weight", "attn.q.bias"])
def test_what_an_engine_on_a_gpu_wrote_is_undone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer is on a CPU, which finds no NaN before it sends.

    Both ranks keep the norm and, in FP32, the router; the second alone has NaN of the bias.
    """
    engine = remote_engine(2, SMALL, SNAPSHOT_BYTES, device="cuda")
    tensors = toy.checkpoint(0)
    update(tensors, engine, version=0)
    for version in range(1, 8, 2):
        after = step(tensors, version)
        bad = {**after, name: test_changes.nan_by_the_high_byte(after[name])}
        if name == "attn.q.bias":
            bad[name][: toy.HEADS // 2] = after[name][: toy.HEADS // 2]
        assert bad[name].isnan().any()
        with pytest.raises(EngineError, match="NaN"):
            update(bad, engine, version=version)
        assert {weights.state for weights in engine.ranks} == {State.SERVING}
        assert holds(engine, tensors)
        result = update(after, engine, version=version + 1)
        assert holds(engine, after) and result.network_bytes < 0.1 * result.bytes
        tensors = after


@pytest.mark.skipif(INTERPRETED, reason="an engine on a GPU")
def test_kv_scales_change_on_a_gpu() -> None:
    """They come through the host's memory, and are kept as they came."""
    weights = with_kv.engine("trainer", "cuda")
    sent = toy.quantized(toy.checkpoint(0)) | {KV_SCALES: with_kv.SCALES}
    test_changes.commit(weights, sent)
    for version in (1, 2):
        scales = with_kv.SCALES * (1 + version)
        after = toy.quantized(test_changes.stepped(version)) | {KV_SCALES: scales}
        for undone in (True, False):
            session = toy.begin(weights, after, version, test_changes.SMALL)
            test_changes.change(session, sent, after)
            if undone:
                session.undo()
                weights.resume()
                assert with_kv.kv_of(weights).scales.max() == sent[KV_SCALES].max()
        session.snapshot = test_changes.BASE
        session.finish()
        weights.commit()
        sent = after
        assert torch.equal(with_kv.kv_of(weights).scales.amax(-1).cpu(), scales.amax(-1))
        wanted = toy.expected(test_changes.stepped(version))
        assert toy.same(toy.contents(weights.model), wanted)
