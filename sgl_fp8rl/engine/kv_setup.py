"""The start of an FP8 KV cache: its scales, attached to the model, and what serves it, wrapped."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from sgl_fp8rl import compat
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine.hooks import wrap_attention, wrap_plans
from sgl_fp8rl.engine.start_log import log_start
from sgl_fp8rl.kv_cache import backends
from sgl_fp8rl.kv_cache.scales import Heads, KVScales, LayerKV, layer_kv


def attach_kv_scales(model: nn.Module, model_config: Any, scheme: str) -> KVScales | None:
    """Give a model with an FP8 KV cache its scales, all 1, or return None where it is not FP8.

    Args:
        scheme: the option ``kv_scheme``.

    Raises:
        ValueError: MLA, or an attention layer that does more than our hooks know.
    """
    if compat.get_model_args().kv_cache_dtype != backends.FP8_KV:
        return None
    if model_config.attention_arch == compat.AttentionArch.MLA:
        raise ValueError(
            "quantization fp8rl cannot scale the FP8 KV cache of MLA, which holds latents, yet; "
            "start the model without --kv-cache-dtype"
        )
    if model_config.is_hybrid_swa:
        raise ValueError(
            "quantization fp8rl cannot scale the FP8 KV cache of a model whose sliding-window "
            "layers have a pool of their own yet; start it without --kv-cache-dtype"
        )
    layers = [module for module in model.modules() if isinstance(module, compat.RadixAttention)]
    for layer in layers:
        if (
            layer.attn_type != compat.AttentionType.DECODER
            or layer.is_cross_attention
            or layer.qk_head_dim != layer.v_head_dim
        ):
            raise ValueError(
                f"quantization fp8rl cannot scale the FP8 KV cache of attention layer "
                f"{layer.layer_id} yet: it is not a plain decoder attention; start the model "
                f"without --kv-cache-dtype"
            )
    group = compat.get_tp_group()
    total = model_config.get_total_num_kv_heads()
    heads = Heads.of(total, group.rank_in_group, group.world_size)
    by_id = {layer.layer_id: layer for layer in layers}
    if not layers or {layer.tp_k_head_num for layer in layers} != {heads.count}:
        raise ValueError(
            f"quantization fp8rl expects {heads.count} KV heads on this rank in every attention "
            f"layer to scale an FP8 KV cache; start the model without --kv-cache-dtype"
        )
    scales = KVScales(
        len(by_id),
        heads,
        scheme,
        next(model.parameters()).device,
    )
    scales.elements = [heads.count * by_id[i].qk_head_dim for i in sorted(by_id)]
    attach(scales, model, layers)
    return scales


def load_kv_scales(scales: KVScales | None, path: str | None) -> None:
    """Start with the scales of the option ``kv_scales``, which win over a checkpoint's."""
    if scales is not None and path is not None:
        scales.load(path)


def check_kv_cache(original: Any, runner: Any) -> None:
    """AROUND ``ModelRunner.init_attention_backends``: check and wrap what really serves the
    cache, and FlashInfer's plans where it decodes.

    Raises:
        ValueError: a backend or a pool that our hooks do not reach.
    """
    original(runner)
    if runner.model_config.quantization != NAME:
        return
    prefill, decode = runner.prefill_attention_backend_str, runner.decode_attention_backend_str
    if decode == "flashinfer":
        wrap_plans()
    log_start(runner.model)
    if getattr(runner.model, "fp8rl_kv", None) is None:
        return
    backends.check(prefill, decode, backends.capability())
    pool = runner.token_to_kv_pool
    if type(pool) is not compat.MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise ValueError(
            f"quantization fp8rl cannot scale a KV cache in a {type(pool).__name__} of layout "
            f"{getattr(pool, 'kv_cache_layout', None)} yet; start without --kv-cache-dtype"
        )
    if decode == backends.TRTLLM_MHA:
        _prepare_decode(runner)
    wrap_attention(prefill, decode, runner.model)
    backends.log(prefill, decode, runner.page_size)


def _prepare_decode(runner: Any) -> None:
    """Compile our decode kernel and give it its workspace.

    Raises:
        ValueError: no kernel has the shape of the model's heads, or cuda.core cannot launch it.
    """
    from sgl_fp8rl.ops.paged_decode_cuda import Workspace

    layer = next(m for m in runner.model.modules() if layer_kv(m) is not None)
    scales = runner.model.fp8rl_kv
    scales.workspace = Workspace(
        runner.token_to_kv_pool.size,
        # the largest graph may round it up to the ranks, and to two batches
        runner.req_to_token_pool.size + 2 * compat.get_tp_group().world_size,
        layer.tp_k_head_num,
        layer.tp_q_head_num // layer.tp_k_head_num,
        layer.head_dim,
        scales.scales.device,
    )


def attach(scales: KVScales, model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Register the buffers with the model, and give each attention layer its share.

    Args:
        layers: in the order of their indices; layers of one ``layer_id`` share one.
    """
    model.fp8rl_kv = scales
    indices = {layer_id: index for index, layer_id in enumerate(sorted({_id(la) for la in layers}))}
    for layer in layers:
        layer.fp8rl_layer = LayerKV(scales, indices[_id(layer)])  # type: ignore[assignment]


def _id(layer: nn.Module) -> int:
    return int(layer.layer_id)  # type: ignore[arg-type]
