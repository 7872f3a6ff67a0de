"""What a calibrator measures, held against a float64 oracle in numpy that shares no code."""

import math
import re
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.trainer_bridge.test_fsdp import WORLD, failure, gathered, run
from trainer_bridge.kv.kv_calibrator import KVCalibrator

pytestmark = pytest.mark.timeout(120)

FLOOR = 1e-10
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Batch(NamedTuple):
    """What one layer's attention gets: BHTD, BHTD, and BT."""

    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None

    def copied(self) -> "Batch":
        """Without the mask."""
        return Batch(self.k.clone(), self.v.clone())


def batch(
    seed: int,
    heads: int = 2,
    batch: int = 2,
    tokens: int = 7,
    dtype: torch.dtype = torch.bfloat16,
    masked: bool = False,
) -> Batch:
    """Heavy-tailed values; each row has a size of its own."""
    made = torch.Generator().manual_seed(seed)

    def values(size: float) -> torch.Tensor:
        x = torch.randn(batch, tokens, heads, 8, generator=made)
        return (size * x**3).to(dtype).transpose(1, 2)  # strided as in a model

    mask = None
    if masked:
        mask = torch.rand(batch, tokens, generator=made) < 0.6
        mask[0, 0] = True
    return Batch(values(20.0), values(0.1), mask)


# -- the oracle


def magnitudes(batches: list[Batch], heads: int) -> list[list[np.ndarray]]:
    """|x| of every element that counts, for K, V and each head."""

    def of(name: str, head: int) -> np.ndarray:
        found = []
        for one in batches:
            x_BTD = getattr(one, name).double().numpy()[:, head]
            counts_BT = ... if one.mask is None else one.mask.numpy().astype(bool)
            found.append(np.abs(x_BTD[counts_BT]).ravel())
        return np.concatenate(found)

    return [[of(name, head) for head in range(heads)] for name in ("k", "v")]


def edge_above(value: float) -> float:
    """The least m/16 * 2^e above a value, 16 <= m <= 32."""
    fraction, exponent = math.frexp(value)
    return math.ldexp((math.floor(fraction * 32) + 1) / 32, exponent)


def nearest_rank(values: np.ndarray, percentile: float) -> float:
    return float(np.sort(values)[math.ceil(values.size * (percentile / 100)) - 1])


def expected(
    layers: list[list[Batch]], heads: int, percentile: float | None = None, margin: float = 2.0
) -> np.ndarray:
    def measure(values: np.ndarray) -> float:
        if percentile is None:
            return float(values.max())
        return edge_above(nearest_rank(values, percentile))

    rows = [[[measure(h) for h in r] for r in magnitudes(one, heads)] for one in layers]
    return power_above(np.maximum(np.array(rows), FLOOR) * margin / 448)


def power_above(values: np.ndarray) -> np.ndarray:
    """The least powers of two that are not below these values in FP32."""
    fraction, exponent = np.frexp(values.astype(np.float32))
    return np.ldexp(np.float32(1), exponent - (fraction == 0.5))


def observed(calibrator: KVCalibrator, layers: list[list[Batch]]) -> KVCalibrator:
    for layer, batches in enumerate(layers):
        for one in batches:
            calibrator.observe(layer, *one)
    return calibrator


def measured(calibrator: KVCalibrator) -> torch.Tensor:
    """What ``scales`` makes scales of: LRH, float64."""
    return calibrator._measure(calibrator._merged())


def same(scales: torch.Tensor, oracle: np.ndarray) -> bool:
    assert scales.dtype == torch.float32
    return scales.numpy().shape == oracle.shape and bool((scales.numpy() == oracle).all())


# -- amax and percentile


