"""Engine-side calibration: what is measured, when, and on whose tokens."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_fp8rl.engine.attention import kv_attention
from sgl_fp8rl.engine.control import internal_requests, kv_calibrate
from sgl_fp8rl.engine.control.kv_calibrate import LEAST_ROOM, MOST_ROOM
from sgl_fp8rl.receiver.kv.quantized import Heads
from sgl_fp8rl.receiver.kv.scales import START_V, KVScales
from tests.sgl_fp8rl.kv import fakes
from tests.sgl_fp8rl.kv.fakes import BF16, HEADS, Backend, batch, qkv

PROBE = f"{HEALTH_CHECK_RID_PREFIX}_1"


WARM_UP = f"{internal_requests.WARM_UP_PREFIX}_1"


def kv(tokens: int, size: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """K and V of ``fakes.qkv``."""
    return qkv(tokens, seed, size)[1:]


def by_hand(before: list[float], k: torch.Tensor, v: torch.Tensor) -> list[float]:
    """K, V: the power of two next to the one before whose range has room, element by element."""
    found = []
    for scale, x in zip(before, (k, v), strict=True):
        top = max(abs(value) for value in x.flatten().tolist())
        while 448 * scale < LEAST_ROOM * top:
            scale *= 2
        while 448 * scale >= MOST_ROOM * top:
            scale /= 2
        found.append(scale)
    return found


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("size", [2.0**-12, 2.0**-8, 1.0, 2.0**6, 2.0**9])
@pytest.mark.parametrize("before", [2.0**-9, 1.0, 2.0**14])
def test_a_scale_moves_as_little_as_its_range_needs(
    tokens: int, size: float, before: float
) -> None:
    scales, (layer,) = fakes.scaled()
    scales.write(torch.full(scales.shape, before))
    k, v = kv(tokens, size)
    kv_calibrate.calibrate(layer.fp8rl_layer, k, v)
    assert scales.scales[0].T.tolist() == [by_hand([before] * 2, k, v)] * HEADS


def after_one(before: float, size: float, dtype: torch.dtype = BF16) -> KVScales:
    scales, (layer,) = fakes.scaled()
    scales.write(torch.full(scales.shape, before))
    kv_calibrate.calibrate(layer.fp8rl_layer, *(x.to(dtype) for x in kv(8, size)))
    return scales


def test_scales_stay_what_kernels_take() -> None:
    for before, size in product((2.0**-48, 2.0**48), (2.0**-120, 2.0**120)):
        scales = after_one(before, size)
        scales.check(scales.scales)
    # a trainer's become powers of two, whatever the dtype
    assert after_one(0.7, 1.0).scales.unique().tolist() == [1.0]
    assert after_one(0.7, 1.0, torch.float16).scales.unique().tolist() == [1.0]


# -- whatever comes first


FIRST_V = 0.02
"""V of a prompt's first token beside that of others."""
E4M3_ERROR = 0.03
"""Relative L2 error of K and V where nothing is clipped and little is coarse: 0.0265 is E4M3's."""
POLICY = 64
"""Tokens of the policy whose K and V are compared."""


def tokens_of(size: float, bias: float = 0.0) -> tuple[torch.Tensor, ...]:
    """What a policy makes of a prompt: V of the first token is small, and a channel of K may have a
    bias."""
    k, v = (x.clone() for x in kv(POLICY, size, seed=1))
    k[..., 0] += bias
    v[0] *= FIRST_V
    return k, v


