"""The profile of decode steps, without a GPU: classes of kernels, and traces."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import decode_profile, kernel_classes, rollout, traces
from benchmarks.benchmark import Run
from benchmarks.engines import models, serving

LAYERS = 3
NVJET = "nvjet_tst_128x64_64x4_1x2_h_bz_TNT"
DEEPGEMM = "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 24576u, 4096u, 1u, 128u>(float*)"
ON_SELF_ADD = "at::native::CUDAFunctorOnSelf_add<long>, std::array<char*, 2ul> >()"
QUANT = "void per_token_group_quant_flat_kernel<__nv_bfloat16, c10::Float8_e4m3fn>()"
STOCK_LAYER = [
    ("norm", "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>()"),
    ("quantize", QUANT),
    ("GEMM qkv", DEEPGEMM),
    ("QK-norm, RoPE", "void fused_qknorm_warp<128l, __nv_bfloat16>()"),
    ("QK-norm, RoPE", "void fused_rope_kernel<true, 128l>()"),
    ("KV write", "void fused_fp8_qkv_kv_cache_kernel<__nv_bfloat16>()"),
    ("attention", "kernel_mha"),
    ("quantize", QUANT),
    ("GEMM o", DEEPGEMM),
    ("norm", "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>()"),
    ("quantize", QUANT),
    ("GEMM gate_up", DEEPGEMM),
    ("SiLU x up", "void act_and_mul_kernel<__nv_bfloat16, &silu>()"),
    ("quantize", QUANT),
    ("GEMM down", DEEPGEMM),
]
HEAD = [
    ("norm", "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>()"),
    ("GEMM lm_head", NVJET),
]
AFTER = [
    ("sampling, logprobs", "void at::native::(anonymous)::cunn_SoftMaxForward<4, float>()"),
    ("sampling, logprobs", "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>()"),
    ("copies", "Memcpy DtoH (Device -> Pinned)"),
    ("other", "void someone_s_new_thing<int>()"),
]
STEP = STOCK_LAYER * LAYERS + HEAD


def test_a_gemm_is_named_by_its_place() -> None:
    wanted, names = zip(*(STEP + AFTER) * 2, strict=True)
    assert kernel_classes.classes(names) == list(wanted)


FLASHINFER_PREFILL = (
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<"
    "RaggedParams::AdditionalParams, flashinfer::AttentionKernelTraits<true, 128, 128, 128>>>()"
)
PREFILL_LAYER = [
    ("norm", "_norm_rows"),
    ("GEMM qkv", DEEPGEMM),
    ("QK-norm, RoPE", "void (anonymous namespace)::fused_qknorm_warp<128l, true, __nv_bfloat16>()"),
    ("QK-norm, RoPE", "void (anonymous namespace)::fused_rope_kernel<true, 128l, true>()"),
    ("KV write", "_store_rows"),
    ("KV scales", "_scale_heads"),
    ("attention", FLASHINFER_PREFILL),
    ("KV scales", "_scale_heads"),
    ("quantize", "_quantize_tiles"),
    ("GEMM o", DEEPGEMM),
    ("norm", "_norm_rows"),
    ("GEMM gate_up", DEEPGEMM),
    ("SiLU x up", "_silu_mul_tiles"),
    ("GEMM down", DEEPGEMM),
]
BEFORE_PREFILL = [
    ("scheduling", "alloc_extend_kernel"),
    ("scheduling", "create_flashinfer_kv_indices_triton"),
    ("scheduling", "void at::native::vectorized_elementwise_kernel<2, " + ON_SELF_ADD),
    ("embedding", "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)"),
]
AFTER_PREFILL = [
    ("sampling, logprobs", "_reduce_chunk"),
    ("sampling, logprobs", "_draw_row"),
    ("sampling, logprobs", "void at::native::_assert_async_cuda_kernel<bool>(bool const*)"),
]


def test_a_prefill_s_gemms_are_named_by_their_place() -> None:
    # the trace of a prefill ends with a first decoded token
    prefill = BEFORE_PREFILL + PREFILL_LAYER * LAYERS + HEAD + AFTER_PREFILL
    wanted, names = zip(*prefill + STEP + AFTER, strict=True)
    found = kernel_classes.classes(names)
    assert found == list(wanted)
    assert found.count("GEMM lm_head") == 2
    # control: what a kernel of attention that is not known as one does to the roles
    unknown = [name.replace("PrefillWith", "SomeonesWith") for name in names]
    assert kernel_classes.classes(unknown).count("GEMM lm_head") > 2


def test_one_linear_may_be_several_kernels() -> None:
    names = [name for _, name in STEP]
    doubled = [name for name in names for _ in range(2 if name in (DEEPGEMM, NVJET) else 1)]
    found = kernel_classes.classes(doubled)
    for role in ("qkv", "o", "gate_up", "down"):
        assert found.count(f"GEMM {role}") == 2 * LAYERS
    assert found.count("GEMM lm_head") == 2 and "GEMM" not in found


def test_fa3_plans_a_step_before_its_layers() -> None:
    plan = ("scheduling", "void flash::prepare_varlen_num_blocks_kernel<1, true>()")
    wanted, names = zip(*[plan, *STEP, *AFTER] * 2, strict=True)
    assert kernel_classes.classes(names) == list(wanted)


def test_plain_norms_between_qkv_and_attention_are_qk_norms() -> None:
    rms = "void flashinfer::norm::RMSNormKernel<8u, __nv_bfloat16>()"
    layer = [rms, NVJET, rms, rms, "kernel_mha", NVJET, rms, NVJET, "silu_and_mul", NVJET]
    found = kernel_classes.classes(layer * 2 + [rms, NVJET])
    assert found[:5] == ["norm", "GEMM qkv", "QK-norm, RoPE", "QK-norm, RoPE", "attention"]
    assert found[10:12] == ["norm", "GEMM qkv"] and found[-2:] == ["norm", "GEMM lm_head"]


def test_experts_have_classes_of_their_own() -> None:
    layer = ["_norm_rows", NVJET, "kernel_mha", NVJET, "_norm_rows", NVJET, "topkGatingSoftmax"]
    layer += ["moe_align_block_size_kernel", "fused_moe_kernel", "_silu_mul_tiles"]
    layer += ["fused_moe_kernel", "_moe_sum_reduce_kernel"]
    found = kernel_classes.classes(layer)
    assert found[5:9] == ["GEMM gate_up", "routing", "routing", "experts' GEMM gate_up"]
    assert found[10:] == ["experts' GEMM down", "routing"]


def test_deepgemm_s_grouped_kernels_are_the_experts() -> None:
    """They have the name of a dense GEMM, so routing before them tells; a dense layer follows."""
    dense = ["_norm_rows", DEEPGEMM, "kernel_mha", DEEPGEMM, "_norm_rows"]
    experts = [NVJET, "count_and_sort_expert_tokens_kernel", "_sort_rows", DEEPGEMM]
    experts += ["_silu_mul_tiles", DEEPGEMM, "_sum_rows"]
    found = kernel_classes.classes([*dense, *experts, *dense, DEEPGEMM, "_silu_mul_tiles", NVJET])
    gemms = [kind for kind in found if "GEMM" in kind]
    both = ["GEMM qkv", "GEMM o", "GEMM gate_up"]
    assert gemms == [*both, "experts' GEMM gate_up", "experts' GEMM down", *both, "GEMM down"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<(CTA_TILE_Q)16>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u>", "attention"),
        ("create_flashinfer_kv_indices_triton", "scheduling"),
        ("update_trtllm_mha_graph_metadata_kernel", "scheduling"),
        ("_quantize_tiles", "quantize"),
        ("void tensorrt_llm::kernels::fp8_blockscale_gemm::scale_1x128_kernel<>", "quantize"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "GEMM"),
        ("_w8a8_block_fp8_matmul", "GEMM"),
        ("_store_rows", "KV write"),
        ("_scale_heads", "KV scales"),
        ("_draw_row", "sampling, logprobs"),
        ("void at::native::_assert_async_cuda_kernel<bool>(bool const*)", "sampling, logprobs"),
        (f"void at::native::vectorized_elementwise_kernel<2, {ON_SELF_ADD}", "scheduling"),
        (ON_SELF_ADD.replace("long", "float"), "other"),
        ("void fused_fp8_qkv_kv_cache_kernel<__nv_bfloat16>()", "KV write"),
        (FLASHINFER_PREFILL, "attention"),
        ("void at::native::_scatter_gather_elementwise_kernel<128>()", "sampling, logprobs"),
        ("void at::native::vectorized_gather_kernel<16, long>()", "embedding"),
        ("Memset (Device)", "copies"),
    ],
)
def test_names(name: str, wanted: str) -> None:
    assert kernel_classes.class_of(name) == wanted


def write_trace(path: Path, steps: int, graph_kernels: int = len(STEP)) -> Path:
    """As SGLang leaves it: each step a CUDA graph, 2 us a kernel and 1 us of gap, then kernels with
    a launch each; a copy on a stream of its own runs beside the first of them."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "ts": 0, "args": {}}]
    clock, launch = 1000.0, 1

    def add(name: str, correlation: int, at: float, dur: float, cat: str = "kernel") -> None:
        args = {"correlation": correlation, "stream": 7}
        events.append({"ph": "X", "cat": cat, "name": name, "ts": at, "dur": dur, "args": args})

    for _ in range(steps):
        launch += 1
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaGraphLaunch",
                "ts": 0.0,
                "dur": 5.0,
                "args": {"correlation": launch},
            }
        )
        for _, name in STEP[:graph_kernels]:
            add(name, launch, clock, 2.0)
            clock += 3.0
        for _, name in AFTER:
            launch += 1
            copy = name.startswith("Memcpy")
            add(name, launch, clock, 2.0, "gpu_memcpy" if copy else "kernel")
            clock += 0.0 if copy else 3.0
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events[::-1]}, file)
    return path


