"""Attention of a prompt's last tokens over FP8 KV: error against float64, and time of a chunk.

Prefill's kernels, and XQA, which decodes the same tokens one by one. Errors and times are of one
layer; the job ``logprobs`` has errors of whole engines (``long_prompts``). Shape suffixes as in
``attention_inputs``.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from benchmarks import measuring
from benchmarks.benchmark import Benchmark, Job, Measurement, Run
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv import long_prompts
from benchmarks.kv.attention_inputs import Inputs, Load, draw, errors, exact
from sgl_fp8rl.engine import kv_attention
from sgl_fp8rl.kv_cache.backends import FA3
from sgl_fp8rl.ops.reference import FP8_DTYPE

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


class Arm(NamedTuple):
    """One kernel over the codes of one scheme."""

    name: str
    layer: Any
    """None where K and V are BF16."""
    caches: kernels.Caches
    attend: kernels.Attend


def measure(kind: str, run: Run) -> list[Measurement]:
    """The errors of every arm, then the times; or the logprobs of engines."""
    if kind == "logprobs":
        return long_prompts.measurements(run.folder)
    return [{**found, "model": long_prompts.MODEL} for found in (*_errors(), *_times())]


def _errors() -> Iterator[Measurement]:
    for load in LOADS:
        inputs = draw(load, DEVICE)
        wanted = exact(inputs)
        for layer, arms in groupby(_arms(inputs, with_xqa=True), key=attrgetter("layer")):
            meant = None
            for arm in arms:
                out = arm.attend(arm.caches)
                values = errors(out, wanted)
                if not all(map(math.isfinite, values["kv_error"])):
                    raise RuntimeError(f"{arm.name} gave no numbers at {load.name}")
                if layer is not None:
                    if meant is None:
                        meant = exact(kernels.meant(inputs, layer, arm.caches))
                    values["code_error"] = errors(out, meant)["kv_error"]
                yield _measurement(arm, load, values)
        del inputs, wanted
        torch.cuda.empty_cache()


def _times() -> Iterator[Measurement]:
    for load in TIMED:
        for arm in _arms(draw(load, DEVICE), with_xqa=False):
            calls = [partial(arm.attend, arm.caches)] * CALLS
            yield _measurement(arm, load, {"attention_us": measuring.queued_us(calls)})


def _measurement(arm: Arm, load: Load, values: dict[str, list[float]]) -> Measurement:
    return {"arm": arm.name, "case": load.name, "values": values}


def _arms(inputs: Inputs, with_xqa: bool) -> Iterator[Arm]:
    """Those of a layer one after the other.

    Args:
        with_xqa: it attends to one token a sequence, so no chunk is timed with it.
    """
    yield Arm("fa3-bf16", None, (inputs.k_SHD, inputs.v_SHD), fa3_bf16(inputs))
    for scheme in kernels.SCHEMES:
        layer = kernels.layer_of(scheme, inputs)
        caches = kernels.stored(layer, inputs)
        scales = f"{scheme} scales"
        if scheme == "unit":
            yield Arm(f"stock-fa3, {scales}", layer, caches, stock_fa3(inputs))
        yield Arm(f"fa3, {scales}", layer, caches, attend_fa3(inputs, layer))
        yield Arm(f"fa2, {scales}", layer, caches, attend_fa2(inputs, layer))
        if with_xqa:
            yield Arm(f"xqa, {scales}", layer, caches, kernels.attend_xqa(inputs, layer))


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
    run, q = fa3(inputs), inputs.q_BHGD.flatten(1)
    mine = layer.fp8rl_layer
    shape = inputs.load.batch, len(mine.v_scale_h)
    (k_descale_h,) = mine.factors[FA3]
    descales = {"k_descale": k_descale_h, "v_descale": mine.v_scale_h}

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


BENCHMARK = Benchmark(
    (Job("attention", "attention"), Job("logprobs", "logprobs")), measure, limit_s=300.0
)
