"""Attention of prompts' last tokens over an 8-bit KV cache: error and bias, and time of a chunk.

Against float64 over the same codes (``code_error``, ``code_bias``), and over the values before they
were codes (``kv_error``). One layer. Shape suffixes as in ``attention_inputs``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks import measuring
from benchmarks.benchmark import Benchmark, Job, Measurement, Run
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv.attention_inputs import DIM, HEADS, Inputs, Load, draw, exact, off
from sgl_fp8rl.engine.attention import kv_attention, kv_prefill
from sgl_fp8rl.ops.paged_prefill import Workspace
from sgl_fp8rl.ops.reference import FP8_DTYPE
from sgl_fp8rl.protocol.kv_schema import WORKSPACE_BYTES

MODEL = "qwen3-8b"
TOKENS, CHUNK = 128, 16384
LOADS = tuple(
    Load(1, context, queries=TOKENS, v_mean=v_mean, softmax=softmax)
    for context in (8192, 32768, 131072)
    for v_mean, softmax in ((0.3, "peaked"), (1.0, "peaked"), (1.0, "flat"))
)
TIMED = (
    Load(16, 1024, queries=1024),
    *(Load(1, context, queries=CHUNK) for context in (16384, 32768, 131072)),
    Load(128, 8256, queries=64),
)
"""Short prompts, chunks of long ones, and next turns of conversations."""
CALLS = 4
DEVICE = "cuda"


class Arm(NamedTuple):
    """One kernel over the codes of one scheme."""

    name: str
    layer: Any
    """None where K and V are BF16."""
    caches: kernels.Caches
    attend: kernels.Attend


def measure(_: Any, run: Run) -> list[Measurement]:
    """The errors of every arm, then the times."""
    return [{**found, "model": MODEL} for found in (*_errors(), *_times())]


def _errors() -> Iterator[Measurement]:
    for load in LOADS:
        inputs = draw(load, DEVICE)
        wanted = exact(inputs)
        for arm in _arms(inputs):
            meant = wanted
            if arm.layer is not None:
                meant = exact(kernels.meant(inputs, arm.layer, arm.caches))
            values = off(arm.attend(arm.caches), meant, wanted)
            yield {"arm": arm.name, "case": load.name, "values": values}
            del meant
        del inputs, wanted, arm
        torch.cuda.empty_cache()


def _times() -> Iterator[Measurement]:
    for load in TIMED:
        for arm in _arms(draw(load, DEVICE)):
            calls = [partial(arm.attend, arm.caches)] * CALLS
            values = {"attention_us": measuring.queued_us(calls)}
            yield {"arm": arm.name, "case": load.name, "values": values}
        del arm, calls
        torch.cuda.empty_cache()


def _arms(inputs: Inputs) -> Iterator[Arm]:
    yield Arm("fa3-bf16", None, kernels.placed(inputs), fa3_bf16(inputs))
    makers: dict[str, tuple[str, Callable[[Any], kernels.Attend]]] = {
        "stock-fa3-fp8": ("unit", lambda _: stock_fa3(inputs)),
        "ours-e4m3": ("layer", lambda layer: attend_ours(inputs, layer)),
        "ours-int8": (kernels.INT8, lambda layer: attend_ours(inputs, layer)),
        "flashinfer-e4m3": ("layer", lambda layer: attend_fa2(inputs, layer)),
    }
    for name, (scheme, make) in makers.items():
        layer = kernels.layer_of(scheme, inputs)
        yield Arm(name, layer, kernels.stored(layer, inputs), make(layer))


def fa3(inputs: Inputs) -> Callable[..., torch.Tensor]:
    """FA3 as SGLang calls it in prefill: q, caches, and descales by name."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    load, device = inputs.load, inputs.k_SHD.device
    pages = kernels.pages_of(inputs)
    lengths = torch.full((load.batch,), load.context, dtype=torch.int32, device=device)
    starts = torch.arange(load.batch + 1, dtype=torch.int32, device=device) * load.queries

    def run(q: torch.Tensor, caches: kernels.Caches, **descales: torch.Tensor) -> torch.Tensor:
        _, heads, dim = caches[0].shape
        k_cache, v_cache = (cache.view(-1, kernels.PAGE, heads, dim) for cache in caches)
        out: torch.Tensor = flash_attn_with_kvcache(
            q=q.view(load.batch * load.queries, -1, dim),
            k_cache=k_cache,
            v_cache=v_cache,
            page_table=pages,
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


def attend_ours(inputs: Inputs, layer: Any) -> kernels.Attend:
    """Our hook on SGLang's FA3 prefill."""
    load, device, q = inputs.load, inputs.k_SHD.device, inputs.q_BHGD.flatten(1)
    scales = layer.fp8rl_layer.scales
    scales.prefill_workspace = Workspace(
        HEADS, DIM, load.context, scales.value_dtype, device, WORKSPACE_BYTES
    )
    pages = kernels.pages_of(inputs)
    batch = SimpleNamespace(
        out_cache_loc=pages,
        seq_lens_cpu=torch.tensor([load.context] * load.batch),
        extend_seq_lens_cpu=[load.queries] * load.batch,
    )

    def attend(caches: kernels.Caches) -> torch.Tensor:
        backend = SimpleNamespace(
            page_size=kernels.PAGE,
            num_splits=0,
            forward_metadata=SimpleNamespace(page_table=pages),
            token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda _: caches),
        )
        return kv_prefill.fa3_extend(
            None, backend, q, None, None, layer, batch, save_kv_cache=False
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
        kernels.slots_of(inputs).int(),
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


BENCHMARK = Benchmark((Job("attention", None),), measure, limit_s=300.0)
