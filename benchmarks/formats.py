"""What the GEMMs of a layer lose and take in each weight format, beside BF16, on one GPU.

  qwen3-8b        two linears whose sides are whole blocks
  ragged          linears of Qwen2.5-0.5B on a rank of two, and of SmolLM2-135M
  qwen3-30b-a3b   experts, on one rank and on a rank of four, whose blocks are cut

Each runs on the kernels that an engine runs: BF16 cuBLAS or Triton; block FP8 DeepGEMM, padded
where the layer is ragged, experts Triton; channel FP8 and INT8 sgl_kernel's CUTLASS GEMMs, experts
Triton with the tiles that SGLang has for them. What is timed begins with BF16 activations: their
quantization and padding is in it, which the norms and SiLUs of an engine save block FP8. Weights
are normal, activations too, or with outliers (``gemm_inputs.py``). Errors are those of a float64
product of the BF16 values. Shape suffixes: M tokens, N x K the weight, R rows of experts, E
experts, T experts a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.benchmark import Benchmark, Job, Measurement, Run
from benchmarks.gemm_inputs import checked_rows, copies, random_activations
from benchmarks.measuring import graph_us
from sgl_fp8rl.engine import compat
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0, BLOCKS, CHOICES
from sgl_fp8rl.formats.padding import Padding, Shard, fit, fit_experts
from sgl_fp8rl.ops.activation import Channels
from sgl_fp8rl.ops.channel import channel_linear
from sgl_fp8rl.ops.reference import fp8_linear
from sgl_fp8rl.ops.regions import view, whole

TOKENS = (16, 64, 256, 4096)
ARMS = ("bf16", *CHOICES)
BLOCK_ARMS = tuple(format_.name for format_ in BLOCKS)
BF16 = torch.bfloat16
Call = Callable[[torch.Tensor], torch.Tensor]
"""A linear layer: BF16 ``[M, K]`` to BF16 ``[M, N]``."""


@dataclass(frozen=True)
class Linear:
    """A linear layer on one rank."""

    model: str
    name: str
    rows: tuple[Shard, ...]
    """Of each matrix that is stacked."""
    cols: Shard

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return sum(each.size for each in self.rows), self.cols.size


@dataclass(frozen=True)
class Experts:
    """A layer of gated experts on one rank."""

    model: str
    experts: int
    top_k: int
    hidden: int
    intermediate: Shard


Layer = Linear | Experts


def _halves(*sizes: int) -> tuple[Shard, ...]:
    return tuple(Shard(size // 2, 0, 2) for size in sizes)


SETS: dict[str, tuple[Layer, ...]] = {
    "qwen3-8b": (
        Linear("qwen3-8b", "qkv", (Shard(4096), Shard(1024), Shard(1024)), Shard(4096)),
        Linear("qwen3-8b", "down", (Shard(4096),), Shard(12288)),
    ),
    "ragged": (
        Linear("qwen2.5-0.5b, TP 2", "qkv", _halves(896, 128, 128), Shard(896)),
        Linear("qwen2.5-0.5b, TP 2", "o", (Shard(896),), Shard(448, 0, 2)),
        Linear("smollm2-135m", "qkv", (Shard(576), Shard(192), Shard(192)), Shard(576)),
        Linear("smollm2-135m", "gate_up", (Shard(1536), Shard(1536)), Shard(576)),
    ),
    "qwen3-30b-a3b": (
        Experts("qwen3-30b-a3b", 128, 8, 2048, Shard(768)),
        Experts("qwen3-30b-a3b, TP 4", 128, 8, 2048, Shard(192, 0, 4)),
    ),
}


def measure(layers: tuple[Layer, ...], run: Run) -> list[Measurement]:
    """The error and the time of each layer, format and batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made: list[Measurement] = []
    # else SGLang compiles DeepGEMM's kernels for every M at a GEMM's first call
    with _published(), patch.object(compat.deep_gemm_warmup, "_DO_COMPILE_ALL", False):
        for layer in layers:
            parts = linears(layer, device) if isinstance(layer, Linear) else experts(layer, device)
            for found in parts:
                print(found, flush=True)
                made.append(found)
    return made


