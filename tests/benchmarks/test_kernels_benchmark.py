"""The kernels' benchmark without a GPU: arguments, what agrees, rows, the page's tables."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    kernel_tables,
    kernel_times,
    kernels_activation,
    kernels_arm,
    kernels_kv,
    kernels_pair,
    kernels_sampler,
    processes,
    readme,
    result_rows,
)
from benchmarks.measuring import Call
from sgl_fp8rl.gemm import candidates, table, tune_cache
from sgl_fp8rl.ops import (
    activation,
    heads,
    heads_triton,
    kv,
    kv_triton,
    qk_rope,
    qk_rope_triton,
)
from tests.benchmarks.facts import FACTS

# ---- what agrees ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_the_same_and_neighbours(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 400).to(dtype)
    kernels_pair.hold_same("x", x, x.clone())
    kernels_pair.hold_close("x", x, x.clone())
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    for place in (0, 399):  # of either sign
        near, far = x.clone(), x.clone()
        near.view(kind)[place] += 1
        far.view(kind)[place] += 2
        kernels_pair.hold_close("x", near, x)
        with pytest.raises(RuntimeError, match="x: 1 of 400 values are not SGLang's"):
            kernels_pair.hold_same("x", near, x)
        with pytest.raises(RuntimeError, match="others 2 steps off"):
            kernels_pair.hold_close("x", far, x)
    many = x.clone()
    many.view(kind)[:40] += 1
    with pytest.raises(RuntimeError, match=r"0\.9000 of values are SGLang's"):
        kernels_pair.hold_close("x", many, x)


def test_zeros_are_neighbours_and_signs_are_not() -> None:
    zero, least = torch.zeros(1), torch.tensor([-(2.0**-149)])
    kernels_pair.hold_close("x", zero, -zero)
    with pytest.raises(RuntimeError):
        kernels_pair.hold_same("x", zero, -zero)
    with pytest.raises(RuntimeError, match=r"0\.0000 of values are SGLang's, others 1 steps"):
        kernels_pair.hold_close("x", zero, least)
    one = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"others [0-9]{8,} steps"):
        kernels_pair.hold_close("x", one, -one)


def test_other_shapes_and_dtypes_do_not_agree() -> None:
    x = torch.ones(2, 3)
    for other in (x.t(), x.bfloat16()):
        for hold in (kernels_pair.hold_same, kernels_pair.hold_close):
            with pytest.raises(RuntimeError, match=r"x: ours is torch\.float32 \[2, 3\]"):
                hold("x", x, other)
    column = torch.ones(4, 1).expand(4, 1).as_strided((4, 1), (1, 7))
    kernels_pair.hold_same("a column alone", column, torch.ones(4, 1))


# ---- parts ---------------------------------------------------------------------------------------


def a_pair(kernel: str, size: str, stock_us: float, ours_us: float) -> kernels_pair.Pair:
    """A pair whose clock reads what its calls return."""

    def clock(calls: Sequence[Call]) -> list[float]:
        return [calls[0]() * factor for factor in (1.0, 0.9, 1.05)]

    calls = [lambda: stock_us], [lambda: ours_us]
    return kernels_pair.Pair(kernel, size, 8_000_000, lambda: None, *calls, clock)


def test_a_pair_becomes_two_reports() -> None:
    found = kernels_pair.reports([a_pair("SiLU", "1", 8.0, 4.0), a_pair("SiLU", "16", 6, 6)], 4.0)
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
        kernels_pair.reports([pair], 4.0)


def test_calls_go_round_as_many_tensors_as_fit() -> None:
    assert kernels_pair.sets_of(2 * 4096) == kernels_pair.LAYERS == 36
    assert kernels_pair.sets_of(1 << 30) == 12
    assert kernels_pair.sets_of(1 << 40) == 2


def test_every_part_is_a_generator_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    for module, function in kernel_times.PARTS.values():
        assert callable(getattr(importlib.import_module(module), function))
    from benchmarks import measuring

    monkeypatch.setattr(measuring, "copy_tb_s", lambda: 4.0)
    monkeypatch.setattr(kernels_kv, "store", lambda: [a_pair("KV store", "1", 2, 1)])
    made = kernels_arm.run({"part": ["kernels_kv", "store"]})
    assert [report["arm"] for report in made["reports"]] == ["stock", "ours"]
    assert kernel_times.MODEL == kernels_pair.MODEL


def test_the_pairs_of_torch_s_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_kv, "DEVICE", "cpu")
    monkeypatch.setattr(kernels_kv, "TOKENS", (1, 5))
    monkeypatch.setattr(heads_triton, "scale_heads", heads.scale_heads)
    monkeypatch.setattr(kernels_kv, "sets_of", lambda nbytes: 2)
    found = list(kernels_kv.factors())
    assert [pair.case for pair in found] == [f"heads x factors (torch): {n}" for n in (1, 5)]
    for pair in found:
        pair.check()
        assert len(pair.stock) == len(pair.ours) == 36
        assert pair.ours[1]().shape == (int(pair.size), 4096)
    assert found[1].nbytes == 5 * 4096 * 4 + 32
    monkeypatch.setattr(heads_triton, "scale_heads", lambda x, factor: x * 1)
    with pytest.raises(RuntimeError, match=r"heads: [0-9]+ of 4096 values"):
        found[0].check()


def silu_apart(gate_up: torch.Tensor) -> tuple[torch.Tensor, Any]:
    y, _ = activation.silu_mul_quantize(gate_up)
    return y, activation.quantize_tokens(y)


def norm_apart(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return activation.rms_norm_quantize(x, weight, kernels_activation.EPS, residual)[1]


def test_the_pairs_of_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' twins on either side."""
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
def twins_of_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels' twins, and what stands for SGLang's kernels, on small caches."""
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


@pytest.mark.usefixtures("twins_of_kv")
def test_the_pairs_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(kernels_kv.store())
    backends = ("FlashInfer", "XQA")
    assert [p.case for p in found] == [f"KV store ({b}): {n}" for n in (1, 5) for b in backends]
    assert found[-1].nbytes == 5 * (3 * 2 * 1024 + 8)
    for pair in found:
        pair.check()
        assert len(pair.stock) == len(pair.ours) == 36
    twin = kv.store_kv

    def swapped(k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> Any:
        return twin(v, k, *rest, **more)

    def stock(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: qk_rope.Cache) -> None:
        scales = cache.k_scale_H, cache.v_scale_H
        twin(k, v, slots, cache.k_SHD, cache.v_SHD, *scales, cache.stats_C, read_back=False)

    monkeypatch.setattr(kv_triton, "store_kv", swapped)
    monkeypatch.setattr(kernels_kv, "stock_store", stock)
    with pytest.raises(RuntimeError, match=r"K: \d+ of 1024 values are not SGLang's"):
        next(kernels_kv.store()).check()


@pytest.mark.usefixtures("twins_of_kv")
def test_the_pair_of_norm_rope_and_store(monkeypatch: pytest.MonkeyPatch) -> None:
    (pair,) = kernels_kv.qk_rope()
    assert pair.case == "QK-norm + RoPE + KV store: 5"
    assert pair.nbytes == 5 * (2 * 6144 + 2 * 4096 + 2 * 1024 + 512 + 16)
    pair.check()
    assert pair.ours[35]().shape == (5, 4096)

    def later(qkv: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        return qk_rope.norm_rope_store(qkv, (positions + 1) % kernels_kv.POSITIONS, *rest)

    monkeypatch.setattr(kernels_kv, "stock_qk_rope", later)
    with pytest.raises(RuntimeError, match=r"q: 0\.\d+ of values are SGLang's"):
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
        with pytest.raises(RuntimeError, match="other random numbers"):
            pair.check()

        def shifted(*args: Any) -> torch.Tensor:
            tokens = ours(*args)
            args[1].next_token_logprobs += 1e-3
            return tokens

        monkeypatch.setattr(kernels_sampler, "our_sample", shifted)
        with pytest.raises(RuntimeError, match=r"logprobs are 1\.0e-03 from float64's"):
            pair.check()


# ---- the run -------------------------------------------------------------------------------------


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        kernel_times.command(kernel_times.arguments([]))
        == "python examples/benchmarks/kernel_times.py"
    )
    some = kernel_times.arguments(["--parts", "xqa", "store", "--output", "here/x.json"])
    assert kernel_times.command(some).endswith("kernel_times.py --parts xqa store")
    for words in (["--parts", "xqa"], ["--parts", "no-such"]):
        with pytest.raises(SystemExit):
            kernel_times.arguments(words)
    assert "name another --output" in capsys.readouterr().err


def fake_job(script: Path, job: Any, limit_s: float, environ: Any) -> processes.Outcome:
    """What a part's process may report."""
    assert script.exists() and environ["SGLANG_PLUGINS"] == "none"
    function = job["chunk"][1]
    if function == "store":
        return processes.Outcome(None, "exit status 1: RuntimeError: V: 3 | 9", "")
    pairs = {
        "qk_rope": [a_pair("QK-norm", "1", 10, 2), a_pair("QK-norm", "128", 14, 2.8)],
        "factors": [a_pair("heads", "128", 200, 100), a_pair("heads", "16384", 1000, 400)],
    }.get(function, [])
    if "xqa" in job["chunk"][0]:
        pairs = [a_pair("XQA decode", "64x8192", 307, 263)]
    elif not pairs:
        pairs = [a_pair(job["chunk"][0], "16", 4, 8)]
    return processes.Outcome({"reports": kernels_pair.reports(pairs, 4.0)}, None, "")


