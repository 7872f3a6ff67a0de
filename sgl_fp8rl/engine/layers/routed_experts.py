"""The experts that tokens are routed to, as SGLang captures and returns them.

SGLang (``--enable-return-routed-experts``) writes each layer's choice into a device buffer, copies
it to the host after a forward pass and stores it there by KV slot: a request with a cached prefix
gets the choices of the request that computed it.
"""

from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.cpu.cpu_platform import is_active


def layout(model: torch.nn.Module) -> dict[str, Any] | None:
    """How to read the experts in a response, or None if this engine returns none.

    A response has int32 ``[tokens - 1, decoder_layers, top_k]``, without its last token, which had
    no forward pass. ``layers`` are the decoder layers with a router; the others hold zeros.
    ``experts`` is the number that a router chooses from, without shared ones.
    """
    capturer = compat.get_global_experts_capturer()
    moe_layers = {
        module.layer_id: module.num_experts - module.num_fused_shared_experts
        for module in model.modules()
        if isinstance(module, compat.FusedMoE)
    }
    if capturer is None or not moe_layers:
        return None
    return {
        "decoder_layers": capturer.num_layers,
        "layers": sorted(moe_layers),
        "experts": max(moe_layers.values()),
        "top_k": capturer.topk_size,
    }


def plain_host_memory(
    original: Any,
    cache: Any,
    num_tokens: int,
    num_layers: int,
    topk_size: int,
    name: str,
    **rest: Any,
) -> None:
    """AROUND ``BaseHostCache.__init__``: SGLang pins its memory, which fails without a GPU."""
    if not is_active():
        original(cache, num_tokens, num_layers, topk_size, name, **rest)
        return
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size = num_tokens, num_layers, topk_size
    cache.name = name
    cache._log_allocation()


def clone_captured_topk(original: Any, capturer: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``BaseTopkCapturer.on_forward_end``: copy the experts before they can change.

    SGLang 0.5.17 returns a view of the buffer that the next forward pass overwrites; with overlap
    scheduling that runs concurrently with the copy on a GPU, and before it on a CPU.
    """
    output = original(capturer, *args, **kwargs)
    reused = capturer.device_cache.buffer.untyped_storage().data_ptr()
    if output is not None and output.topk.untyped_storage().data_ptr() == reused:
        output.topk = output.topk.clone()
    return output
