"""The kernels' benchmark without a GPU: what is compared, and what agrees."""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import measuring
from benchmarks.benchmark import Run
from benchmarks.kernels import activation as kernels_activation
from benchmarks.kernels import groups as kernels
from benchmarks.kernels import kv as kernels_kv
from benchmarks.kernels import pair as kernels_pair
from benchmarks.kernels import sampler as kernels_sampler
from benchmarks.measuring import Call
from sgl_fp8rl.ops import (
    activation,
    kv,
    kv_triton,
    qk_rope,
    qk_rope_triton,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_same_and_neighbours(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 400).to(dtype)
    kind = {1: torch.int8, 2: torch.int16}[x.element_size()]
    near, far = x.clone(), x.clone()
    near.view(kind)[[0, 399]] += 1  # of either sign
    far.view(kind)[399] += 3
    for check in (kernels_pair.assert_same, kernels_pair.assert_close):
        check("x", x, x.clone())
        with pytest.raises(RuntimeError, match="x: 1 of 400 values are not SGLang's"):
            check("x", far, x)
        with pytest.raises(RuntimeError, match=r"x: ours is torch\.\w+ \[20, 20\], SGLang's"):
            check("x", x.view(20, 20), x)
    kernels_pair.assert_close("x", near, x)
    with pytest.raises(RuntimeError, match="x: 2 of 400 values"):
        kernels_pair.assert_same("x", near, x)


def a_pair(kernel: str, size: str, stock_us: float, ours_us: float) -> kernels_pair.Pair:
    """A pair whose clock reads what its calls return."""

    def clock(calls: Sequence[Call]) -> list[float]:
        return [calls[0]() * factor for factor in (1.0, 0.9, 1.05)]

    calls = [lambda: stock_us], [lambda: ours_us]
    return kernels_pair.Pair(kernel, size, 8_000_000, lambda: None, *calls, clock)


def test_a_pair_becomes_two_measurements() -> None:
    found = kernels_pair.measurements(
        [a_pair("SiLU", "1", 8.0, 4.0), a_pair("SiLU", "16", 6, 6)], 4.0
    )
    assert [(r["arm"], r["case"]) for r in found] == [
        *(("stock", "SiLU: 1"), ("ours", "SiLU: 1")),
        *(("stock", "SiLU: 16"), ("ours", "SiLU: 16")),
    ]
    assert found[0]["values"] == {"kernel_us": [8.0, 7.2, 8.4], "copy_tb_s": [4.0]}
    assert found[1]["values"]["kernel_floor_us"] == [2.0]  # 8 MB at 4 TB/s


def test_a_pair_that_does_not_agree_is_not_timed() -> None:
    def differ() -> None:
        raise RuntimeError("V: 3 of 9 values are not SGLang's")

    pair = replace(a_pair("store", "1", 2, 1), check=differ, clock=lambda calls: pytest.fail())
    with pytest.raises(RuntimeError, match="V: 3 of 9"):
        kernels_pair.measurements([pair], 4.0)


def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, tmp_path / "log")
    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    for job in kernels.BENCHMARK.jobs:
        module = importlib.import_module(f"benchmarks.kernels.{job.spec.partition('.')[0]}")
        monkeypatch.setattr(
            module, job.spec.partition(".")[2], lambda: [a_pair("KV store", "1", 2, 1)]
        )
        found = kernels.measure(job.spec, run)
        assert [measurement["arm"] for measurement in found] == ["stock", "ours"] and job.stock


