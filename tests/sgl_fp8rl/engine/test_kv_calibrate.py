"""Engine-side calibration: what is measured, when, and on whose tokens."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
import torch.distributed as dist
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_fp8rl.engine import internal_requests, kv_attention, kv_calibrate
from sgl_fp8rl.engine.kv_calibrate import MARGIN, SMALL_MARGIN, SMALL_SAMPLE
from sgl_fp8rl.kv_cache.quantized import Heads
from sgl_fp8rl.kv_cache.scales import KVScales
from tests.sgl_fp8rl.kv_cache import fakes
from tests.sgl_fp8rl.kv_cache.fakes import BF16, DIM, GROUP, HEADS, Backend, batch, qkv

PROBE = f"{HEALTH_CHECK_RID_PREFIX}_1"


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, margin: float) -> torch.Tensor:
    """[3, heads], element by element."""
    scales = torch.zeros(3, HEADS)
    for head in range(HEADS):
        query = q.unflatten(1, (HEADS * GROUP, DIM))[:, head * GROUP : (head + 1) * GROUP]
        for row, x in enumerate((k[:, head], v[:, head], query)):
            scales[row, head] = max(abs(value) for value in x.flatten().tolist()) * margin / 448
    return scales


@pytest.mark.parametrize(
    ("tokens", "margin"), [(SMALL_SAMPLE - 1, SMALL_MARGIN), (SMALL_SAMPLE, MARGIN)]
)
def test_scales_are_amax_times_margin(tokens: int, margin: float) -> None:
    scales, (layer,) = fakes.scaled()
    q, k, v = qkv(tokens)
    kv_calibrate.calibrate(layer.fp8rl_layer, q, k, v)
    wanted = by_hand(q, k, v, margin)
    assert torch.equal(scales.scales[0].amax(-1), wanted.amax(-1))
    assert bool((scales.scales[0] >= wanted).all())
    assert SMALL_MARGIN > MARGIN > 1


def test_only_the_layer_at_hand_is_written() -> None:
    scales, layers = fakes.scaled(layers=2)
    scales.recalibrate()
    kv_calibrate.calibrate(layers[1].fp8rl_layer, *qkv(4))
    assert bool((scales.scales[0] == 1).all()) and not bool((scales.scales[1] == 1).any())
    assert scales.pending == {0}


def test_zeros_nan_and_inf_make_no_bad_scale() -> None:
    q, k, v = qkv(4)
    k = k.clone()
    k[0, 0, 0], k[1, 0, 1] = torch.nan, torch.inf
    k[:, 1] = 0  # a head of zeros takes the layer's scale
    scales, (layer,) = fakes.scaled()
    kv_calibrate.calibrate(layer.fp8rl_layer, q, k, torch.zeros_like(v))
    scales.check(scales.scales)
    largest = k[:, 0].float().nan_to_num(posinf=0.0).abs().max()
    assert scales.scales[0, 0].tolist() == [float(largest * SMALL_MARGIN / 448)] * HEADS
    assert scales.scales[0, 1].tolist() == [1.0] * HEADS


def test_ranks_agree_on_the_scales_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of one head each; the collective is played by hand."""
    group = SimpleNamespace(world_size=2, device_group="the group")
    monkeypatch.setitem(kv_calibrate.compat.__dict__, "get_tp_group", lambda: group)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    q, k, v = qkv(8)
    shares = [
        (
            q.unflatten(1, (HEADS * GROUP, DIM))[:, r * GROUP : (r + 1) * GROUP],
            k[:, r : r + 1],
            v[:, r : r + 1],
        )
        for r in range(HEADS)
    ]
    measured: list[torch.Tensor] = []
    together = torch.zeros(3)

    def all_reduce(tensor: torch.Tensor, op: Any, group: str) -> None:
        assert (op, group) == (dist.ReduceOp.MAX, "the group")
        measured.append(tensor.clone())
        tensor.copy_(torch.maximum(tensor, together))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for turn in range(2):  # first to hear what each measures, then with what the other said
        kept = []
        for rank, (mine_q, mine_k, mine_v) in enumerate(shares):
            scales, (layer,) = fakes.scaled(heads=Heads.of(HEADS, rank, 2))
            kv_calibrate.calibrate(layer.fp8rl_layer, mine_q, mine_k, mine_v)
            kept.append(scales.scales)
        if turn == 0:
            assert not torch.equal(kept[0], kept[1])
            together = torch.maximum(measured[0], measured[1])
    assert torch.equal(kept[0], kept[1])
    whole, (layer,) = fakes.scaled()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    kv_calibrate.calibrate(layer.fp8rl_layer, q, k, v)
    assert torch.equal(kept[0], whole.scales)


@pytest.mark.parametrize("tokens", [kv_calibrate.FEW - 1, kv_calibrate.FEW])
def test_calibration_on_very_few_tokens_logs_a_warning(
    tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, layers = fakes.scaled(layers=2)
    for layer in layers:
        kv_calibrate.calibrate(layer.fp8rl_layer, *qkv(tokens))
    said = [f"measured on {tokens} tokens" in record.getMessage() for record in caplog.records]
    assert said == ([True] if tokens < kv_calibrate.FEW else [])


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
        ([f"{internal_requests.WARM_UP_PREFIX}_1"], ForwardMode.EXTEND, False),
        (["one"], ForwardMode.DECODE, False),
        # graph capture and dummy batches have no requests
        (None, ForwardMode.EXTEND, False),
        ([], ForwardMode.EXTEND, False),
    ],
)
def test_which_pass_is_measured(rids: list[str] | None, mode: ForwardMode, measured: bool) -> None:
    scales, _ = fakes.scaled()
    assert not forward(scales, rids, mode), "nothing is pending"
    scales.recalibrate()
    assert forward(scales, rids, mode) is measured


def test_models_without_scales_run_as_ever() -> None:
    assert not forward(None, ["one"])


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


@pytest.mark.parametrize(
    ("rid", "namespace"),
    [
        (PROBE, internal_requests.PREFIX_NAMESPACE),
        (f"{internal_requests.WARM_UP_PREFIX}_7", internal_requests.PREFIX_NAMESPACE),
        ("7", "the user's"),
    ],
)
def test_probes_have_a_namespace_of_their_own(rid: str, namespace: str) -> None:
    request = SimpleNamespace(rid=rid, extra_key="the user's")
    internal_requests.isolate_prefix(request)
    assert request.extra_key == namespace


def test_a_probe_for_an_embedding_has_no_namespace() -> None:
    request = SimpleNamespace(rid=PROBE)
    internal_requests.isolate_prefix(request)
    assert not hasattr(request, "extra_key")


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


def test_the_dtype_of_q_does_not_matter() -> None:
    q, k, v = (x.to(torch.float16) for x in qkv(4))
    scales, (layer,) = fakes.scaled()
    kv_calibrate.calibrate(layer.fp8rl_layer, q, k, v)
    assert scales.scales.dtype == torch.float32
    assert q.dtype != BF16