@given(
    seed=st.integers(0, 1000),
    shape=st.tuples(*[st.integers(1, n) for n in (3, 3, 9)]),
    dtype=st.sampled_from(DTYPES),
    masked=st.booleans(),
    microbatches=st.integers(1, 3),
    percentile=st.sampled_from([None, 25.0, 50.0, 87.5, 99.609375, 100.0]),
    margin=st.sampled_from([1.0, 1.05, 2.0]),
)
def test_scales_are_the_oracles(
    seed: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    masked: bool,
    microbatches: int,
    percentile: float | None,
    margin: float,
) -> None:
    """Bit for bit: percentiles whose share is a binary fraction have the same rank everywhere."""
    heads, size, tokens = shape
    layers = [
        [
            batch(10 * seed + 3 * layer + i, heads, size, tokens, dtype, masked)
            for i in range(microbatches)
        ]
        for layer in range(2)
    ]
    calibrator = KVCalibrator(2, heads, percentile=percentile, margin=margin)
    assert same(observed(calibrator, layers).scales(), expected(layers, heads, percentile, margin))


@pytest.mark.parametrize("percentile", [None, 100.0])
def test_padding_does_not_count(percentile: float | None) -> None:
    """Not even where it is NaN; the control counts it."""
    one = batch(0, masked=True)
    before, mask = one.copied(), one.mask
    assert mask is not None
    clean = observed(KVCalibrator(1, 2, percentile=percentile), [[one]]).scales()
    assert all(torch.equal(*pair) for pair in zip(one[:2], before[:2], strict=True))  # type: ignore[arg-type]
    sequence, token = (~mask).nonzero()[0].tolist()
    for x in (one.k, one.v):
        x.transpose(1, 2)[~mask] = 1e4
        x[sequence, :, token] = math.nan
    for given_ in (mask, mask.long(), mask.float()):
        padded = KVCalibrator(1, 2, percentile=percentile)
        assert torch.equal(observed(padded, [[one._replace(mask=given_)]]).scales(), clean)
    counted = KVCalibrator(1, 2, percentile=percentile)
    counted.observe(0, one.k, one.v)
    with pytest.raises(ValueError, match="NaN"):
        counted.scales()


@pytest.mark.parametrize("percentile", [None, 99.0])
def test_zeros_have_a_positive_scale(percentile: float | None) -> None:
    zeros = torch.zeros(2, 2, 7, 8)
    scales = observed(KVCalibrator(1, 2, percentile=percentile), [[Batch(zeros, zeros)]]).scales()
    assert same(scales, power_above(np.full((1, 2, 2), FLOOR * 2 / 448)))


# -- steps


@pytest.mark.parametrize("decay", [0.0, 0.75])
def test_a_smaller_measure_decays_and_a_larger_one_takes_effect_at_once(decay: float) -> None:
    calibrator, kept = KVCalibrator(1, 2, decay=decay, margin=1), np.zeros((1, 2, 2))
    for step, size in enumerate((1.0, 0.1, 0.1, 8.0, 0.5)):
        one = Batch(*(size * x for x in batch(step, dtype=torch.float32)[:2] if x is not None))
        now = np.array([[[h.max() for h in row] for row in magnitudes([one], 2)]])
        before, kept = kept, np.maximum(now, decay * kept + (1 - decay) * now)
        assert same(observed(calibrator, [[one]]).scales(), power_above(kept / 448))
        assert (kept == now).all() == (step in (0, 3) or not decay)
        assert step == 0 or (kept != before).all()