def silu_apart(gate_up: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y, _ = activation.silu_mul_quantize(gate_up)
    return y, activation.quantize_tokens(y)


def norm_apart(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return activation.rms_norm_quantize(x, weight, kernels_activation.EPS, residual)[1]


def test_the_pairs_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference implementations on either side."""
    module = kernels_activation
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "TOKENS", (5,))
    monkeypatch.setattr(module, "sets_of", lambda nbytes: 2)
    monkeypatch.setattr(module, "ours", activation)
    monkeypatch.setattr(module, "stock_quantize", activation.quantize_tokens)
    monkeypatch.setattr(module, "stock_norm", norm_apart)
    monkeypatch.setattr(module, "stock_silu", silu_apart)
    found = list(module.pairs())
    names = ["quantize", "add + RMSNorm + quantize", "SiLU + quantize"]
    assert [pair.case for pair in found] == [f"{name}: 5" for name in names]
    assert found[0].nbytes == 5 * (4096 * 3 + 4096 // 128 * 4)
    assert found[1].nbytes == 5 * (4096 * 9 + 4096 // 128 * 4)
    assert found[2].nbytes == 5 * (12288 * 7 + 12288 // 128 * 4)
    for pair in found:
        pair.check()
        assert len(pair.stock) == len(pair.ours) == 36
        pair.ours[-1]()
        pair.stock[-1]()
    double = activation.quantize_tokens
    monkeypatch.setattr(module, "stock_quantize", lambda x: double(2 * x))
    for pair in found:
        with pytest.raises(RuntimeError, match=r"scales: \d+ of \d+ values are not SGLang's"):
            pair.check()


@pytest.fixture
def references_of_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our reference implementations, and what stands for SGLang's kernels, on small caches."""
    monkeypatch.setattr(kernels_kv, "DEVICE", "cpu")
    monkeypatch.setattr(kernels_kv, "SLOTS", 64)
    monkeypatch.setattr(kernels_kv, "DECODE", (5,))
    monkeypatch.setattr(kernels_kv, "TOKENS", (1, 5))
    monkeypatch.setattr(kernels_kv, "sets_of", lambda nbytes: 2)
    monkeypatch.setattr(kv_triton, "store_kv", kv.store_kv)
    monkeypatch.setattr(qk_rope_triton, "norm_rope_store", qk_rope.norm_rope_store)
    for name in ("stock_store", "stock_store_xqa"):
        monkeypatch.setattr(kernels_kv, name, lambda *args: kernels_kv.our_store(*args))
    monkeypatch.setattr(kernels_kv, "stock_qk_rope", qk_rope.norm_rope_store)


@pytest.mark.usefixtures("references_of_kv")
def test_the_pairs_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(kernels_kv.store())
    backends = ("FlashInfer", "XQA")
    assert [p.case for p in found] == [f"KV store ({b}): {n}" for n in (1, 5) for b in backends]
    assert found[-1].nbytes == 5 * (3 * 2 * 1024 + 8)
    for pair in found:
        pair.check()
        assert len(pair.stock) == len(pair.ours) == 36
    reference = kv.store_kv

    def swapped(k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return reference(v, k, *rest, **more)

    def stock(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: kv.Cache) -> None:
        reference(k, v, slots, cache, read_back=False)

    monkeypatch.setattr(kv_triton, "store_kv", swapped)
    monkeypatch.setattr(kernels_kv, "stock_store", stock)
    with pytest.raises(RuntimeError, match=r"K: \d+ of 1024 values are not SGLang's"):
        next(kernels_kv.store()).check()


@pytest.mark.usefixtures("references_of_kv")
def test_the_pair_of_norm_rope_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    (pair,) = kernels_kv.qk_rope()
    assert pair.case == "QK-norm + RoPE + KV store: 5"
    assert pair.nbytes == 5 * (2 * 6144 + 2 * 4096 + 2 * 1024 + 512 + 16)
    pair.check()
    assert pair.ours[35]().shape == (5, 4096)

    def later(qkv: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return qk_rope.norm_rope_store(qkv, (positions + 1) % kernels_kv.POSITIONS, *rest)

    monkeypatch.setattr(kernels_kv, "stock_qk_rope", later)
    with pytest.raises(RuntimeError, match=r"q: \d+ of \d+ values are not SGLang's"):
        pair.check()


@pytest.mark.filterwarnings("ignore")
def test_the_sampler_s_pair_agrees_and_a_wrong_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    monkeypatch.setattr(kernels_sampler, "DEVICE", "cpu")
    with kernels_sampler._no_engine() as sampler:
        pair = kernels_sampler.pair(sampler, 4, 301)
        pair.check()
        assert pair.nbytes == 4 * 301 * 4 and len(pair.ours) == kernels_sampler.CALLS
        tokens, logprobs = pair.ours[0]()
        assert tokens.shape == logprobs.shape == (4,)
        ours = kernels_sampler.our_sample

        def late(*args: Any) -> torch.Tensor:
            torch.rand(1)
            return ours(*args)

        monkeypatch.setattr(kernels_sampler, "our_sample", late)
        with pytest.raises(RuntimeError, match=r"random numbers after them (?!0\.0)"):
            pair.check()

        def shifted(*args: Any) -> torch.Tensor:
            tokens = ours(*args)
            args[1].next_token_logprobs += 1e-3
            return tokens

        monkeypatch.setattr(kernels_sampler, "our_sample", shifted)
        with pytest.raises(RuntimeError, match=r"logprobs are 1\.0e-03 apart"):
            pair.check()
