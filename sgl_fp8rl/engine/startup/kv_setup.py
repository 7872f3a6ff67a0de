"""The start of an 8-bit KV cache: attach its scales to the model, and wrap what serves it."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from server_args import Fp8RLServerArgs
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention import backends
from sgl_fp8rl.engine.attention.hooks import wrap_attention, wrap_plans
from sgl_fp8rl.engine.compat.settings import resolved
from sgl_fp8rl.engine.startup.start_log import log_start
from sgl_fp8rl.ops.paged_prefill import Workspace as PrefillWorkspace
from sgl_fp8rl.options import current_options
from sgl_fp8rl.protocol.kv_schema import WORKSPACE_BYTES
from sgl_fp8rl.receiver.kv.quantized import Heads, QuantizedKV, layer_kv
from sgl_fp8rl.receiver.kv.scales import KVScales
from sgl_fp8rl.receiver.kv.token_scales import SCALE_BYTES, TokenScales


def attach_kv_scales(
    model: nn.Module, model_config: Any, options: Fp8RLServerArgs
) -> QuantizedKV | None:
    """Give a model with an 8-bit KV cache its scales, or return None where it has none.

    Raises:
        ValueError: MLA, or an attention layer that does more than our hooks know.
    """
    if compat.get_model_args().kv_cache_dtype != backends.FP8_KV:
        return None
    if model_config.attention_arch == compat.AttentionArch.MLA:
        raise ValueError(
            "quantization fp8rl cannot quantize the KV cache of MLA, which holds latents, yet; "
            "start the model without it"
        )
    if model_config.is_hybrid_swa:
        raise ValueError(
            "quantization fp8rl cannot quantize the KV cache of a model whose sliding-window "
            "layers have a pool of their own yet; add --disable-hybrid-swa-memory"
        )
    layers = [module for module in model.modules() if isinstance(module, compat.RadixAttention)]
    for layer in layers:
        if (
            layer.attn_type != compat.AttentionType.DECODER
            or layer.is_cross_attention
            or layer.use_irope
            or layer.qk_head_dim != layer.v_head_dim
        ):
            raise ValueError(
                f"quantization fp8rl cannot quantize the KV cache of attention layer "
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
            f"layer to scale an FP8 KV cache; start the model without it"
        )
    device = next(model.parameters()).device
    scales = (
        TokenScales(len(by_id), heads, device)
        if options.kv_cache == TokenScales.format
        else KVScales(len(by_id), heads, options.kv_scheme, device)
    )
    scales.elements = [heads.count * by_id[i].qk_head_dim for i in sorted(by_id)]
    attach(scales, model, layers)
    return scales


def load_kv_scales(scales: QuantizedKV | None, path: str | None) -> None:
    """Start with the scales of the option ``kv_scales``, which win over a checkpoint's."""
    if isinstance(scales, KVScales) and path is not None:
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
    scales: QuantizedKV | None = getattr(runner.model, "fp8rl_kv", None)
    if scales is None:
        return
    backends.check(prefill, decode, backends.capability(), scales.format)
    pool = runner.token_to_kv_pool
    if type(pool) is not compat.MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise ValueError(
            f"quantization fp8rl cannot scale a KV cache in a {type(pool).__name__} of layout "
            f"{getattr(pool, 'kv_cache_layout', None)} yet; start without --kv-cache-dtype"
        )
    with pool.memory_saver_adapter.region(compat.GPU_MEMORY_TYPE_KV_CACHE):
        if isinstance(scales, TokenScales):
            scales.allocate(pool.get_key_buffer(pool.start_layer).shape[0])
        if prefill == backends.FA3 or isinstance(scales, TokenScales):
            _prepare_prefill(runner, scales)
    if decode == backends.TRTLLM_MHA:
        _prepare_decode(runner, scales)
    wrap_attention(prefill, decode, runner.model)
    backends.log(prefill, decode, runner.page_size)


def with_token_scales(original: Any, configurator: Any, kvc: Any, layers: int) -> int:
    """AROUND ``DefaultPoolConfigurator._compute_cell_size``: the bytes of a token, with our scales.

    SGLang divides the memory that it gives to the KV cache by them.
    """
    size = int(original(configurator, kvc, layers))
    if kvc.model_config.quantization != NAME or current_options().kv_cache != TokenScales.format:
        return size
    heads = int(kvc.model_config.get_num_kv_heads(compat.get_tp_group().world_size))
    return size + SCALE_BYTES * heads * layers


def less_workspace(original: Any, configurator: Any, *args: Any, **kwargs: Any) -> int:
    """AROUND ``KVCacheConfigurator._profile_available_bytes``: the KV cache leaves memory to the
    workspace of prefill."""
    size = int(original(configurator, *args, **kwargs))
    is_mine = configurator.model_config.quantization == NAME
    if not is_mine or compat.get_model_args().kv_cache_dtype != backends.FP8_KV:
        return size
    settings = resolved(configurator.server_args)
    prefill = settings.prefill_attention_backend or settings.attention_backend
    return size - WORKSPACE_BYTES if prefill == backends.FA3 else size


def _prepare_prefill(runner: Any, scales: QuantizedKV) -> None:
    """Give prefill its workspace.

    Raises:
        ValueError: the longest sequence does not fit.
    """
    layer = next(m for m in runner.model.modules() if layer_kv(m) is not None)
    scales.prefill_workspace = PrefillWorkspace(
        layer.tp_k_head_num,
        layer.head_dim,
        runner.req_to_token_pool.req_to_token.shape[1] + runner.page_size,
        scales.value_dtype,
        scales.statistics.device,
        WORKSPACE_BYTES,
    )


def _prepare_decode(runner: Any, scales: QuantizedKV) -> None:
    """Compile our decode kernel and give it its workspace.

    Raises:
        ValueError: no kernel has the shape of the model's heads, or cuda.core cannot launch it.
    """
    from sgl_fp8rl.ops.paged_decode_cuda import Workspace

    layer = next(m for m in runner.model.modules() if layer_kv(m) is not None)
    scales.decode_workspace = Workspace(
        runner.token_to_kv_pool.size,
        # the largest graph may round it up to the ranks, and to two batches
        runner.req_to_token_pool.size + 2 * compat.get_tp_group().world_size,
        layer.tp_k_head_num,
        layer.tp_q_head_num // layer.tp_k_head_num,
        layer.head_dim,
        scales.statistics.device,
        is_int8=isinstance(scales, TokenScales),
        is_capped=bool(layer.logit_cap),
    )


def attach(scales: QuantizedKV, model: nn.Module, layers: Sequence[Any]) -> None:
    """Register the buffers with the model, and give each attention layer its share.

    Args:
        layers: in the order of their indices; layers of one ``layer_id`` share one.
    """
    model.fp8rl_kv = scales
    ids = sorted({layer.layer_id for layer in layers})
    for layer in layers:
        layer.fp8rl_layer = scales.layer(ids.index(layer.layer_id))
