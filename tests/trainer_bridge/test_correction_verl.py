"""The same numbers as verl 0.9.1: recorded ones always, verl itself where it can be imported.

    python tests/trainer_bridge/test_correction_verl.py    records anew; needs verl

Meant differences, which the cases are kept clear of or ask about directly:
- a NaN or an infinity is refused here and passed on there;
- a sequence without a token counts in verl's means over sequences (as ratio 1), here it does not;
- verl leaves k3_kl, ppl_ratio and the perplexities unbounded, here exponents stay within +-20;
- verl raises ZeroDivisionError where a band leaves no weight at all, here weight_ess is then 0;
- verl adds 1e-8 to each count it divides by, which is most of the tolerance;
- verl computes in the logprobs' dtype, here all is float64.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_bridge.test_metrics import NAMES
from trainer_bridge.correction import PRESETS, CorrectionConfig, correct_logprobs, policy_loss
from trainer_bridge.correction.config import REJECTIONS

RECORD = Path(__file__).with_suffix(".json")
REL = 5e-7  # verl adds 1e-8 to counts, weights are float32 here; measured 3e-8 and 1.6e-7 at worst
FLOAT32_REL = 1e-4  # verl in float32: k3 of a small mismatch cancels; measured 2.6e-5 at worst
IS_PREFIX = "rollout_corr/rollout_is_"


def _grid(seed: int, count: int, low: float, high: float) -> list[float]:
    """Multiples of 2^-12 that every dtype and machine holds alike, from a plain generator."""
    values, state = [], seed
    for _ in range(count):
        state = (6364136223846793005 * state + 1442695040888963407) % 2**64
        values.append(round((low + (high - low) * (state >> 33) / 2**31) * 4096) / 4096)
    return values


def _batch(seed: int, lengths: list[int], spread: float) -> dict[str, torch.Tensor]:
    width, count = max(lengths), len(lengths)
    rollout = torch.tensor(_grid(seed, count * width, -4.0, 0.0), dtype=torch.float64)
    noise = torch.tensor(_grid(seed + 1, count * width, -spread, spread), dtype=torch.float64)
    mask_BT = torch.arange(width) < torch.tensor(lengths)[:, None]
    pair = _logprobs(rollout.view(count, width), noise.view(count, width))
    return pair | {"mask": mask_BT}


def _logprobs(rollout_BT: torch.Tensor, noise_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Trainer's and rollout's, whose difference is the noise; both lower where one is positive."""
    above_BT = (rollout_BT + noise_BT).clamp(min=0.0)
    return {"trainer": rollout_BT + noise_BT - above_BT, "rollout": rollout_BT - above_BT}


def _holes() -> dict[str, torch.Tensor]:
    """Tool output in the middle of a response, one sequence of a token, rubbish outside."""
    batch = _batch(11, [30, 30, 1, 17], 0.6)
    batch["mask"][0, 5:20] = False
    for name in ("trainer", "rollout"):
        batch[name] = batch[name].where(batch["mask"], 3.0)
    return batch