@pytest.mark.parametrize("percentile", [None, 99.0])
@pytest.mark.parametrize("row", ["k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_layer(bad: float, row: str, percentile: float | None) -> None:
    calibrator = KVCalibrator(3, 2, percentile=percentile)
    layers = [[batch(layer), batch(layer + 5)] for layer in range(3)]
    kept = [[b.copied() for b in bs] for bs in layers]
    getattr(layers[1][0], row)[1, -1, 3, 5] = bad
    observed(calibrator, layers)
    with pytest.raises(ValueError, match=f"layer 1 .*NaN or Inf.* {row.upper()}"):
        calibrator.scales()
    # the next step knows nothing of it
    assert same(observed(calibrator, kept).scales(), expected(kept, 2, percentile))


@pytest.mark.parametrize("percentile", [None, 99.0])
def test_a_layer_that_saw_no_tokens_is_refused(percentile: float | None) -> None:
    calibrator = KVCalibrator(3, 2, percentile=percentile)
    padding = batch(0)._replace(mask=torch.zeros(2, 7))
    empty = Batch(*[torch.zeros(2, 2, 0, 8)] * 2)
    one = batch(1)
    for layers, unseen in (
        ([[], [], []], 0),
        ([[one], [], [one]], 1),
        ([[padding], [empty, one], [one]], 0),
    ):
        with pytest.raises(ValueError, match=rf"layer {unseen} .*tokens"):
            observed(calibrator, layers).scales()
    layers = [[padding, one], [one, empty], [one]]
    assert observed(calibrator, layers).scales().shape == (3, 2, 2)


# -- how it observes


def attention(calibrator: KVCalibrator, x_BTC: torch.Tensor) -> torch.Tensor:
    q_BNTD = x_BTC.unflatten(-1, (4, 8)).transpose(1, 2)
    calibrator.observe(0, q_BNTD[:, :2], q_BNTD[:, 2:])
    return torch.nn.functional.scaled_dot_product_attention(q_BNTD, q_BNTD, q_BNTD)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("percentile", [None, 60.0])
def test_a_forward_that_is_computed_again_counts_once(
    percentile: float | None, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activation checkpointing; the control counts the same tokens twice."""
    inputs = [torch.randn(2, 5, 32), 10 * torch.randn(2, 5, 32)]

    def step(with_checkpoint: bool) -> KVCalibrator:
        calibrator = KVCalibrator(1, 2, percentile=percentile)
        for index, x in enumerate(inputs):
            leaf = x.clone().requires_grad_()
            if with_checkpoint and index == 0:  # one of two, else a share would stay what it is
                y = checkpoint(attention, calibrator, leaf, use_reentrant=reentrant)
            else:
                y = attention(calibrator, leaf)
            y.sum().backward()
        return calibrator

    plain, again = step(False), step(True)
    assert plain._statistics is not None and again._statistics is not None
    assert torch.equal(plain._statistics, again._statistics)
    assert torch.equal(plain.scales(), again.scales())

    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: -1)
    twice = step(True)
    if percentile is not None:
        assert not torch.equal(twice.scales(), step(False).scales())


@pytest.mark.parametrize("percentile", [None, 99.0])
@pytest.mark.parametrize("masked", [False, True])
def test_observing_waits_for_no_value(percentile: float | None, masked: bool) -> None:
    """On the meta device there is none to wait for; the control is what reads them."""
    calibrator = KVCalibrator(1, 2, percentile=percentile)
    with torch.device("meta"):
        values = torch.empty(2, 2, 7, 8, dtype=torch.bfloat16)
        meta = Batch(values, values, torch.empty(2, 7, dtype=torch.bool) if masked else None)
    observed(calibrator, [[meta, meta]])
    assert calibrator._statistics is not None and calibrator._statistics.is_meta
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        calibrator.scales()


def test_inference_mode_and_gradients_may_alternate() -> None:
    calibrator, one, other = KVCalibrator(1, 2, decay=0.5), batch(0), batch(1)
    for _ in range(2):
        with torch.inference_mode():
            calibrator.observe(0, one.k.clone(), one.v.clone())
        calibrator.observe(0, *(x.clone().requires_grad_() for x in other[:2] if x is not None))
        scales = calibrator.scales()
        assert not scales.requires_grad
    assert same(scales, expected([[one, other]], 2))


# -- refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("layers", value) for value in (0, 2.0)),
        *(("kv_heads", value) for value in (-1, [2, 2])),
        *(("percentile", value) for value in (0, 100.1, math.nan)),
        *(("margin", value) for value in (0, math.inf)),
        *(("decay", value) for value in (1, -0.1)),
    ],
)
def test_arguments_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        KVCalibrator(**{"layers": 1, "kv_heads": 2, name: value})


ONE = batch(0)
WIDE = ONE.k.repeat_interleave(3, 1)
MASK = torch.ones(2, 7)


@pytest.mark.parametrize(
    ("sentence", "given_"),
    [
        *((f"layer {layer} .*2 layers", (layer, *ONE[:2])) for layer in (2, -1)),
        *(("repeated", (0, *pair)) for pair in ((WIDE, ONE.v), (ONE.k, WIDE), (WIDE, WIDE))),
        ("2 heads", (0, ONE.k[0], ONE.v[0])),
        ("2 heads", (0, ONE.k[:, :, :1], ONE.v)),
        ("2 heads", (0, ONE.k, ONE.v[:1])),
        (r"mask of shape \(2, 6\)", (0, *ONE[:2], MASK[:, :6])),
        (r"mask of shape \(2, 1, 7, 7\)", (0, *ONE[:2], MASK[:, None, None].expand(2, 1, 7, 7))),
    ],
)
def test_what_cannot_be_attention_of_this_model(sentence: str, given_: tuple[Any, ...]) -> None:
    calibrator = KVCalibrator(2, 2)
    with pytest.raises(ValueError, match=sentence):
        calibrator.observe(*given_)
    assert calibrator._statistics is None


# -- several ranks


def merge(rank: int, folder: Path) -> None:
    """Each rank sees other tokens, and all get what one process gets of all of them."""
    everywhere = [[batch(10 * r + layer, masked=True) for layer in range(2)] for r in range(WORLD)]
    own = [[one] for one in everywhere[rank]]
    for percentile in (None, 87.5, 100.0):
        calibrator = KVCalibrator(2, 2, percentile=percentile)
        joint = [[ranks[layer] for ranks in everywhere] for layer in range(2)]
        assert same(observed(calibrator, own).scales(), expected(joint, 2, percentile))

        # the control: of one's own tokens alone, as in a group of oneself
        alone = [dist.new_group([r]) for r in range(WORLD)][rank]
        calibrator = KVCalibrator(2, 2, percentile=percentile, group=alone)
        scales = observed(calibrator, own).scales()
        assert same(scales, expected(own, 2, percentile))
        assert not same(scales, expected(joint, 2, percentile))

        # a rank may have had nothing; if all had, all hear
        calibrator = KVCalibrator(2, 2, percentile=percentile)
        scales = observed(calibrator, own if rank == 1 else []).scales()
        assert same(scales, expected([[one] for one in everywhere[1]], 2, percentile))
        assert re.search("layer 0 .*tokens", failure(calibrator.scales)[1])

        # NaN on one rank is a number on none
        bad = [[b.copied()] for (b,) in own]
        if rank == 1:
            bad[1][0].v[0, 0, 0, 0] = float("nan")
        observed(calibrator, bad)
        assert re.search("layer 1 .*NaN or Inf.* V\\b", failure(calibrator.scales)[1])

    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        observed(KVCalibrator(2, 2), own).scales()
    assert gathered([call.args[0].numel() for call in reduce.mock_calls]) == [[2 * 2 * 2]] * WORLD


@pytest.mark.timeout(180)
def test_ranks_get_the_scales_of_all_tokens(tmp_path: Path) -> None:
    run(merge, tmp_path)


@pytest.mark.parametrize(
    ("backends", "kind"), [("cpu:gloo,meta:nccl", "cpu"), ("meta:nccl", "meta")], ids=str
)
def test_a_rank_that_observed_nothing_reduces_where_others_do(
    backends: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device "meta" stands for a GPU."""
    reduce = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    for layers in ([], [[batch(0)]]):
        with pytest.raises(InterruptedError):
            observed(KVCalibrator(1, 2), layers).scales()
    assert [call.args[0].device.type for call in reduce.mock_calls] == [kind, kind]