def stored(layer: Any, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that attention reads back, float32, by the CPU engine's own store."""
    caches = [torch.zeros(POLICY + 1, *x.shape[1:], dtype=torch.float8_e4m3fn) for x in (k, v)]
    mine = layer.fp8rl_layer
    mine.store(k, v, torch.arange(1, POLICY + 1), caches)
    k_values, v_values = (
        cache[1:].float() * scale_h[:, None]
        for cache, scale_h in zip(caches, (mine.k_scale_h, mine.v_scale_h), strict=True)
    )
    return k_values, v_values


def error(x: torch.Tensor, values: torch.Tensor) -> float:
    """Relative, L2, of the channels without outliers."""
    x = x[..., 1:].float()
    return float((values[..., 1:] - x).norm() / x.norm())


def after(first: list[range], size: float = 1.0, bias: float = 0.0) -> tuple[KVScales, Any]:
    """The scales of the last version of an engine whose versions began with these tokens."""
    scales, (layer,) = fakes.scaled()
    for piece in first:
        scales.recalibrate()
        kv_calibrate.calibrate(layer.fp8rl_layer, *(x[piece] for x in tokens_of(size, bias)))
        assert not scales.pending
    return scales, layer


FIRST = [range(1), range(1, 2), range(3), range(8), range(38), range(30, POLICY), range(POLICY)]


@pytest.mark.parametrize(
    ("size", "bias"), [(1e-3, 0.0), (0.02, 0.0), (0.3, 0.0), (1.0, 0.0), (8.0, 0.0), (1.0, 300.0)]
)
def test_what_is_stored_does_not_depend_on_what_came_first(size: float, bias: float) -> None:
    """The root mean square of K and V is about 2.6 times ``size``."""
    k, v = tokens_of(size, bias)
    for first in ([], [range(POLICY)], [range(1)]):
        seen = []
        for piece in FIRST:
            scales, layer = after([*first, piece], size, bias)
            values = stored(layer, k, v)
            assert scales.statistics[0, 1:3].tolist() == [0, 0]
            errors = error(k, values[0]), error(v, values[1])
            assert max(errors) < E4M3_ERROR, (piece, first, errors)
            seen.append((scales.scales[0, :, 0].clone(), values))
        coarse = torch.stack([scale for scale, _ in seen]).amax(0) * 2**-6
        for row, x in enumerate((k, v)):
            normal = x.float().abs() >= coarse[row]
            for _, values in seen:
                assert torch.equal(values[row][normal], seen[0][1][row][normal])


@pytest.mark.parametrize("first", [range(1), range(38)])
def test_the_control_amax_times_a_margin_of_the_first_prefill(first: range) -> None:
    """The rule that was: one token makes most of V clip, and 38 tokens have codes of their own."""
    k, v = tokens_of(1.0)
    scales, (layer,) = fakes.scaled()
    amax_2 = torch.stack([kv_calibrate.largest(x[first]) for x in (k, v)])
    scales.write((amax_2 * 4 / 448).view(1, 2, 1).expand(1, 2, HEADS))
    values = stored(layer, k, v)
    _, kept = after([range(POLICY)])
    same = (values[1] == stored(kept, k, v)[1]).float().mean()
    share = int(scales.statistics[0, 2]) / v.numel()
    if len(first) == 1:
        assert share > 0.5 and error(v, values[1]) > 0.5
    else:
        assert share == 0 and same < 0.1


# -- what is measured


def test_only_the_layer_at_hand_is_written() -> None:
    scales, layers = fakes.scaled(layers=2)
    before = scales.scales.clone()
    scales.recalibrate()
    kv_calibrate.calibrate(layers[1].fp8rl_layer, *kv(4, 1000.0))
    assert torch.equal(scales.scales[0], before[0])
    assert not bool((scales.scales[1] == before[1]).any())
    assert scales.pending == {0}


def test_zeros_nan_and_inf_make_no_bad_scale() -> None:
    k, v = (x.clone() for x in kv(4, 1000.0))
    k[0, 0, 0], k[1, 0, 1] = torch.nan, torch.inf
    k[:, 1] = 0  # a head of zeros takes the layer's scale
    scales, (layer,) = fakes.scaled()
    kv_calibrate.calibrate(layer.fp8rl_layer, k, torch.zeros_like(v))
    scales.check(scales.scales)
    sound = k[:, 0].float().nan_to_num(posinf=0.0)
    assert scales.scales[0, 0].tolist() == [by_hand([1.0] * 2, sound, sound)[0]] * HEADS
    assert scales.scales[0, 1].tolist() == [START_V] * HEADS


def test_ranks_agree_on_the_scales_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one head each; the collective is played by hand."""
    group = SimpleNamespace(world_size=2, device_group="the group")
    monkeypatch.setitem(kv_calibrate.compat.__dict__, "get_tp_group", lambda: group)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    k, v = kv(8, 1000.0)
    shares = [(k[:, r : r + 1], v[:, r : r + 1]) for r in range(HEADS)]
    measured: list[torch.Tensor] = []
    together = torch.zeros(2)

    def all_reduce(tensor: torch.Tensor, op: Any, group: str) -> None:
        assert (op, group) == (dist.ReduceOp.MAX, "the group")
        measured.append(tensor.clone())
        tensor.copy_(torch.maximum(tensor, together))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for turn in range(2):  # first to hear what each measures, then with what the other said
        kept = []
        for rank, share in enumerate(shares):
            scales, (layer,) = fakes.scaled(heads=Heads.of(HEADS, rank, 2))
            kv_calibrate.calibrate(layer.fp8rl_layer, *share)
            kept.append(scales.scales)
        if turn == 0:
            assert not torch.equal(kept[0], kept[1])
            together = torch.maximum(measured[0], measured[1])
    assert torch.equal(kept[0], kept[1])
    whole, (layer,) = fakes.scaled()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    kv_calibrate.calibrate(layer.fp8rl_layer, k, v)
    assert torch.equal(kept[0], whole.scales)


# -- when


def forward(
    scales: KVScales | None, rids: list[str] | None, mode: ForwardMode = ForwardMode.EXTEND
) -> bool:
    """One forward pass of a model of one layer through the hooks; whether it was measured."""
    runner = SimpleNamespace(model=SimpleNamespace(fp8rl_kv=scales))
    seen: list[bool] = []

    def original(runner: Any, forward_batch: Any) -> str:
        seen.append(scales is not None and scales.measuring)
        return "logits"

    given = SimpleNamespace(rids=rids, forward_mode=mode)
    assert kv_calibrate.watch_forward(original, runner, given) == "logits"
    assert scales is None or not scales.measuring
    return seen[0]


@pytest.mark.parametrize(
    ("rids", "mode", "measured"),
    [
        (["one"], ForwardMode.EXTEND, True),
        ([PROBE, "one"], ForwardMode.EXTEND, True),
        ([PROBE], ForwardMode.EXTEND, False),
        ([WARM_UP], ForwardMode.EXTEND, False),
        (["one"], ForwardMode.DECODE, False),
        # graph capture and dummy batches have no requests
        (None, ForwardMode.EXTEND, False),
        ([], ForwardMode.EXTEND, False),
    ],
)
def test_which_pass_is_measured(rids: list[str] | None, mode: ForwardMode, measured: bool) -> None:
    assert not forward(None, rids, mode), "a model without scales"
    scales, _ = fakes.scaled()
    assert not forward(scales, rids, mode), "nothing is pending"
    scales.recalibrate()
    assert forward(scales, rids, mode) is measured


def test_a_pass_that_fails_ends_the_measurement() -> None:
    scales, _ = fakes.scaled()
    scales.recalibrate()

    def original(*_: Any) -> None:
        raise RuntimeError("out of memory")

    given = SimpleNamespace(rids=["one"], forward_mode=ForwardMode.EXTEND)
    with pytest.raises(RuntimeError, match="out of memory"):
        kv_calibrate.watch_forward(
            original, SimpleNamespace(model=SimpleNamespace(fp8rl_kv=scales)), given
        )
    assert not scales.measuring and scales.pending


def test_the_first_prefill_measures_before_it_stores_and_later_ones_do_not() -> None:
    scales, (layer,) = fakes.scaled()
    scales.recalibrate()
    backend = Backend()
    big = 1000.0

    def prefill(size: float, measuring: bool) -> None:
        scales.measuring = measuring
        q, k, v = qkv(8, size=size)
        kv_attention.folded_extend(Backend.forward, backend, q, k, v, layer, batch(8))

    prefill(big, measuring=False)  # a probe: stored under the scales that are in force
    assert scales.pending and int(scales.statistics[0, 1]) > 0
    prefill(big, measuring=True)
    assert not scales.pending
    assert int(scales.statistics[0, 0]) == 8 and int(scales.statistics[0, 1]) == 0
    kept = scales.scales.clone()
    prefill(1.0, measuring=True)
    assert torch.equal(scales.scales, kept)


# -- probes


def test_probes_have_a_namespace_of_their_own() -> None:
    ours = internal_requests.PREFIX_NAMESPACE
    for rid, wanted in ((PROBE, ours), (WARM_UP, ours), ("7", "the user's")):
        request = SimpleNamespace(rid=rid, extra_key="the user's")
        internal_requests.isolate_prefix(request)
        assert request.extra_key == wanted
    embedding = SimpleNamespace(rid=PROBE)
    internal_requests.isolate_prefix(embedding)
    assert not hasattr(embedding, "extra_key")


@pytest.mark.parametrize(
    ("is_server", "status", "rid", "asked", "named"),
    [
        (True, "Starting", None, {"max_new_tokens": 8}, True),
        (True, "Starting", None, [{"max_new_tokens": 8}] * 2, True),
        (True, "Starting", None, {"max_new_tokens": 9}, False),  # a user who comes early
        (True, "Starting", None, [{"max_new_tokens": 8}, {}], False),
        (True, "Starting", None, None, False),
        (True, "Starting", "mine", {"max_new_tokens": 8}, False),
        (True, "Up", None, {"max_new_tokens": 8}, False),
        # an Engine in a process never says that it is up
        (False, "Starting", None, {"max_new_tokens": 8}, False),
    ],
)
def test_the_few_tokens_asked_for_before_the_start_are_the_warm_up(
    is_server: bool, status: str, rid: str | None, asked: Any, named: bool
) -> None:
    manager = SimpleNamespace(server_status=SimpleNamespace(name=status))
    if is_server:
        manager.fp8rl_is_server = True
    request = SimpleNamespace(rid=rid, sampling_params=asked)
    answer = internal_requests.tag_warm_up(lambda m, obj, r: (m, obj, r), manager, request, "http")
    assert answer == (manager, request, "http")
    assert (request.rid is not None and internal_requests.is_internal(request.rid)) is named
    assert named or request.rid == rid
