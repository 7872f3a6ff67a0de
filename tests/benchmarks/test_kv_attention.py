"""Attention over an 8-bit KV cache without a GPU: inputs, our hooks, and what is reported."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.benchmark import Run
from benchmarks.kv import attention_inputs as inputs_of
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv import decode, prefill
from sgl_fp8rl.engine.attention import kv_prefill
from sgl_fp8rl.ops.paged_prefill import reference

LOAD = inputs_of.Load(2, 128)
BEYOND, LAST = replace(LOAD, beyond=True), replace(LOAD, queries=5)
UNEVEN = inputs_of.Load(4, 128, uneven=True)
BF16_ERROR = 0.01
"""Of attention over unquantized values with BF16 q and out; 0.002 here."""
FP8_ERROR = 0.15
"""Of attention over codes; 0.07 to 0.09 here with calibrated scales, 0.12 with scales of 1."""
SATURATED = 4.0
"""By so much at least is the error larger where K is beyond 448 and scales are 1; 8.7 here."""


def test_inputs_are_what_they_say() -> None:
    plain, beyond = inputs_of.draw(LOAD, "cpu"), inputs_of.draw(BEYOND, "cpu")
    assert torch.equal(plain.k_SHD, inputs_of.draw(LOAD, "cpu").k_SHD)
    assert plain.amax_2H().max() < 448
    k_H = beyond.amax_2H()[0]
    assert bool((k_H[inputs_of.BEYOND_HEADS] > 448).all()) and k_H[2:].max() < 448
    channels = plain.k_SHD.float().square().mean((0, 1)).sqrt()
    assert channels[list(inputs_of.OUTLIER_CHANNELS["k"])].min() > 2 * channels.median()
    # rotation keeps lengths, so tokens are as long as RMS-norm makes them
    assert plain.k_SHD[..., [5, 69]].float().norm(dim=-1).std() > 0.1
    assert (BEYOND.name, LAST.name) == ("2x128, K beyond 448", "2x128, last 5")
    assert LOAD.cache_bytes(1) == 2 * 2 * 128 * 1024


@pytest.mark.parametrize("load", [LOAD, LAST], ids=lambda load: load.name)
def test_exact_is_causal_attention(load: inputs_of.Load) -> None:
    drawn, n = inputs_of.draw(load, "cpu"), load.queries
    k, v = (x.view(2, 128, 8, 128).double().transpose(1, 2) for x in (drawn.k_SHD, drawn.v_SHD))
    q = drawn.q_BHGD.double().view(2, n, 8, 4, 128).permute(0, 2, 3, 1, 4)  # sequence, H, G, query
    seen = torch.ones(n, 128, dtype=torch.bool).tril(128 - n)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, None].expand(2, 8, 4, 128, 128), v[:, :, None].expand(2, 8, 4, 128, 128), seen
    )
    wanted = wanted.permute(0, 3, 1, 2, 4).reshape(drawn.q_BHGD.shape)
    torch.testing.assert_close(inputs_of.exact(drawn), wanted)
    assert set(inputs_of.errors(wanted, wanted)["kv_error"]) == {0.0}
    half = inputs_of.errors(wanted / 2, wanted)
    assert half["kv_error"] == pytest.approx([0.5] * 2 * n) == half["kv_error_max"]


def test_uneven_sequences_attend_to_their_own_tokens() -> None:
    drawn = inputs_of.draw(UNEVEN, "cpu")
    out, tables = inputs_of.exact(drawn), kernels.page_tables(drawn)
    lengths = tables.forward_metadata.cache_seqlens_int32.tolist()
    assert sorted(lengths) == [32, 64, 96, 128] and lengths != sorted(lengths)
    assert UNEVEN.cache_bytes(1) == 2 * sum(lengths) * 1024
    for sequence, length in enumerate(lengths):
        mine = slice(sequence * 128, sequence * 128 + length)
        q = drawn.q_BHGD[sequence : sequence + 1]
        alone = replace(drawn, load=inputs_of.Load(1, length), q_BHGD=q)
        alone = replace(alone, k_SHD=drawn.k_SHD[mine], v_SHD=drawn.v_SHD[mine])
        assert torch.equal(inputs_of.exact(alone)[0], out[sequence])


def a_run(load: inputs_of.Load, slots: torch.Tensor | None = None) -> Any:
    """What FlashInfer's wrapper computes of q and the caches as they are, with the tokens in order
    or in these slots."""

    def run(q: torch.Tensor, caches: kernels.Caches) -> torch.Tensor:
        if slots is not None:
            caches = caches[0].float()[slots], caches[1].float()[slots]
        k, v = (cache.to(torch.bfloat16) for cache in caches)
        drawn = inputs_of.Inputs(load, q.view(load.batch, 8, 4, 128), k, v)
        return inputs_of.exact(drawn).to(q.dtype).flatten(1, 2)

    return run


def error_of(load: inputs_of.Load, scheme: str) -> float:
    drawn = inputs_of.draw(load, "cpu")
    layer = kernels.layer_of(scheme, drawn)
    attend = kernels.attend_fa2(drawn, layer, a_run(load, kernels.slots_of(drawn)))
    got = attend(kernels.stored(layer, drawn))
    assert got.shape == (2, 4096) and got.dtype == torch.bfloat16
    return max(inputs_of.errors(got, inputs_of.exact(drawn))["kv_error"])


def test_our_hook_on_fa2() -> None:
    for load in (LOAD, BEYOND):
        assert BF16_ERROR < error_of(load, "layer") < FP8_ERROR
    assert error_of(BEYOND, "unit") > SATURATED * error_of(BEYOND, "layer")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """FlashInfer's own ``xqa``, on a module in torch: which variant each call was for."""
    pytest.importorskip("flashinfer")
    module = importlib.import_module("flashinfer.xqa")
    fp8: list[bool] = []

    def xqa(run_sm90_fp8_mha: bool, *arguments: Any) -> None:
        (_, kv_heads, window, q_scale, out, out_scale, q, sinks, k, v, *more) = arguments
        _, _, table, longest, lengths, batch, kv_scale, *_ = more
        fp8.append(run_sm90_fp8_mha)
        assert (kv_heads, window, out_scale, sinks, batch) == (8, 0, 1.0, None, 2)
        assert longest == 128 and lengths.tolist() == [[128], [128]]
        assert q.is_contiguous() and q.shape == out.shape == (2, 1, 32, 128)
        caches = [x[table].to(torch.bfloat16).reshape(-1, 8, 128) for x in (k, v)]
        scaled = (q.float() * q_scale * kv_scale).to(torch.bfloat16)
        got = a_run(LOAD)(scaled[:, 0], (caches[0], caches[1]))
        out.copy_((got * kv_scale).view_as(out))

    monkeypatch.setattr(module, "get_xqa_module", lambda *_: SimpleNamespace(xqa=xqa))
    monkeypatch.setattr(module, "get_compute_capability", lambda _: (9, 0))
    for name in ("xqa", "decode", "utils"):
        imported = importlib.import_module(f"flashinfer.{name}")
        monkeypatch.setattr(imported, "get_device_sm_count", lambda _: 132)
        monkeypatch.setattr(imported, "device_support_pdl", lambda _: False)
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 9 << 20)
    return fp8