BATCHES: dict[str, dict[str, torch.Tensor]] = {
    "near": _batch(1, [40, 33, 7, 21, 40, 2], 0.03),
    "far": _batch(3, [40, 33, 7, 21, 40, 2], 2.5),
    "extreme": _batch(5, [12, 5, 9], 900.0),
    "one token": _batch(7, [1], 0.5),
    "32k tokens": _batch(9, [32768, 20000], 0.02),
    "holes": _holes(),
}
NORM: dict[str, Any] = {"rollout_is_batch_normalize": True}
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"rs {name}": {"rollout_is": None, "rollout_rs": name} for name in REJECTIONS},
    "token norm": NORM | {"rollout_is": "token"},
    "seq norm": NORM | {"rollout_is": "sequence"},
    "seq icepop": {"rollout_is": "sequence", "rollout_is_threshold": "0.5_3.0"},
    "icepop norm": NORM | {"rollout_is": "token", "rollout_is_threshold": "0.8_1.1"},
    "three rs": {"rollout_is": "sequence", "rollout_rs_threshold": "0.7_1.6,0.2,0.3"}
    | {"rollout_rs": "token_k1,seq_max_k2, seq_mean_k3,token_k1"},
}
THRESHOLDS = {"k1": "0.9_1.2", "k2": "0.3", "k3": 0.05}
for _options in CONFIGS.values():
    if "rollout_rs" in _options:
        _options.setdefault("rollout_rs_threshold", THRESHOLDS[_options["rollout_rs"][-2:]])
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def verl_options(name: str) -> dict[str, Any]:
    """verl's own keywords; a preset's as verl's factory of that name sets them."""
    if name not in PRESETS:
        return CONFIGS[name]
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    config = getattr(RolloutCorrectionConfig, name)()
    fields = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    fields += ("rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
    return {field: getattr(config, field) for field in fields}


def run_verl(
    batch: dict[str, torch.Tensor], options: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]] | None:
    """verl's weights inside the mask that it leaves, that mask, and its metrics.

    None: no weight was left, and verl divided by zero.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    chosen = {k: v for k, v in options.items() if k not in ("bypass_mode", "loss_type")}
    tensors = (batch[name].to(dtype) for name in ("trainer", "rollout", "mask"))
    try:
        proto, mask_BT, metrics = compute_rollout_correction_and_rejection_mask(*tensors, **chosen)
    except ZeroDivisionError:
        return None
    weights_BT = torch.ones_like(mask_BT) if proto is None else proto.batch["rollout_is_weights"]
    return weights_BT * mask_BT, mask_BT > 0, metrics


def check_none_left(actual: tuple[torch.Tensor, torch.Tensor, dict[str, float]]) -> None:
    assert not actual[0].any() and actual[2]["weight_ess"] == 0.0
    assert actual[2]["clipped_fraction"] == 1.0


def ours(
    batch: dict[str, torch.Tensor], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """The same, of this project."""
    config = CorrectionConfig.from_verl(options)
    result = correct_logprobs(batch["trainer"], batch["rollout"], batch["mask"], config)
    return result.weights_BT, result.mask_BT, result.metrics


def expected_metrics(
    theirs: dict[str, float], options: dict[str, Any], batch: dict[str, torch.Tensor]
) -> dict[str, float]:
    """verl's metrics under our names, where they are meant to be the same."""
    expected = {
        name: theirs[row["verl"]] for name, row in NAMES.items() if row.get("verl") in theirs
    }
    band = f"{IS_PREFIX}oob_ratio"
    if options.get("rollout_is") == "sequence":  # of raw ratios there, of weights here
        expected["weight_min"] = theirs[f"{IS_PREFIX}seq_min"]
        expected["weight_max"] = theirs[f"{IS_PREFIX}seq_max"]
        expected.pop("clipped_fraction")  # of sequences there, of tokens here
    if band in theirs:
        expected["clipped_fraction"] = theirs[band]
    for option in dict.fromkeys(
        part.strip() for part in (options.get("rollout_rs") or "").split(",")
    ):
        if option:
            prefix = f"rollout_corr/rollout_rs_{option}_"
            mean = "mean" if option.startswith("token") else "seq_mean"
            for name in ("masked_fraction", "min", "max"):
                expected[f"{option}/{name}"] = theirs[prefix + name]
            expected[f"{option}/masked_sequence_fraction"] = theirs[f"{prefix}seq_masked_fraction"]
            expected[f"{option}/mean"] = theirs[prefix + mean]
    far = (batch["trainer"] - batch["rollout"])[batch["mask"]].abs().max() > 20
    for name in ("mismatch_kl_k3", "ppl_ratio", "trainer_ppl", "rollout_ppl") if far else ():
        expected.pop(name)
    return expected


