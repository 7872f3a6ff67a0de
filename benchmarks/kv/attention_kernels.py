"""Decode attention of one layer over a paged cache, by each kernel, as the engine's hooks call it.

The hooks of ``engine/attention/kv_attention.py`` get a small stand-in for SGLang's backend, so
that what is measured is what the engine runs. Shape suffixes as in ``attention_inputs``.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.kv.attention_inputs import DIM, GROUP, HEADS, Inputs
from sgl_fp8rl.engine.attention import kv_attention
from sgl_fp8rl.ops.kv import power_of_two_above
from sgl_fp8rl.ops.kv_int8 import rotate
from sgl_fp8rl.ops.paged_decode_cuda import Workspace
from sgl_fp8rl.ops.reference import FP8_DTYPE, FP8_MAX
from sgl_fp8rl.receiver.kv.quantized import Heads, QuantizedKV
from sgl_fp8rl.receiver.kv.scales import KVScales
from sgl_fp8rl.receiver.kv.token_scales import TokenScales

PAGE = 64
MARGIN = 2.0
WORKSPACE_BYTES = 512 << 20
SEMAPHORE_BYTES = 8 << 20
"""Of XQA, at the start of its workspace."""
SCHEMES = ("unit", "layer")
"""Of E4M3: every scale 1; one per layer, a power of two, as the engine has them."""
INT8 = "token"
"""INT8 codes, whose scales are those of tokens and heads."""

Caches = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[Caches], torch.Tensor]
"""Attention of all sequences over these caches, [S, H, D] each: [B, all query heads * D]."""


def layer_of(scheme: str, inputs: Inputs) -> Any:
    """An attention layer with the scales that ``scheme`` gives these inputs: the second, which
    plans only where its batch is new, as all layers but an engine's first do."""
    device, heads = inputs.k_SHD.device, Heads(HEADS, 0, HEADS)
    if scheme == INT8:
        by_token = TokenScales(2, heads, device)
        by_token.allocate(len(inputs.k_SHD))
        return _layer(by_token)
    scales = KVScales(2, heads, "unit", device)
    if scheme == "layer":
        scales_2H = power_of_two_above(inputs.amax_2H() * MARGIN / FP8_MAX)
        scales.write(scales_2H.expand(2, *scales_2H.shape))
    return _layer(scales)


def _layer(scales: QuantizedKV) -> Any:
    return SimpleNamespace(
        fp8rl_layer=scales.layer(1),
        layer_id=0,
        head_dim=DIM,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        tp_q_head_num=HEADS * GROUP,
        tp_k_head_num=HEADS,
        tp_v_head_num=HEADS,
        scaling=DIM**-0.5,
        logit_cap=0.0,
        sliding_window_size=-1,
    )