def run_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(processes, "run_job", fake_job)
    monkeypatch.setattr(kernel_times, "environment", lambda command: FACTS | {"command": command})
    kernel_times.main(["--output", str(folder / "kernels.json")])
    content: dict[str, Any] = json.loads((folder / "kernels.json").read_text())
    return content


def test_a_run_becomes_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = run_all(tmp_path, monkeypatch)
    assert content["benchmark"] == "kernels" and content["environment"]["copy_tb_s"] == 4.0
    made: list[result_rows.Row] = content["rows"]
    schema = {"arm", "model", "case", "metric", "unit", "median", "min", "max", "n", "ratios"}
    assert all(schema <= row.keys() for row in made)
    (mine,) = [row for row in made if (row["case"], row["metric"]) == ("QK-norm: 128", "kernel_us")
               and row["arm"] == "ours"]  # fmt: skip
    assert (mine["median"], mine["min"], mine["max"], mine["n"]) == (2.8, 2.52, 2.94, 3)
    assert mine["unit"] == "us" and mine["ratios"] == {"stock, QK-norm: 128": 5.0}
    floors = [row for row in made if row["metric"] == "kernel_floor_us"]
    assert floors and all(row["arm"] == "ours" and row["ratios"] == {} for row in floors)
    (failed,) = [row for row in made if row["metric"] == "failure"]
    assert (failed["case"], failed["arm"], failed["n"]) == ("store", "both", 0)
    out = capsys.readouterr().out
    assert "QK-norm: 1: ours: kernel_us 2.0 us (1.8 to 2.1, n 3)" in out
    assert "store: both: failure: exit status 1" in out


