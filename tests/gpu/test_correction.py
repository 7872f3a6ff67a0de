"""Correction by kernels against its twin and against NumPy loops."""

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.gpu.conftest import INTERPRETED
from tests.trainer_bridge import correction_oracle as oracle
from trainer_bridge.correction import (
    PRESETS,
    CorrectionConfig,
    correct_logprobs,
    correction,
    packed_bounds,
    triton_impl,
)
from trainer_bridge.correction import torch_impl as twin
from trainer_bridge.correction.config import LEVELS, REJECTIONS
from trainer_bridge.metrics.groups import Groups
from trainer_bridge.metrics.reducer import Reducer, Values

REL = 1e-12
"""Of the largest of its kind, float64 sums in another order; healthy below 1e-14."""
MOVED = 0.01
"""Part of the tokens that float32 logarithms may put into the next bin; healthy below 0.002."""
ONE_TOKEN = 3
"""It is counted in the whole, a position and a version."""
FLOAT32_REL = 2e-7
EVERYTHING = CorrectionConfig(
    "geometric",
    (0.9, 1.2),
    rollout_is_batch_normalize=True,
    rollout_rs={
        **{option: (0.2, 4.0) for option in REJECTIONS if option.endswith("k1")},
        **{option: 0.15 for option in REJECTIONS if not option.endswith("k1")},
    },
    veto_threshold=0.4,
)
CONFIGS = {
    **PRESETS,
    "everything": EVERYTHING,
    **{f"{level} band": CorrectionConfig(level, (0.9, 1.05)) for level in LEVELS},
    "mean of tokens": CorrectionConfig("token", 1.1, rollout_is_batch_normalize=True),
    "veto": CorrectionConfig(None, veto_threshold=0.6),
    "weights that are not applied": CorrectionConfig("token", bypass_mode=True),
}
SHAPES = {"narrow": (4, 5), "odd": (3, 40), "several parts": (3, 1100)}

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_batch(shape: tuple[int, int], device: str, spread: float = 0.2) -> Batch:
    """Ragged rows, one empty, one with a hole; what lies outside the mask is no number."""
    B, T = shape
    generator = torch.Generator().manual_seed(B * T)
    rollout_BT = -3 * torch.rand(shape, generator=generator)
    trainer_BT = rollout_BT + spread * torch.randn(shape, generator=generator)
    lengths_B = torch.tensor([T, 0, *((T * 2) // 3 + row for row in range(B - 2))])
    mask_BT = torch.arange(T) < lengths_B[:, None]
    mask_BT[0, T // 2] = False
    trainer_BT.masked_fill_(~mask_BT, math.nan)
    trainer, rollout, mask = (x.to(device) for x in (trainer_BT, rollout_BT, mask_BT))
    return trainer, rollout, mask


def counted(correct_rows: Any, batch: Batch, config: CorrectionConfig, groups: Groups) -> Any:
    reducer = Reducer()
    found = correct_rows(reducer, *batch, groups, config)
    return found, as_tensors(reducer.reduce(None))


def as_tensors(values: Values) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def assert_same(batch: Batch, config: CorrectionConfig, groups: Groups) -> None:
    mine, values = counted(triton_impl.correct_rows, batch, config, groups)
    expected, others = counted(twin.correct_rows, batch, config, groups)
    torch.testing.assert_close(mine.weights_BT, expected.weights_BT, rtol=FLOAT32_REL, atol=0)
    assert torch.equal(mine.mask_BT, expected.mask_BT)
    assert torch.equal(mine.old_logprobs_BT, expected.old_logprobs_BT)
    assert values.keys() == others.keys()
    for name, other in others.items():
        assert values[name].shape == other.shape, name
        if name == "histogram":
            assert torch.equal(values[name].sum(1), other.sum(1))
            # a token that moves is at most a bin away, so it is in one of the sums up to a bin
            moved = (values[name].cumsum(1) - other.cumsum(1)).abs()
            assert moved.sum() <= MOVED * other.sum() + ONE_TOKEN
        else:
            scale = other.abs().max().clamp(min=1.0).item()
            torch.testing.assert_close(values[name], other, rtol=REL, atol=REL * scale, msg=name)


def no_versions(batch: Batch) -> Groups:
    return Groups.of([], None, batch[2])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_kernels_count_what_their_twin_does(
    config: CorrectionConfig, shape: tuple[int, int], device: str
) -> None:
    batch = make_batch(shape, device)
    assert_same(batch, config, no_versions(batch))


@pytest.mark.parametrize("spread", [1e-6, 30.0])
def test_tiny_and_huge_mismatches(spread: float, device: str) -> None:
    batch = make_batch((3, 200), device, spread)
    assert_same(batch, EVERYTHING, no_versions(batch))


def test_positions_of_long_rows(device: str) -> None:
    batch = make_batch((2, 17_000), device)
    assert_same(batch, PRESETS["decoupled_token_is"], no_versions(batch))


@pytest.mark.parametrize("known", [True, False])
def test_versions(known: bool, device: str) -> None:
    """Also on a rank that was not told them, and with one that is too old to be reported."""
    batch = make_batch((4, 700), device)
    versions_BT = torch.arange(4 * 700).view(4, 700) // 500 + 7
    groups = Groups.of([8, 9, 11], versions_BT if known else None, batch[2])
    assert_same(batch, PRESETS["decoupled_token_is"], groups)


def test_dtypes_and_strides(device: str) -> None:
    """BF16 logprobs, and tensors that lie in memory the other way round."""
    trainer_BT, rollout_BT, mask_BT = make_batch((5, 60), device)
    turned = (
        trainer_BT.bfloat16().T.contiguous().T,
        rollout_BT.double().T.contiguous().T,
        mask_BT.T.contiguous().T,
    )
    straight = trainer_BT.bfloat16(), rollout_BT.double(), mask_BT
    config = PRESETS["decoupled_geo_rs_seq_tis"]
    found, _ = counted(triton_impl.correct_rows, turned, config, no_versions(turned))
    expected, _ = counted(twin.correct_rows, straight, config, no_versions(straight))
    assert torch.equal(found.weights_BT, expected.weights_BT)
    assert torch.equal(found.mask_BT, expected.mask_BT)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_rank_without_tokens_reads_what_others_do(
    config: CorrectionConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts op by op, and its numbers are added to those of the kernels by their place."""
    batch = make_batch((4, 5), device)
    nothing = batch[0][:0], batch[1][:0], batch[2][:0]
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_: sent.append(tensor.clone()))
    reducer, group = Reducer(), object()
    triton_impl.correct_rows(reducer, *batch, no_versions(batch), config)
    expected = as_tensors(reducer.reduce(cast(Any, group)))

    def join(tensor: torch.Tensor, op: Any, group: Any) -> None:
        join_two = torch.maximum if op == dist.ReduceOp.MAX else torch.add
        join_two(tensor, sent.pop(0), out=tensor)

    monkeypatch.setattr(dist, "all_reduce", join)
    reducer = Reducer()
    twin.correct_rows(reducer, *nothing, no_versions(nothing), config)
    found = as_tensors(reducer.reduce(cast(Any, group)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("level", LEVELS)
def test_weights_mask_and_metrics_by_loops(
    level: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here shares a line with the kernels."""
    generator = np.random.default_rng(3)
    rollout = [(-3 * generator.random(n)).tolist() for n in (60, 7, 33, 1)]
    trainer = [[v + 0.3 * generator.standard_normal() for v in row] for row in rollout]
    rejections = {"token_k3": 0.2, "seq_mean_k1": (0.7, 1.4), "seq_max_k2": 0.6}
    config = CorrectionConfig(level, 1.2, rollout_rs=rejections, veto_threshold=0.3)
    monkeypatch.setattr(correction, "_way_of", lambda mask_BT: triton_impl.correct_rows)
    found = correct_logprobs(
        *(oracle.pad(rows).to(device) for rows in (trainer, rollout)),
        oracle.mask_of(rollout).to(device),
        config,
    )
    x = oracle.log_ratios(trainer, rollout)
    kept = oracle.keep(x, rejections, config.veto_threshold)
    assert 0 < sum(map(sum, kept)) < sum(map(len, kept)), "some pass"
    weights = oracle.weigh(x, level, 1.2, False)
    expected_BT = oracle.pad([w * passes for w, passes in zip(weights, kept, strict=True)])
    torch.testing.assert_close(found.weights_BT.cpu(), expected_BT, rtol=FLOAT32_REL, atol=0)
    assert torch.equal(found.mask_BT.cpu(), oracle.pad(kept, False, torch.bool))
    for name, value in oracle.metrics(trainer, rollout).items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-11, abs=1e-13), name
    flat = np.concatenate(weights)
    assert found.metrics["weight_mean"] == pytest.approx(flat.mean(), rel=1e-12)
    assert found.metrics["masked_fraction"] == pytest.approx(1 - np.concatenate(kept).mean())


def test_control_other_limits_are_seen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch((4, 5), device)
    looser = CorrectionConfig(veto_threshold=EVERYTHING.veto_threshold)
    monkeypatch.setattr(
        packed_bounds, "pack_bounds", lambda config, made=packed_bounds.pack_bounds: made(looser)
    )
    with pytest.raises(AssertionError):
        assert_same(batch, EVERYTHING, no_versions(batch))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(
    value: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_BT, rollout_BT, mask_BT = make_batch((4, 5), device)
    trainer_BT[0, 1] = value
    monkeypatch.setattr(correction, "_way_of", lambda mask_BT: triton_impl.correct_rows)
    with pytest.raises(ValueError, match="1 sequences have a trainer or rollout logprob"):
        correct_logprobs(trainer_BT, rollout_BT, mask_BT)


def test_many_tokens_of_one_bin(device: str) -> None:
    """Sure ones, on which both policies agree to the last bit."""
    trainer_BT, rollout_BT, mask_BT = make_batch((3, 1100), device)
    agreed = trainer_BT.where(torch.arange(1100, device=device) % 3 == 0, rollout_BT)
    assert_same((agreed, rollout_BT, mask_BT), EVERYTHING, no_versions((agreed,) * 2 + (mask_BT,)))


WAITS_ONCE = {"everything": EVERYTHING, "decoupled_geo_rs": PRESETS["decoupled_geo_rs"]}


@pytest.mark.parametrize("config", WAITS_ONCE.values(), ids=WAITS_ONCE)
@pytest.mark.skipif(INTERPRETED, reason="there is nothing to wait for")
def test_a_gpu_runs_the_kernels_and_waits_once(
    config: CorrectionConfig, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch((3, 1100), device)
    correct_logprobs(*batch, config)  # compiles, and keeps its limits
    calls: list[Groups] = []
    reduce = Reducer.reduce

    def unguarded(reducer: Reducer, group: Any) -> dict[str, torch.Tensor]:
        torch.cuda.set_sync_debug_mode("default")
        return reduce(reducer, group)

    def noted(reducer: Reducer, *args: Any) -> Any:
        calls.append(args[3])
        return made(reducer, *args)

    made = triton_impl.correct_rows
    monkeypatch.setattr(triton_impl, "correct_rows", noted)
    monkeypatch.setattr(Reducer, "reduce", unguarded)
    torch.cuda.set_sync_debug_mode("error")
    try:
        correct_logprobs(*batch, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(calls) == 1
