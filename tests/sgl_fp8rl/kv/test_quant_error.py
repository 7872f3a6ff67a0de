"""The error of what a prefill stored: against NumPy, only once asked for, never in decode."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_fp8rl.engine.attention.kv_attention import folded_decode, folded_extend
from sgl_fp8rl.engine.control.kv_calibrate import watch_forward
from sgl_fp8rl.receiver.kv import kv_stats, quant_error
from sgl_fp8rl.receiver.kv.quantized import Heads
from sgl_fp8rl.receiver.kv.scales import KVScales, ScaledLayer
from tests import kv_oracle, oracle

LAYERS, HEADS, DIM, SLOTS = 2, 2, 32, 64
SLOTS_20 = list(range(1, 21))
RTOL = 1e-12
"""Of sums in float64; 1e-16 was measured."""


class Engine:
    """One attention layer over a pool of slots, reached through our hooks as SGLang calls them."""

    def __init__(self, k_scale: float, v_scale: float) -> None:
        self.scales = KVScales(LAYERS, Heads(HEADS, 0, HEADS), "engine", "cpu")
        wanted = torch.ones(self.scales.shape)
        wanted[:, 0], wanted[:, 1] = k_scale, v_scale
        self.scales.write(wanted)
        self.scales.elements = [HEADS * DIM] * LAYERS
        self.cache = [torch.zeros(SLOTS, HEADS, DIM, dtype=torch.float8_e4m3fn) for _ in "kv"]
        self.forward_metadata = SimpleNamespace(use_ragged=True)
        self.token_to_kv_pool = SimpleNamespace(get_kv_buffer=lambda _: tuple(self.cache))

    def forward(
        self, k: torch.Tensor, v: torch.Tensor, slots: list[int], hook: Any = folded_extend
    ) -> None:
        """One pass over every layer, as ``ModelRunner.forward`` does it."""
        batch = SimpleNamespace(
            rids=["a request"],
            forward_mode=ForwardMode.EXTEND if hook is folded_extend else ForwardMode.DECODE,
            out_cache_loc=torch.tensor(slots),
        )

        def layers(runner: Any, batch: Any) -> None:
            for row in range(LAYERS):
                layer = RadixAttention(HEADS, DIM, 1.0, HEADS, row)
                layer.fp8rl_layer = ScaledLayer(self.scales, row)
                hook(attend, self, k.clone(), k, v, layer, batch)

        model = SimpleNamespace(fp8rl_kv=self.scales)
        watch_forward(layers, SimpleNamespace(model=model), batch)

    def told(self, layer: int = 0) -> dict[str, Any]:
        """What a report tells of a layer; ``stored`` is how many tokens were."""
        reply = kv_stats.report(self.scales, [kv_stats.of_rank(self.scales)])
        errors = reply["errors"] or [{"tokens": 0, "error_k": None, "error_v": None}] * LAYERS
        elements = reply["elements"][layer]
        stored = reply["statistics"][layer]["tokens"]
        return {**errors[layer], "elements": elements, "stored": stored}


def attend(backend: Any, q: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
    return q


def tokens(count: int, size: float, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(count, HEADS * DIM, generator=random) * size).bfloat16()


def expected(x: torch.Tensor, scale: float) -> float:
    """The relative L2 error by NumPy and the table of all E4M3 values."""
    values = x.float().numpy()
    codes, _ = kv_oracle.encode(values, float(np.float32(scale)))
    exact = values.astype(np.float64)
    error = oracle.decode(codes) * float(np.float32(scale)) - exact
    return math.sqrt((error**2).sum() / (exact**2).sum())


def test_error_of_k_and_v() -> None:
    engine = Engine(k_scale=0.02, v_scale=0.0031)
    k, v = tokens(20, 3.0), tokens(20, 0.5, seed=1)
    assert quant_error.start(engine.scales) == quant_error.TOKENS
    engine.forward(k, v, SLOTS_20)
    told = engine.told()
    assert told["tokens"] == told["stored"] == 20
    assert told["error_k"] == pytest.approx(expected(k, 0.02), rel=RTOL)
    assert told["error_v"] == pytest.approx(expected(v, 0.0031), rel=RTOL)
    assert told["elements"] == HEADS * DIM
    assert engine.told(1) == told
    # controls: K's and V's swapped, and another scale
    assert told["error_k"] != pytest.approx(expected(v, 0.0031), rel=1e-3)
    assert told["error_k"] != pytest.approx(expected(k, 0.021), rel=1e-3)


def test_clipping_is_part_of_the_error() -> None:
    k = tokens(20, 3.0)
    k[:, 5] = 1000.0
    errors = []
    for scale in (1.0, 1000 / 448):
        engine = Engine(scale, 1.0)
        quant_error.start(engine.scales)
        engine.forward(k, k, SLOTS_20)
        assert engine.told()["error_k"] == pytest.approx(expected(k, scale), rel=RTOL)
        errors.append(engine.told()["error_k"])
    assert errors[0] > 0.5 > 0.05 > errors[1]


def test_it_is_what_the_cache_holds() -> None:
    engine = Engine(0.02, 0.02)
    k_THD = tokens(4, 3.0).view(4, HEADS, DIM)
    layer, slots, caches = ScaledLayer(engine.scales, 0), torch.tensor([1, 2, 3, 4]), engine.cache
    layer.store(k_THD, k_THD, slots, (caches[0], caches[1]))
    engine.cache[0].zero_()  # as a store that is wrong would leave it
    quant_error.start(engine.scales)
    quant_error.observe(layer, k_THD, k_THD, slots, (caches[0], caches[1]))
    (told, _) = kv_stats.report(engine.scales, [kv_stats.of_rank(engine.scales)])["errors"]
    assert told["error_k"] == 1.0 > told["error_v"] > 0.0


@pytest.mark.parametrize("why", ["not asked", "decode", "a probe"])
def test_what_is_not_measured(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(0.02, 0.02)
    if why != "not asked":
        quant_error.start(engine.scales)
    if why == "a probe":
        monkeypatch.setattr("sgl_fp8rl.engine.control.kv_calibrate.is_internal", lambda rid: True)
    hook = folded_decode if why == "decode" else folded_extend
    engine.forward(tokens(20, 3.0), tokens(20, 3.0), SLOTS_20, hook)
    told = engine.told()
    assert (told["stored"], told["tokens"], told["error_k"], told["error_v"]) == (20, 0, None, None)
    asked = why != "not asked"
    assert (kv_stats.of_rank(engine.scales)[2] is not None) == asked
    assert engine.scales.to_observe == [quant_error.TOKENS * asked] * LAYERS


def test_it_ends_after_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_error, "TOKENS", 25)
    engine = Engine(0.02, 0.02)
    k = tokens(60, 3.0)
    quant_error.start(engine.scales)
    for first in (0, 20, 40):
        part = k[first : first + 20]
        engine.forward(part, part, list(range(first + 1, first + 21)))
    assert (engine.told()["stored"], engine.told()["tokens"]) == (60, 25)
    assert engine.told()["error_k"] == pytest.approx(expected(k[:25], 0.02), rel=RTOL)
    assert not any(engine.scales.to_observe)


def test_padding_and_what_is_no_number() -> None:
    engine = Engine(0.02, 0.02)
    k = tokens(20, 3.0)
    v = k.clone()
    k[19] = 6e4
    v[3, 7], v[4, 8] = math.nan, -math.inf
    quant_error.start(engine.scales)
    engine.forward(k, v, [*range(1, 20), 0])
    told = engine.told()
    assert (told["tokens"], told["not_finite_k"], told["not_finite_v"]) == (19, 0, 2)
    assert told["error_k"] == pytest.approx(expected(k[:19], 0.02), rel=RTOL)
    v[3, 7] = v[4, 8] = 0.0
    assert told["error_v"] == pytest.approx(expected(v[:19], 0.02), rel=RTOL)


def test_new_scales_begin_anew() -> None:
    engine = Engine(0.02, 0.02)
    k = tokens(20, 3.0)
    quant_error.start(engine.scales)
    engine.forward(k, k, SLOTS_20)
    engine.scales.write(torch.full(engine.scales.shape, 0.03))
    assert engine.told()["error_k"] is None
    engine.forward(k, k, SLOTS_20)
    assert engine.told()["error_k"] == pytest.approx(expected(k, 0.03), rel=RTOL)


def test_a_calibration_and_the_error_under_it_are_of_one_prefill() -> None:
    engine = Engine(1.0, 1.0)
    k = tokens(20, 300.0)
    engine.scales.recalibrate()
    quant_error.start(engine.scales)
    engine.forward(k, k, SLOTS_20)
    scale = float(engine.scales.scales[0, 0, 0])
    assert scale != 1.0
    assert engine.told()["tokens"] == 20
    assert engine.told()["error_k"] == pytest.approx(expected(k, scale), rel=RTOL)


def test_ranks_add_up() -> None:
    first = torch.tensor([[4.0, 1.0, 100.0, 1.0, 9.0, 25.0, 0.0]])
    second = torch.tensor([[4.0, 3.0, 300.0, 0.0, 0.0, 0.0, 2.0]])
    assert kv_stats.errors(torch.stack([first, second])) == [
        {
            "tokens": 4,
            "error_k": 0.1,
            "not_finite_k": 1,
            "error_v": 0.6,
            "not_finite_v": 2,
        }
    ]


def test_zeros_have_no_error() -> None:
    engine = Engine(0.02, 0.02)
    zeros = torch.zeros(4, HEADS * DIM, dtype=torch.bfloat16)
    quant_error.start(engine.scales)
    engine.forward(zeros, zeros, [1, 2, 3, 4])
    assert engine.told()["error_k"] == 0.0