def check(
    actual: tuple[torch.Tensor, torch.Tensor, dict[str, float]],
    metrics: dict[str, float],
    rel: float = REL,
) -> None:
    for name, value in metrics.items():
        # chi2 and k1 are differences of larger numbers, whose error they keep.
        floor = rel * (1 + abs(value) if name.startswith("chi2") else 1e-2)
        if name == "weight_ess":  # verl adds 1e-8 to the mean weight, which its ESS has squared
            floor += 4e-8 / metrics["weight_mean"] * value
        assert actual[2][name] == pytest.approx(value, rel=rel, abs=floor), name


def digest(weights_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, list[float]]:
    """Of each sequence: kept tokens, sum of the weights, and sum weighted by position."""
    weights_BT, position_T = weights_BT.double(), torch.arange(weights_BT.shape[1], **DOUBLE) + 1
    return {
        "kept": mask_BT.sum(1).tolist(),
        "weights": weights_BT.sum(1).tolist(),
        "moment": (weights_BT @ position_T).tolist(),
    }


NAMED = [*PRESETS, *CONFIGS]


@pytest.mark.parametrize("name", NAMED)
def test_numbers_recorded_from_verl(name: str) -> None:
    record = json.loads(RECORD.read_text())
    assert record["verl"] == "0.9.1"
    options = record["options"][name]
    if name in PRESETS:
        assert CorrectionConfig.from_verl(options) == PRESETS[name]
    for case, batch in BATCHES.items():
        recorded = record["numbers"][name][case]
        actual = ours(batch, options)
        if recorded is None:
            check_none_left(actual)
            continue
        if not applies_weights(options):
            actual = (actual[1].double(), *actual[1:])
        mine = digest(*actual[:2])
        assert mine["kept"] == recorded["kept"], case
        for key in ("weights", "moment"):
            wanted = recorded[key]
            if not applies_weights(options):
                wanted = mine[key]
            assert mine[key] == pytest.approx(wanted, rel=REL, abs=1e-9), (case, key)
        shared = record["numbers"]["disabled"][case]["metrics"]
        assert len(shared) >= 9
        check(actual, shared | recorded["metrics"])


def applies_weights(options: dict[str, Any]) -> bool:
    """PPO's ratio stands for the weights in bypass mode."""
    return not (options.get("bypass_mode") and options.get("loss_type") == "ppo_clip")


def verl_or_skip() -> None:
    reason = "verl 0.9.1 cannot be imported here; the recorded numbers were compared"
    verl = pytest.importorskip("verl", reason=reason)
    pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason=reason)
    if verl.__version__ != "0.9.1":
        pytest.skip(f"verl is {verl.__version__}, the comparison is with 0.9.1")


@pytest.mark.parametrize("name", NAMED)
def test_every_token_against_verl_itself(name: str) -> None:
    """Also in float32, as its users run it."""
    verl_or_skip()
    options = verl_options(name)
    random = torch.Generator().manual_seed(0)
    batches = dict(BATCHES)
    for spread in (1e-4, 0.02, 1.0, 30.0):
        rollout_BT = -3 * torch.rand(17, 129, generator=random, **DOUBLE)
        noise_BT = spread * torch.randn(17, 129, generator=random, **DOUBLE)
        mask_BT = torch.rand(17, 129, generator=random) < 0.7
        batches[f"random {spread}"] = _logprobs(rollout_BT, noise_BT) | {"mask": mask_BT}
    cases = [(batch, torch.float64, REL, REL, 1e-12) for batch in batches.values()]
    cases.append((BATCHES["near"], torch.float32, FLOAT32_REL, 1e-5, 1e-6))
    for batch, dtype, rel, rtol, atol in cases:
        found, result = run_verl(batch, options, dtype), ours(batch, options)
        if found is None:
            check_none_left(result)
            continue
        weights_BT, mask_BT, theirs = found
        assert torch.equal(result[1], mask_BT)
        if applies_weights(options):
            torch.testing.assert_close(result[0].to(dtype), weights_BT, rtol=rtol, atol=atol)
        check(result, expected_metrics(theirs, options, batch), rel)