@pytest.mark.filterwarnings("ignore")
def test_every_arm_of_decode_has_errors_and_a_time(
    hopper: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(decode, "CASES", [LOAD, replace(LOAD, v_mean=1.0), BEYOND])
    monkeypatch.setattr(decode, "DEVICE", "cpu")
    monkeypatch.setattr(
        kernels, "fa2", lambda inputs, _: a_run(inputs.load, kernels.slots_of(inputs))
    )
    monkeypatch.setattr(decode.measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(decode.measuring, "graph_us", lambda calls, _: [2.0 * len(calls)])
    found = decode.measure(None, Run(tmp_path, tmp_path / "log"))
    arms = ["paged", "xqa", "xqa-bf16-mma", "fa2", "paged-int8"]
    assert [r["arm"] for r in found] == 3 * arms and hopper == [True, False] * 3
    assert found[0]["values"]["attention_floor_us"] == [LOAD.cache_bytes(1) / 4e6]
    assert [r["values"].get("attention_us") for r in found] == 5 * [[16.0]] + 10 * [None]
    lost = [max(r["values"]["kv_error"]) for r in (*found[:5], *found[10:14])]  # no INT8 beyond
    assert max(lost) < FP8_ERROR and lost[4] < lost[0] / 2
    assert max(r["values"]["code_error"][0] for r in found[:10]) < BF16_ERROR


def fa3_in_torch(inputs: inputs_of.Inputs) -> Any:
    """What ``prefill.fa3`` makes, in float64: q in E4M3 or BF16, descales of each KV head."""

    def run(q: torch.Tensor, caches: kernels.Caches, **descales: torch.Tensor) -> torch.Tensor:
        assert q.dtype == caches[0].dtype
        k, v = (
            cache.double()[kernels.slots_of(inputs)]
            * descales.get(name, torch.ones(8)).expand(2, 8)[0].view(8, 1)
            for name, cache in zip(("k_descale", "v_descale"), caches, strict=True)
        )
        seen = replace(inputs, q_BHGD=q.view(-1, 8, 4, 128), k_SHD=k, v_SHD=v)
        return inputs_of.exact(seen).to(torch.bfloat16).flatten(1, 2)

    return run


def fa2_in_torch(inputs: inputs_of.Inputs, layer: Any) -> kernels.Attend:
    return lambda caches: (
        inputs_of.exact(kernels.meant(inputs, layer, caches)).bfloat16().flatten(1, 2)
    )


@pytest.mark.filterwarnings("ignore")
def test_every_arm_of_prefill_has_errors_and_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prefill, "DEVICE", "cpu")
    monkeypatch.setattr(prefill, "LOADS", (LAST,))
    monkeypatch.setattr(prefill, "TIMED", (LAST,))
    monkeypatch.setattr(prefill, "fa3", fa3_in_torch)
    monkeypatch.setattr(prefill, "attend_fa2", fa2_in_torch)
    monkeypatch.setattr(kv_prefill, "fa3", lambda *scores, num_splits: reference(*scores))
    monkeypatch.setattr(prefill.measuring, "queued_us", lambda calls: [c().norm() for c in calls])
    found = prefill.measure(None, Run(tmp_path, tmp_path / "log"))
    errors, times = found[:5], found[5:]
    arms = ["fa3-bf16", "stock-fa3-fp8", "ours-e4m3", "ours-int8", "flashinfer-e4m3"]
    assert [r["arm"] for r in errors] == arms == [r["arm"] for r in times]
    off = {r["arm"]: max(r["values"]["code_error"]) for r in errors}
    lost = {r["arm"]: max(r["values"]["kv_error"]) for r in errors}
    assert max(off[arm] for arm in arms if arm != "stock-fa3-fp8") < BF16_ERROR
    assert off["stock-fa3-fp8"] > BF16_ERROR  # q is E4M3
    assert lost["ours-int8"] < lost["ours-e4m3"] / 2