def linears(layer: Linear, device: str, tokens: tuple[int, ...] = TOKENS) -> Iterator[Measurement]:
    """Each format and batch of a linear layer."""
    random = torch.Generator(device).manual_seed(0)
    weight_NK = torch.randn(layer.shape, generator=random, device=device).to(BF16)
    calls = {arm: [_bound(arm, layer, weight_NK) for _ in range(copies(weight_NK))] for arm in ARMS}
    N, K = layer.shape
    for M in tokens:
        xs = random_activations(M, K, random)
        at = checked_rows(M).to(device)
        exact = [x[at].double() @ weight_NK.double().T for x in xs]
        for arm, sets in calls.items():
            errors = [_error(sets[0](x)[at], y) for x, y in zip(xs, exact, strict=True)]
            us = _time_us(sets, xs[0])
            yield _measurement(arm, layer.model, f"{layer.name} {N}x{K}", M, errors, us)


def _measurement(
    arm: str, model: str, layer: str, M: int, errors: list[float], us: float
) -> Measurement:
    values = {"error": [errors[0]], "error_outliers": [errors[1]], "gemm_us": [us]}
    return {"arm": arm, "model": model, "case": f"{layer}: {M}", "values": values}


def _error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square of the difference, as a part of that of the exact product."""
    return float((y.double() - exact).norm() / exact.norm())


def _time_us(calls: list[Call], x: torch.Tensor) -> float:
    if x.is_cuda:
        return median(graph_us([partial(call, x) for call in calls]))
    start = perf_counter()
    calls[0](x)
    return 1e6 * (perf_counter() - start)


def _bound(arm: str, layer: Linear, weight_NK: torch.Tensor) -> Call:
    """A layer with a copy of the weight, quantized where the format is."""
    if arm == "bf16":
        weight = weight_NK.clone()
        return lambda x: x @ weight.T
    format_ = CHOICES[arm]
    if format_ in BLOCKS:
        padding, _ = fit(format_, layer.rows, layer.cols)
        parts = format_.encode(_placed(weight_NK, padding)).values()
        return _block_linear(padding, *parts, power_of_two=format_.power_of_two_scales)
    codes, scales = format_.encode(weight_NK).values()
    return _channel_linear(codes, scales)


def _placed(weight: torch.Tensor, padding: Padding | None) -> torch.Tensor:
    if padding is None:
        return weight
    stored = weight.new_zeros((*weight.shape[:-2], *padding.shape))
    box = whole(tuple(weight.shape))
    for source, target in padding.place(box, box):
        view(stored, target).copy_(view(weight, source))
    return stored


def _block_linear(
    padding: Padding | None, codes: torch.Tensor, scales: torch.Tensor, *, power_of_two: bool
) -> Call:
    within = None
    if padding is not None and padding.cols.is_padded:
        within = Channels(padding.cols.spans[0][0], padding.cols.size)

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            from sgl_fp8rl.ops.activation_triton import quantize_tokens

            tokens = quantize_tokens(x, within=within, power_of_two=power_of_two)
            y = x.new_empty((len(x), len(codes)))
            compat.deep_gemm_nt((tokens.codes_MK, tokens.scales_Mk), (codes, scales), y)
        else:
            x = x if padding is None else padding.cols.pad(x)
            y = fp8_linear(x, codes, scales, power_of_two=power_of_two)
        return y if padding is None else padding.rows.cut(y)

    return run


def _channel_linear(codes: torch.Tensor, scales: torch.Tensor) -> Call:
    def run(x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            return channel_linear(x, codes, scales)
        from sgl_kernel import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
            fp8_scaled_mm,
            int8_scaled_mm,
        )
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_quant_fp8
        from sglang.kernels.ops.quantization.int8_kernel import per_token_quant_int8

        int8 = codes.dtype == torch.int8
        tokens, of_tokens = (per_token_quant_int8 if int8 else sglang_per_token_quant_fp8)(x)
        gemm = int8_scaled_mm if int8 else fp8_scaled_mm
        y: torch.Tensor = gemm(tokens, codes.T, of_tokens, scales, BF16, None)
        return y

    return run


def experts(layer: Experts, device: str, tokens: tuple[int, ...] = TOKENS) -> Iterator[Measurement]:
    """Each format and batch of both GEMMs of a layer of experts."""
    random = torch.Generator(device).manual_seed(0)
    E, T, H = layer.experts, layer.top_k, layer.hidden
    I = layer.intermediate.size  # noqa: E741
    paddings, _ = fit_experts(BLOCK_FP8, H, layer.intermediate)
    for name, shape, padding in (
        ("gate_up", (E, 2 * I, H), paddings and paddings[0]),
        ("down", (E, H, I), paddings and paddings[1]),
    ):
        rows_of_token = T if name == "gate_up" else 1
        weight_ENK = torch.randn(shape, generator=random, device=device, dtype=BF16)
        for arm in ARMS:
            stored = _placed(weight_ENK, padding if arm in BLOCK_ARMS else None)
            held = {"": stored} if arm == "bf16" else CHOICES[arm].encode(stored)
            for M in tokens:
                ids_MT = torch.rand((M, E), generator=random, device=device).topk(T).indices.int()
                xs = random_activations(M * T // rows_of_token, shape[-1], random)
                run = _expert_gemm(arm, layer, held, ids_MT, rows_of_token, padding)
                at = checked_rows(M * T).to(device)
                expert_R = ids_MT.flatten()[at].tolist()
                errors = []
                for x in xs:
                    exact = torch.stack(
                        [
                            x[row // rows_of_token].double() @ weight_ENK[expert].double().T
                            for row, expert in zip(at.tolist(), expert_R, strict=True)
                        ]
                    )
                    errors.append(_error(run(x)[at], exact))
                case = f"{name} {E}x{shape[1]}x{shape[2]}"
                yield _measurement(arm, layer.model, case, M, errors, _time_us([run], xs[0]))
            del stored, held


def _expert_gemm(
    arm: str,
    layer: Experts,
    held: dict[str, torch.Tensor],
    ids_MT: torch.Tensor,
    rows_of_token: int,
    padding: Padding | None,
) -> Call:
    """One GEMM of the experts by SGLang's Triton kernel, which quantizes its input, but not to
    scales that are powers of two."""
    import triton.language as tl

    from sgl_fp8rl.ops.activation_triton import quantize_tokens

    weight, *scales = held.values()
    is_block, is_int8 = arm in BLOCK_ARMS, arm == "int8"
    is_fp8 = is_block or arm == "channel-fp8"
    E, T, H = layer.experts, layer.top_k, layer.hidden
    I = layer.intermediate.size  # noqa: E741
    if is_block and padding is not None:
        I = padding.cols.size if rows_of_token == 1 else padding.rows.size // 2  # noqa: E741
    config = dict(
        compat.try_get_optimal_moe_config(
            (E, 2 * I, H),
            (E, H, I),
            T,
            "fp8_w8a8" if is_fp8 else "int8_w8a8" if is_int8 else None,
            len(ids_MT),
            block_shape=[128, 128] if is_block else None,
            per_channel_quant=is_int8 or (is_fp8 and not is_block),
        )
    )
    config.pop("USE_TMA", None)
    if is_block:  # as the engine limits it, to one scale a tile
        config["BLOCK_SIZE_K"] = min(config["BLOCK_SIZE_K"], BLOCK_FP8.block[1])
    ones_MT = torch.ones(ids_MT.shape, device=ids_MT.device)
    routes = (
        ones_MT,
        ids_MT,
        *compat.moe_align_block_size(ids_MT, config["BLOCK_SIZE_M"], E),
    )
    is_down = rows_of_token == 1
    out_RN = torch.empty((ids_MT.numel(), weight.shape[1]), device=ids_MT.device, dtype=BF16)

    def run(x: torch.Tensor) -> torch.Tensor:
        if is_block and is_down and padding is not None:
            x = padding.cols.pad(x)
        tokens: tuple[torch.Tensor, torch.Tensor | None] = x, None
        if arm == BLOCK_FP8_UE8M0.name:
            tokens = quantize_tokens(x, by_row=True, power_of_two=True)
        compat.invoke_fused_moe_kernel(
            tokens[0],
            weight,
            None,
            out_RN,
            tokens[1],
            scales[0] if scales else None,
            None,
            *routes,
            is_down,
            rows_of_token,
            config,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=is_fp8,
            use_int8_w8a8=is_int8,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=is_int8 or (is_fp8 and not is_block),
            block_shape=[128, 128] if is_block else None,
        )
        return out_RN if padding is None or not is_block else padding.rows.cut(out_RN)

    return run


def _published() -> Any:
    """SGLang's arguments of an engine, which its kernels ask for."""
    import sglang  # noqa: F401  (its platform must be resolved first)
    from sglang.srt.runtime_context import get_context

    return get_context().override_server_args()


BENCHMARK = Benchmark(
    jobs=tuple(Job(name, layers) for name, layers in SETS.items()),
    measure=measure,
    limit_s=170.0,
    gpu="optional",
)
