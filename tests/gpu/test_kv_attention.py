"""Decode attention over FP8 KV without an engine: ours, FA2 and XQA.

Inputs and stand-ins are those of the benchmark (``benchmarks/kv/attention_kernels.py``).
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv.attention_inputs import DIM, GROUP, HEADS, Inputs, Load, draw, errors, exact
from sgl_fp8rl.ops.reference import FP8_DTYPE
from tests.gpu.conftest import Record

LOADS = (Load(4, 1024), Load(4, 1024, beyond=True), Load(3, 4096))
KERNELS = ("fa2", "paged", "xqa", "xqa-bf16-mma")
OF_CODES = {"fa2": 0.02, "paged": 0.005, "xqa": 0.11, "xqa-bf16-mma": 0.02}
"""Relative L2 error against float64 attention over what the codes mean. FA2 and the BF16 MMA round
q, P and out to BF16, ours P to FP16 and out, the FP8 MMA q and P to E4M3. Healthy: at most 0.0065,
0.0018, 0.078 and 0.0042 (H200)."""
WRONG = 1.5
"""The control: K and V scales off by this factor are seen by every kernel."""
REPLAYED = Load(4, 1024)


def attend_by(kernel: str, inputs: Inputs, layer: Any) -> kernels.Attend:
    if kernel == "fa2":
        return kernels.attend_fa2(inputs, layer, kernels.fa2(inputs, FP8_DTYPE))
    if kernel == "paged":
        return kernels.attend_paged(inputs, layer)
    return kernels.attend_xqa(inputs, layer, fp8_mma=kernel == "xqa")


@pytest.mark.parametrize("scheme", kernels.SCHEMES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_attention_over_codes(
    load: Load, kernel: str, scheme: str, record_property: Record
) -> None:
    """The arithmetic of scales alone: what the codes lost is on both sides."""
    inputs = draw(load, "cuda")
    layer = kernels.layer_of(scheme, inputs)
    caches = kernels.stored(layer, inputs)
    wanted = exact(kernels.meant(inputs, layer, caches))
    attend = attend_by(kernel, inputs, layer)
    found = errors(attend(caches), wanted)
    record_property(f"{load.name}, {kernel}, {scheme}", found)
    assert max(found["kv_error"]) < OF_CODES[kernel]
    # the control: the same codes under other scales
    scales = layer.fp8rl_layer.scales
    scales.write(scales.scales * WRONG)
    assert min(errors(attend(caches), wanted)["kv_error"]) > OF_CODES[kernel]


@pytest.mark.parametrize("scheme", kernels.SCHEMES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_graph_reads_the_scales_of_its_replay(kernel: str, scheme: str) -> None:
    inputs = draw(REPLAYED, "cuda")
    layer = kernels.layer_of(scheme, inputs)
    caches = kernels.stored(layer, inputs)
    attend = attend_by(kernel, inputs, layer)
    replay = captured(lambda: attend(caches))
    first = replay()
    assert torch.equal(first, attend(caches))
    scales = layer.fp8rl_layer.scales
    scales.write(scales.scales * torch.rand_like(scales.scales).add(1))
    second = replay()
    assert torch.equal(second, attend(caches))
    assert not torch.equal(first, second)
    assert bool(second.isfinite().all())


def test_stock_keeps_the_scales_of_the_capture() -> None:
    """The control of the test above: SGLang's own decode, with its scales as Python floats."""
    inputs = draw(REPLAYED, "cuda")
    layer = kernels.layer_of("layer", inputs)
    caches = kernels.stored(layer, inputs)
    layer.k_scale_float, layer.v_scale_float = (
        float(scale_H[0]) for scale_H in (layer.fp8rl_layer.k_scale_h, layer.fp8rl_layer.v_scale_h)
    )
    wanted = exact(kernels.meant(inputs, layer, caches))
    run = kernels.fa2(inputs, FP8_DTYPE)
    replay = captured(lambda: stock_fa2(inputs, layer, caches, run))
    first = replay()
    assert max(errors(first, wanted)["kv_error"]) < OF_CODES["fa2"]
    layer.k_scale_float *= 2
    layer.v_scale_float *= 2
    # outside of the graph the new ones are used
    assert not torch.equal(stock_fa2(inputs, layer, caches, run), first)
    assert torch.equal(replay(), first)


def captured(action: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Capture it in a CUDA graph; what is returned replays it and gives a copy of its result."""
    action()  # compiles and loads kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = action()

    def replay() -> torch.Tensor:
        graph.replay()
        return out.clone()

    return replay


def stock_fa2(inputs: Inputs, layer: Any, caches: kernels.Caches, run: Any) -> torch.Tensor:
    """SGLang's own decode of what is stored. ``run``: see ``kernels.fa2``."""
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    backend: Any = SimpleNamespace(
        forward_metadata=SimpleNamespace(decode_wrappers=[run.__self__]),
        decode_uses_dequant_workspace=False,
        token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda _: caches),
        _get_wrapper_idx=lambda _: 0,
    )
    q = inputs.q_BHGD.view(-1, HEADS * GROUP * DIM)
    batch: Any = SimpleNamespace(out_cache_loc=None)
    layer.is_cross_attention = False
    return FlashInferAttnBackend.forward_decode(
        backend, q, None, None, layer, batch, save_kv_cache=False
    )