def test_meant_differences() -> None:
    verl_or_skip()
    batch = _batch(13, [4, 3], 0.5)
    empty = {name: torch.cat([value, value[:1]]) for name, value in batch.items()}
    empty["mask"][2] = False
    found = [run_verl(each, {"rollout_is": "token"}) for each in (empty, batch)]
    gaps = {each[2]["rollout_corr/log_ppl_diff"] for each in found if each is not None}
    assert len(gaps) == 2
    assert ours(empty, {})[2] == ours(batch, {})[2]
    for value in (math.nan, -math.inf):
        broken = batch | {"trainer": batch["trainer"].clone()}
        broken["trainer"][0, 1] = value
        theirs = run_verl(broken, {"rollout_is": "token"})
        assert theirs is not None and not math.isfinite(theirs[2]["rollout_corr/kl"])
        with pytest.raises(ValueError, match=r"sequences.*finite"):
            ours(broken, {})


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "disabled"])
def test_the_loss_and_its_gradient_are_those_of_verl(name: str) -> None:
    verl_or_skip()
    algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl's losses need more")
    options, batch = verl_options(name), BATCHES["far"]
    generator = torch.Generator().manual_seed(2)
    shape = 2, *batch["mask"].shape
    advantages_BT, noise_BT = torch.randn(shape, generator=generator, **DOUBLE)
    logprobs_BT = (batch["trainer"] + noise_BT).clamp(max=0.0).requires_grad_()

    config, seen_BT = CorrectionConfig.from_verl(options), batch["trainer"]
    if config.bypass_mode:
        seen_BT = logprobs_BT.detach()
    correction = correct_logprobs(seen_BT, batch["rollout"], batch["mask"], config)
    losses_BT = policy_loss(logprobs_BT, advantages_BT, correction)
    mine = losses_BT.sum() / correction.mask_BT.sum().clamp(min=1)

    class Config(dict[str, Any]):
        clip_ratio = clip_ratio_low = clip_ratio_high = 0.2
        global_batch_info: dict[str, Any] = {}  # noqa: RUF012
        policy_loss = {"rollout_correction": options}  # noqa: RUF012

    rest: dict[str, Any] = {"loss_agg_mode": "token-mean", "config": Config()}
    if config.bypass_mode:
        of_rollout = batch["rollout"], logprobs_BT, advantages_BT, batch["mask"].double()
        theirs, _ = algos.compute_policy_loss_bypass_mode(*of_rollout, **rest)
    else:
        found = run_verl(batch, options)
        assert found is not None
        weights_BT, kept_BT, _ = found
        of_trainer = batch["trainer"], logprobs_BT, advantages_BT, kept_BT.double()
        rest |= {"rollout_is_weights": weights_BT}
        theirs, _ = algos.compute_policy_loss_vanilla(*of_trainer, **rest)
    theirs = theirs.nan_to_num(0.0)  # everything was rejected
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-9)
    gradients = [torch.autograd.grad(loss, logprobs_BT)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(*(g.nan_to_num(0.0) for g in gradients), rtol=1e-5, atol=1e-9)


def record() -> None:
    """Write what verl gives for all cases; metrics that no option changes once, at "disabled"."""
    import verl

    options = {name: verl_options(name) for name in NAMED}
    numbers: dict[str, dict[str, Any]] = {name: dict.fromkeys(BATCHES) for name in NAMED}
    for case, batch in BATCHES.items():
        found = {name: run_verl(batch, chosen) for name, chosen in options.items()}
        assert found["disabled"] is not None
        shared = expected_metrics(found["disabled"][2], options["disabled"], batch)
        for name, result in found.items():
            if result is None:
                continue
            metrics = expected_metrics(result[2], options[name], batch)
            own = metrics if name == "disabled" else dict(metrics.items() - shared.items())
            own = {key: own[key] for key in metrics if key in own}
            numbers[name][case] = digest(*result[:2]) | {"metrics": own}
    lines = [f"{json.dumps(name)}: {json.dumps(numbers[name])}" for name in NAMED]
    head = f'{{"verl": "{verl.__version__}", "options": {json.dumps(options)}, "numbers": {{\n'
    RECORD.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    record()