def test_steps_are_cut_at_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = traces.kernels(write_trace(tmp_path / "a.trace.json.gz", 20))
    steps = traces.decode_steps(found, count=16, edge=2)
    each = len(STEP) + len(AFTER)
    assert [len(step.kernels) for step in steps] == [each] * 16
    means = {metric: value for metric, (value,) in traces.means(steps).items()}
    # the copy takes no time of its own: the next kernel runs beside it
    assert means["step, us"] == 3 * (each - 1) and means["busy, us"] == 2 * (each - 1)
    assert means["idle, us"] == means["step, us"] - means["busy, us"] and means["steps"] == 16
    assert means["GEMM gate_up, us"] == 2.0 * LAYERS and means["GEMM gate_up, calls"] == LAYERS
    # nothing is dropped, and what has no class is named
    assert sum(n for metric, n in means.items() if metric.endswith("calls")) == each
    assert f"no class: 1.0 calls a step: {AFTER[-1][1]}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="20 launches of a CUDA graph, 24 are needed"):
        traces.decode_steps(found, count=22, edge=2)


def test_a_prefill_is_one_step(tmp_path: Path) -> None:
    found = traces.kernels(write_trace(tmp_path / "a.trace.json.gz", 2))
    step = traces.whole(found)
    assert step.wall_us == 2 * 3 * (len(STEP) + len(AFTER) - 1) - 1
    assert traces.means([step])["steps"] == [1]