def test_the_page_s_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    text = "a\n<!-- measured: kernels -->\nNo figures yet\n<!-- end -->\nb\n"
    assert readme.BLOCK.sub(readme.filled, text) == text  # nothing was measured yet
    run_all(tmp_path, monkeypatch)
    once = readme.BLOCK.sub(readme.filled, text)
    assert readme.BLOCK.sub(readme.filled, once) == once
    lines = once.splitlines()
    assert "| tokens | 1 | 16 | 128 | 16384 |" in lines
    assert "| QK-norm | 10.0 / 2.0, 5.00x, 100% |  | 14.0 / 2.8, 5.00x, 71% |  |" in lines
    assert "| heads |  |  | 200 / 100, 2.00x, 2% | 1000 / 400, 2.50x, 0% |" in lines
    assert "| kernels_sampler |  | 4.0 / 8.0, 0.50x, 25% |  |  |" in lines
    assert "| batch x context | 64x8192 |" in lines
    assert "| XQA decode | 307 / 263, 1.17x, 1% |" in lines
    assert "store fails: exit status 1: RuntimeError: V: 3 | 9" in lines
    for fact in (*(str(value) for value in FACTS.values()), "(4.00 TB/s)", "at most 15% of"):
        assert fact in lines[-3]


def test_a_run_in_which_all_fails_has_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_times, "PARTS", {"store": ("kernels_kv", "store")})
    run_all(tmp_path, monkeypatch)
    block = kernel_tables.kernels((tmp_path / "kernels.json").read_text())
    assert "|" not in block.replace("3 | 9", "") and "store fails" in block
    assert "TB/s" not in block


def test_without_a_gpu_the_benchmark_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="on a machine with an NVIDIA GPU"):
        kernel_times.main(["--output", str(tmp_path / "kernels.json")])
    assert not (tmp_path / "kernels.json").exists()


# ---- products ------------------------------------------------------------------------------------


def test_a_table_of_products(tmp_path: Path) -> None:
    entry, versions = table.Entry, dict.fromkeys(tune_cache.PACKAGES, "9.9")
    made: table.Table = {
        (256, 128): [entry(1, candidates.STOCK, {}, 4, 4), entry(64, "flashinfer_sm90", {}, 2, 5)],
        (512, 128): [entry(64, candidates.STOCK, {}, 150, 150)],
    }
    table.FILES.save(tmp_path / "x.json", tune_cache.Machine("NVIDIA H200", 132, versions), made)
    lines = kernel_tables.products((tmp_path / "x.json").read_text()).splitlines()
    assert lines[0] == "| rows | 256 x 128 | 512 x 128 |"
    assert lines[2] == "| 64 | 2.0, 2.50x | 150 |"  # 1 has nothing but stock's
    assert lines[3] == "" and "2 batches up to 64 rows" in lines[4] and "torch 9.9" in lines[4]
    del made[256, 128][1]
    table.FILES.save(tmp_path / "x.json", tune_cache.Machine("NVIDIA H200", 132, versions), made)
    assert kernel_tables.products((tmp_path / "x.json").read_text()).startswith("N x K")


@pytest.mark.parametrize("block", ["products", "products_tuned"])
def test_the_page_has_the_tables_that_are_shipped(block: str) -> None:
    page = readme.PERFORMANCE.read_text()
    (match,) = [found for found in readme.BLOCK.finditer(page) if found[2] == block]
    assert readme.filled(match) == match[0], "run python examples/readme.py"