def pages_of(inputs: Inputs) -> torch.Tensor:
    """Of each sequence, int32 ``[B, P]``: in no order, as an engine's are after a while."""
    batch, context = inputs.load.batch, inputs.load.context
    if context % PAGE:
        raise ValueError(f"{context} tokens are not whole pages of {PAGE}; take a multiple")
    order = torch.randperm(batch * context // PAGE, generator=torch.Generator().manual_seed(0))
    return order.int().view(batch, -1).to(inputs.k_SHD.device)


def slots_of(inputs: Inputs) -> torch.Tensor:
    """Where each token lies, int64 ``[S]``."""
    in_page = torch.arange(PAGE, device=inputs.k_SHD.device)
    return (pages_of(inputs).long().view(-1, 1) * PAGE + in_page).flatten()


def placed(inputs: Inputs) -> Caches:
    """A BF16 cache of these inputs."""
    k_cache, v_cache = (torch.empty_like(x) for x in (inputs.k_SHD, inputs.v_SHD))
    slots = slots_of(inputs)
    k_cache[slots], v_cache[slots] = inputs.k_SHD, inputs.v_SHD
    return k_cache, v_cache


def stored(layer: Any, inputs: Inputs) -> Caches:
    """The codes that the engine would keep of these inputs."""
    caches = tuple(torch.empty_like(x, dtype=FP8_DTYPE) for x in (inputs.k_SHD, inputs.v_SHD))
    layer.fp8rl_layer.store(inputs.k_SHD, inputs.v_SHD, slots_of(inputs), caches)
    return caches[0], caches[1]


def meant(inputs: Inputs, layer: Any, caches: Caches) -> Inputs:
    """What the codes stand for."""
    k_SHD, v_SHD = layer.fp8rl_layer.codes(caches).values(slots_of(inputs))
    if isinstance(layer.fp8rl_layer.scales, TokenScales):
        k_SHD = rotate(k_SHD)  # back
    return replace(inputs, k_SHD=k_SHD, v_SHD=v_SHD)


def fa2(inputs: Inputs, cache_dtype: torch.dtype) -> Any:
    """FlashInfer's decode wrapper, planned for these inputs as SGLang plans it: its ``run``."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, lengths_B = inputs.load.batch, inputs.load.lengths_B
    device = inputs.k_SHD.device
    # as SGLang has it: a page is one token
    indptr = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).int().to(device)
    held_BT = torch.arange(inputs.load.context) < lengths_B[:, None]
    indices = slots_of(inputs).int()[held_BT.flatten().to(device)]
    last_page_len = torch.ones(batch, dtype=torch.int32, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "NHD",
        backend="fa2",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last_page_len.clone(),
    )
    wrapper.plan(
        indptr,
        indices,
        last_page_len,
        HEADS * GROUP,
        HEADS,
        DIM,
        1,
        q_data_type=torch.bfloat16,
        kv_data_type=cache_dtype,
        sm_scale=DIM**-0.5,
    )
    return wrapper.run


def attend_fa2(inputs: Inputs, layer: Any, run: Any) -> Attend:
    """Our hook on FlashInfer's decode: scales folded into q and out. ``run``: see ``fa2``."""
    q = inputs.q_BHGD.flatten(1)

    def backend(caches: Caches) -> Callable[..., torch.Tensor]:
        def original(_: Any, q: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
            out: torch.Tensor = run(q.view(-1, HEADS * GROUP, DIM), caches)
            return out.view(len(q), -1)

        return original

    return lambda caches: kv_attention.folded_decode(
        backend(caches), None, q, None, None, layer, None, save_kv_cache=False
    )


def attend_paged(inputs: Inputs, layer: Any) -> Attend:
    """Our hook on SGLang's ``trtllm_mha`` decode."""
    q, backend, load = inputs.q_BHGD.flatten(1), page_tables(inputs), inputs.load
    rows = load.batch * load.queries
    if q.is_cuda:
        layer.fp8rl_layer.scales.decode_workspace = Workspace(
            rows * load.context,
            rows,
            HEADS,
            GROUP,
            DIM,
            q.device,
            is_int8=isinstance(layer.fp8rl_layer.scales, TokenScales),
        )

    def attend(caches: Caches) -> torch.Tensor:
        backend.token_to_kv_pool.get_kv_buffer = lambda layer_id: caches
        return kv_attention.paged_decode(
            None,
            backend,
            q,
            None,
            None,
            layer,
            None,
            save_kv_cache=False,
        )

    return attend


def attend_xqa(inputs: Inputs, layer: Any, *, fp8_mma: bool = True) -> Attend:
    """FlashInfer's XQA with our scales; it casts q and P to E4M3 itself, unless ``fp8_mma`` is
    False: its other variant keeps them in BF16."""
    from flashinfer.xqa import xqa

    mine, backend = layer.fp8rl_layer, page_tables(inputs)
    q = inputs.q_BHGD.flatten(1, 2)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    q_scale = (mine.k_scale_h / mine.v_scale_h)[:1]

    def attend(caches: Caches) -> torch.Tensor:
        out = torch.empty_like(q)
        with _variant(fp8_mma):
            xqa(
                q.unsqueeze(1),
                *(paged(cache) for cache in caches),
                backend._get_layer_page_table(layer, None),
                backend.forward_metadata.cache_seqlens_int32.unsqueeze(1),
                out.unsqueeze(1),
                workspace[SEMAPHORE_BYTES:],
                workspace[:SEMAPHORE_BYTES],
                HEADS,
                PAGE,
                q_scale=q_scale,
                kv_scale=mine.v_scale_h[:1],
                kv_layout="HND",
            )
        return out.flatten(1)

    return attend


def page_tables(inputs: Inputs) -> Any:
    """What ``paged_decode`` reads of SGLang's backend."""
    last = inputs.load.queries
    pages = pages_of(inputs).repeat_interleave(last, 0)  # each query is a sequence of its own
    lengths = inputs.load.lengths_B[:, None] - last + 1 + torch.arange(last)
    lengths = lengths.flatten().int().to(pages.device)
    return SimpleNamespace(
        page_size=PAGE,
        forward_metadata=SimpleNamespace(cache_seqlens_int32=lengths),
        token_to_kv_pool=SimpleNamespace(),
        _get_layer_page_table=lambda layer, forward_batch: pages,
    )


def paged(cache_SHD: torch.Tensor) -> torch.Tensor:
    """Pages of a cache, heads before tokens, without a copy."""
    return cache_SHD.view(-1, PAGE, HEADS, DIM).permute(0, 2, 1, 3)


def _variant(fp8_mma: bool) -> AbstractContextManager[Any]:
    """``flashinfer.xqa.xqa`` takes the FP8 MMA on Hopper; the other one is in the same module."""
    if fp8_mma:
        return nullcontext()
    xqa = importlib.import_module("flashinfer.xqa")  # the package has a function of that name
    get_module = xqa.get_xqa_module

    def other(*key: Any) -> SimpleNamespace:
        module = get_module(*key)
        return SimpleNamespace(xqa=lambda _, *rest: module.xqa(False, *rest))

    return patch.object(xqa, "get_xqa_module", other)
