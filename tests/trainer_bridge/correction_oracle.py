"""What corrections and metrics should be: NumPy float64, one token after another, no shared code.

A batch is rows of trainer and of rollout logprobs, as long as the sequences are.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from trainer_bridge.rollouts.batch import Rollout

Rows = list[list[float]]
BOUND = 20.0


def float32(rows: Rows) -> list[np.ndarray]:
    """The rows as float32 tensors hold them, in float64."""
    return [np.array(row, np.float32).astype(np.float64) for row in rows]


def log_ratios(trainer: Rows, rollout: Rows) -> list[np.ndarray]:
    return [t - r for t, r in zip(float32(trainer), float32(rollout), strict=True)]


def clamp(x: float) -> float:
    return min(max(float(x), -BOUND), BOUND)


def k3(x: float) -> float:
    """exp(x) - 1 - x, by its series where that cancels."""
    if abs(x) < 1e-2:
        return sum(x**n / math.factorial(n) for n in range(2, 9))
    return math.exp(x) - 1.0 - x


def token_metrics(x: list[float], rollout: list[float]) -> dict[str, float]:
    """Of any set of tokens: their log ratios and rollout logprobs."""
    n = len(x)
    ratio = [math.exp(clamp(value)) for value in x]
    squares = math.fsum(r * r for r in ratio)
    return {
        "tokens": float(n),
        "mismatch_kl_k1": math.fsum(-value for value in x) / n,
        "mismatch_kl_k3": math.fsum(k3(clamp(v)) + clamp(v) - v for v in x) / n,
        "ratio_mean": math.fsum(ratio) / n,
        "ess": math.fsum(ratio) ** 2 / (n * squares),
        "chi2_token": math.fsum(math.expm1(2 * clamp(value)) for value in x) / n,
        "logprob_abs_diff_mean": math.fsum(map(abs, x)) / n,
        "token_mult_prob_error": math.fsum(math.exp(min(abs(value), BOUND)) for value in x) / n,
        "rollout_nll": -math.fsum(rollout) / n,
    }


def percentile(x: list[float], percent: int) -> float:
    """The smallest log ratio with so many percent at or below it."""
    return sorted(map(clamp, x))[max(math.ceil(len(x) * percent / 100), 1) - 1]


def metrics(trainer: Rows, rollout: Rows) -> dict[str, float]:
    """All but the percentiles and the groups."""
    rows = [(t, r) for t, r in zip(float32(trainer), float32(rollout), strict=True) if len(t)]
    x = [value for t, r in rows for value in (t - r).tolist()]
    sums = [math.fsum(t - r) for t, r in rows]
    nll = {
        "trainer": [-math.fsum(t) / len(t) for t, _ in rows],
        "rollout": [-math.fsum(r) / len(r) for _, r in rows],
    }
    gaps = [-total / len(t) for total, (t, _) in zip(sums, rows, strict=True)]
    found = token_metrics(x, [value for _, r in rows for value in r.tolist()]) | {
        "sequences": float(len(rows)),
        "ratio_min": math.exp(clamp(min(x))),
        "ratio_max": math.exp(clamp(max(x))),
        "logprob_abs_diff_max": max(map(abs, x)),
        "chi2_seq": np.mean([math.expm1(2 * clamp(total)) for total in sums]),
        "log_ppl_gap": np.mean(gaps),
        "log_ppl_gap_abs": np.mean(np.abs(gaps)),
        "log_ppl_gap_min": min(gaps),
        "log_ppl_gap_max": max(gaps),
        "ppl_ratio": np.mean([math.exp(clamp(gap)) for gap in gaps]),
    }
    for who, values in nll.items():
        found[f"{who}_log_ppl"] = np.mean(values)
        found[f"{who}_ppl"] = np.mean([math.exp(clamp(value)) for value in values])
    return {name: float(value) for name, value in found.items()}


def weigh(
    x: list[np.ndarray], level: str, threshold: float | tuple[float, float], normalize: bool
) -> list[np.ndarray]:
    """Importance weights of each token."""
    weights = []
    for row in x:
        if level == "token":
            logs = [clamp(value) for value in row]
        else:
            total = math.fsum(row)
            logs = [clamp(total if level == "sequence" else total / max(len(row), 1))] * len(row)
        ratio = [math.exp(value) for value in logs]
        if isinstance(threshold, tuple):
            low, high = threshold
            weights.append(np.array([r if low <= r <= high else 0.0 for r in ratio]))
        else:
            weights.append(np.array([min(r, threshold) for r in ratio]))
    if normalize:
        single = [w for row in weights for w in row]
        if level != "token":
            single = [row[0] for row in weights if len(row)]
        mean = math.fsum(single) / len(single)
        weights = [row / mean if mean > 1e-8 else row for row in weights]
    return weights


def keep(x: list[np.ndarray], rejections: dict[str, Any], veto: float | None) -> list[np.ndarray]:
    """Which tokens pass."""
    estimators: dict[str, Callable[[float], float]] = {
        "k1": lambda v: -v,
        "k2": lambda v: v * v / 2,
        "k3": k3,
    }
    kept = []
    for row in x:
        passes = np.ones(len(row), bool)
        for option, threshold in rejections.items():
            reach, k = option.rsplit("_", 1)
            values = [estimators[k](clamp(value)) for value in row]
            if not values:
                continue
            if k == "k1":
                pair = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
                low, high = math.log(pair[0]), math.log(pair[1])
            else:
                low, high = -math.inf, threshold
            if reach == "token":
                passes &= [low <= value <= high for value in values]
            else:
                total = math.fsum(values)
                means = {"seq_sum": total, "seq_mean": total / len(values), "seq_max": max(values)}
                passes &= low <= means[reach] <= high
        if veto is not None and any(value < math.log(veto) for value in row):
            passes[:] = False
        kept.append(passes)
    return kept


def pad(rows: Any, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[B, T], T of the longest row."""
    width = max((len(row) for row in rows), default=0)
    padded = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=dtype).reshape(len(padded), width)


def rollout_of(logprobs: Rows, versions: list[list[int]] | None = None) -> Rollout:
    return Rollout(
        prompt_tokens=[[1]] * len(logprobs),
        tokens=[[7] * len(row) for row in logprobs],
        logprobs=logprobs,
        versions=versions or [[0] * len(row) for row in logprobs],
        finish_reasons=["stop"] * len(logprobs),
        temperature=1.0,
    )


def mask_of(rows: Rows) -> torch.Tensor:
    return pad([[True] * len(row) for row in rows], False, torch.bool)


logprob = st.floats(-60.0, 0.0, width=32)
near = st.floats(-0.5, 0.5, width=32)
far = st.floats(-1000.0, 1000.0, width=32)


@st.composite
def batches(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[Rows, Rows]:
    """Trainer and rollout rows, some empty, at least one token; mismatches small or huge."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any))
    rollout = [draw(st.lists(logprob, min_size=k, max_size=k)) for k in lengths]
    noise = draw(st.sampled_from([near, far]))
    trainer = [[value + draw(noise) for value in row] for row in rollout]
    above = [[max(value, 0.0) for value in row] for row in trainer]  # no logprob is positive
    return less(trainer, above), less(rollout, above)


def less(rows: Rows, others: Rows) -> Rows:
    return [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(rows, others, strict=True)]