def test_a_trace_without_kernels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": []}, file)
    with pytest.raises(ValueError, match=r"a\.trace\.json\.gz has no kernel of a GPU"):
        traces.kernels(path)


class Engine:
    """Stands for ``sglang.Engine``: leaves a trace between start and stop."""

    def __init__(self, leaves: int = 1) -> None:
        self.folder, self.leaves, self.count, self.new = Path(), leaves, 10 * leaves, 0

    def start_profile(self, output_dir: str, activities: list[str], **_: bool) -> None:
        assert activities == ["GPU"]
        self.folder = Path(output_dir)

    def stop_profile(self) -> None:
        for _ in range(self.leaves):
            self.count += 1
            write_trace(self.folder / f"{self.count}-TP-0.trace.json.gz", self.new)

    def generate(self, input_ids: Any, sampling_params: Any, **_: Any) -> list[Any]:
        self.new = sampling_params[0]["max_new_tokens"]
        meta = {"output_token_logprobs": [(0.0, 1, None)] * self.new}
        return [{"meta_info": meta} for _ in input_ids]

    def flush_cache(self) -> Any:
        return SimpleNamespace(success=True)

    def shutdown(self) -> None: ...


def test_an_arm_profiles_decode_and_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = models.Shape(256, 384, LAYERS, 2, 1, vocab=4096)
    monkeypatch.setitem(models.MODELS, "qwen3-8b", shape)
    monkeypatch.setattr(serving, "start", lambda folder, keywords: Engine())
    monkeypatch.setattr(serving, "give_weights", lambda *_: None)
    run = Run(tmp_path, tmp_path / "log", {"layers": None}, ("128x512",))
    prefill, decode = decode_profile.measure(rollout.find("stock-bf16"), run)
    assert prefill["case"] == "128x512, prefill of 16384 tokens"
    assert decode["case"] == "128x512, decode"
    assert decode["values"]["steps"] == [decode_profile.STEPS]
    with pytest.raises(RuntimeError, match="left 2 traces"):
        decode_profile.trace(Engine(leaves=2), tmp_path, [[1]], 1)


def test_arms_and_cases_are_those_of_the_rollout_benchmark() -> None:
    for benchmark in (decode_profile.DENSE, decode_profile.MOE):
        for job in benchmark.jobs:
            loads = {load.name for load in rollout.LOADS[job.spec.model]}
            assert set(decode_profile.CASES[job.spec.model]) <= loads
        assert {j.spec.name for j in benchmark.jobs if j.by_default} == set(decode_profile.ARMS)


@pytest.mark.filterwarnings("ignore")
def test_sglang_takes_the_profiler_s_keywords() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.managers.io_struct import ProfileReq

    fields = set(ProfileReq.__struct_fields__)
    assert {"output_dir", "activities", "with_stack", "record_shapes"} <= fields
