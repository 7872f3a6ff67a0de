"""Attention of a prompt's last tokens over FP8 KV: error against float64, and time of a chunk.

Prefill's kernels, and XQA, which decodes the same tokens one by one. Shape suffixes as in
``attention_inputs``.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.benchmark import Report
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv.attention_inputs import Inputs, Load, draw, errors, exact
from sgl_fp8rl.ops.reference import FP8_DTYPE

MODEL = "qwen3-8b"
TOKENS = 128
LOADS = tuple(
    Load(1, context, beyond, queries=TOKENS)
    for context in (8192, 32768, 131072)
    for beyond in (False, True)
)
CHUNK = 16384
TIMED = tuple(Load(1, context, queries=CHUNK) for context in (16384, 32768, 131072))
CALLS = 4
DEVICE = "cuda"
XQA_ARM = "xqa"
"""It attends to one token a sequence, so no chunk is timed with it."""


def reports() -> list[Report]:
    """The errors of every arm, then the times."""
    return [*_errors(), *_times()]


def _errors() -> Iterator[Report]:
    for load in LOADS:
        inputs = draw(load, DEVICE)
        wanted = exact(inputs)
        for arm, layer, caches, attend in arms(inputs):
            out = attend(caches)
            values = errors(out, wanted)
            if not all(map(math.isfinite, values["kv_error"])):
                raise RuntimeError(f"{arm} gave no numbers at {load.name}")
            if caches[0].dtype == FP8_DTYPE:
                meant = exact(kernels.meant(inputs, layer, caches))
                values["code_error"] = errors(out, meant)["kv_error"]
            yield {"arm": arm, "case": load.name, "model": MODEL, "values": values}
        del inputs, wanted
        torch.cuda.empty_cache()


def _times() -> Iterator[Report]:
    for load in TIMED:
        inputs = draw(load, DEVICE)
        for arm, _, caches, attend in arms(inputs):
            if not arm.startswith(XQA_ARM):
                us = measuring.queued_us([lambda a=attend, c=caches: a(c)] * CALLS)  # type: ignore[misc]
                values = {"attention_us": us}
                yield {"arm": arm, "case": load.name, "model": MODEL, "values": values}


def arms(inputs: Inputs) -> Iterator[tuple[str, Any, kernels.Caches, kernels.Attend]]:
    """Name, layer, caches, and what attends to them."""
    whole = inputs.k_SHD, inputs.v_SHD
    yield "fa3-bf16", None, whole, fa3_bf16(inputs)
    for scheme in kernels.SCHEMES:
        layer = kernels.layer_of(scheme, inputs)
        caches = kernels.stored(layer, inputs)
        of_scheme: dict[str, Callable[[], kernels.Attend]] = {
            "fa3": lambda: attend_fa3(inputs, layer),  # noqa: B023
            "fa2": lambda: attend_fa2(inputs, layer),  # noqa: B023
            XQA_ARM: lambda: kernels.attend_xqa(inputs, layer),  # noqa: B023
        }
        if scheme == "unit":
            yield "stock-fa3, unit scales", layer, caches, stock_fa3(inputs)
        for kernel, make in of_scheme.items():
            if kernel != XQA_ARM or inputs.load.queries <= TOKENS:
                yield f"{kernel}, {scheme} scales", layer, caches, make()


def fa3(inputs: Inputs) -> Callable[..., torch.Tensor]:
    """FA3 as SGLang calls it in prefill: q, caches, and descales by name."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    load, device = inputs.load, inputs.k_SHD.device
    pages = torch.arange(len(inputs.k_SHD) // kernels.PAGE, dtype=torch.int32, device=device)
    lengths = torch.full((load.batch,), load.context, dtype=torch.int32, device=device)
    starts = torch.arange(load.batch + 1, dtype=torch.int32, device=device) * load.queries

    def run(q: torch.Tensor, caches: kernels.Caches, **descales: torch.Tensor) -> torch.Tensor:
        _, heads, dim = caches[0].shape
        k_cache, v_cache = (cache.view(-1, kernels.PAGE, heads, dim) for cache in caches)
        out: torch.Tensor = flash_attn_with_kvcache(
            q=q.view(load.batch * load.queries, -1, dim),
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=pages.view(load.batch, -1),
            cache_seqlens=lengths,
            cu_seqlens_q=starts,
            max_seqlen_q=load.queries,
            softmax_scale=dim**-0.5,
            causal=True,
            **descales,
        )
        return out

    return run


def fa3_bf16(inputs: Inputs) -> kernels.Attend:
    """What attends where nothing is FP8."""
    run = fa3(inputs)
    return lambda caches: run(inputs.q_BHGD, caches)


def stock_fa3(inputs: Inputs) -> kernels.Attend:
    """SGLang's own way: q is cast bare, and descales are 1."""
    run = fa3(inputs)
    return lambda caches: run(inputs.q_BHGD.to(FP8_DTYPE), caches)


def attend_fa3(inputs: Inputs, layer: Any) -> kernels.Attend:
    """Our hook on SGLang's FA3 prefill."""
    from sgl_fp8rl.engine import kv_attention

    run, q = fa3(inputs), inputs.q_BHGD.flatten(1)
    mine = layer.fp8rl_layer
    shape = inputs.load.batch, len(mine.v_scale_h)
    descales = {"k_descale": mine.fa3_k_scale_h, "v_descale": mine.v_scale_h}

    def attend(caches: kernels.Caches) -> torch.Tensor:
        def original(_: Any, q: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            return run(q, caches, **{name: d.expand(shape) for name, d in descales.items()})

        return kv_attention.fa3_extend(
            original, None, q, None, None, layer, None, save_kv_cache=False
        )

    return attend


def attend_fa2(inputs: Inputs, layer: Any) -> kernels.Attend:
    """Our hook on FlashInfer's prefill over a cache, which reads pages of one token."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    from sgl_fp8rl.engine import kv_attention

    load, device = inputs.load, inputs.k_SHD.device
    _, heads, dim = inputs.k_SHD.shape
    q = inputs.q_BHGD.flatten(1)
    query_heads = q.shape[1] // dim
    steps = torch.arange(load.batch + 1, dtype=torch.int32, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(kernels.WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        backend="fa2",
    )
    wrapper.plan(
        steps * load.queries,
        steps * load.context,
        torch.arange(len(inputs.k_SHD), dtype=torch.int32, device=device),
        torch.ones(load.batch, dtype=torch.int32, device=device),
        query_heads,
        heads,
        dim,
        1,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=FP8_DTYPE,
        sm_scale=dim**-0.5,
    )

    def attend(caches: kernels.Caches) -> torch.Tensor:
        def original(_: Any, q: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q.view(-1, query_heads, dim), caches)
            return out.view(len(q), -1)

        return kv_attention.folded_extend(
            original, None, q, None, None, layer, None, save_kv_cache=False
        )

    return attend
