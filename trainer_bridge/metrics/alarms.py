"""Alarms: a few metrics with thresholds that FP8's noise does not reach.

Each alarm answers a question that the others do not:

    mismatch_kl_k3         Are the policies far apart, relative to the policy's entropy?
    token_mult_prob_error  Does the rollout sample tokens that the trainer considers impossible?
    ess                    Do a few tokens, far likelier in the trainer, outweigh the batch?
    ratio_mean             Does a token's logprob belong to the distribution it was sampled from?
    weight_ess             Do the importance weights leave enough of the batch to learn from?
    masked_fraction        Do the rejections?
    kv_clipped             Does an FP8 KV cache hold what the model computed?

A mean ratio below 1 is reported only if the KL has no alarm. If the policies are far apart, the
ratios have a tail that the batch may not have sampled; then both the mean and its estimated error
are too small. An unsampled tail without any other symptom still looks like top-p. Greedy tokens are
not sampled, so the ratio_mean alarm does not apply to them.

NaN and infinity raise no alarm: ``correct`` refuses them. docs/correction.md has the published and
the measured values of each fault.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer_bridge.rollouts.serving_engines import KV_CLIPPED

logger = logging.getLogger(__name__)

# Beside each threshold: the worst healthy batch of 5000 tokens, then medians of faults that fire
# it, from docs/correction.md: policies of 2 and 4 layers, entropy 0.1 and 1.3 nats.
KL_OF_ENTROPY = 0.05  # FP8 0.0014, FP8 KV 0.018; scales doubled 0.06, lost 0.8, an old policy 0.29
KL_MOST = 0.1  # nats, verl's guideline, for policies of high entropy: FP8 0.0006, lost 2.2
ENTROPY_FLOOR = 0.02  # nats: a policy of zero entropy may differ by 0.001
PROB_ERROR = 1.5  # FP8 KV 1.053; scales doubled 1.9, a broken block 34, scales lost 592
ESS = 0.8  # FP8 KV 0.996; a tensor never loaded 0.25 and 0.74, a broken block 0.27
RATIO_BIAS = 0.003  # FP8 KV 0.0018; top-p 0.0036 and 0.037, raw 0.009 and 0.10
RATIO_SIGMAS = 6.0  # FP8 2.6, a demo's 240 steps 3.5; top-p 19 and 95, raw logprobs 9.5 to 35
WEIGHT_ESS = 0.3  # token TIS 0.997; verl's guideline
MASKED_FRACTION = 0.5  # above it, more tokens are rejected than kept
MIN_TOKENS = 512
"""A batch, or a policy version in it, with fewer tokens is not checked: one token would decide."""

ADVICE = {
    "mismatch_kl_k3": "rollout and trainer are not the same policy; compare their policy versions, "
    "then the engine's weights and KV scales with the trainer's",
    "token_mult_prob_error": "the rollout samples tokens that the trainer almost never would; look "
    "for a broken layer in the engine, and for misaligned logprobs",
    "ess": "a few tokens outweigh the others; mask tokens with a ratio outside of 0.5 to 2 until "
    "you know why the rollout considers them so improbable",
    "ratio_mean": "logprobs are not those of the distribution that was sampled from; check "
    "temperature, top-p, raw or processed logprobs, and their alignment with tokens",
    "weight_ess": "the importance weights leave only this share of the batch to learn from; use "
    "token weights, or lower rollout_is_threshold",
    "masked_fraction": "most tokens are rejected; widen the bounds of rollout_rs, or lower the "
    "mismatch itself",
    "kv_clipped": "the FP8 KV cache clips this share of a layer's K or V; have the scales measured "
    "again, or send larger ones",
}
"""The metrics that have an alarm, and the remedies."""

_VERSION = re.compile(r"version_(-?\d+)/")
_announced: set[str] = set()


@dataclass(frozen=True)
class Alarm:
    """A metric on the wrong side of its threshold."""

    metric: str
    """Its name among the metrics: of all tokens, or of one policy version."""
    value: float
    """The metric's value."""
    threshold: float
    """The bound that it violates."""
    message: str
    """One sentence: metric, value, bound, remedy."""

    @property
    def name(self) -> str:
        """The metric without the policy version, one of ADVICE."""
        return _VERSION.sub("", self.metric)


def check_alarms(metrics: Mapping[str, float]) -> tuple[Alarm, ...]:
    """Check the metrics of one step.

    Policy versions are also checked separately, so that one engine of many that missed an update
    shows up under the version of its tokens.

    Args:
        metrics: ``Correction.metrics``, or those of ``mismatch_metrics``; missing ones are skipped.

    Returns:
        The alarms, those of all tokens first.
    """
    named = (name for name in metrics if name.startswith("version_"))
    prefixes = [found[0] for name in named if (found := _VERSION.match(name))]
    alarms = []
    for prefix in ["", *dict.fromkeys(prefixes)]:
        if metrics.get(f"{prefix}tokens", math.inf) < MIN_TOKENS:
            continue
        mine = [
            _alarm(prefix, name, value, low if value < low else high)
            for name, (low, high) in _limits(metrics, prefix).items()
            if not low <= (value := metrics.get(f"{prefix}{name}", low)) <= high
        ]
        is_far = any(alarm.name == "mismatch_kl_k3" for alarm in mine)
        alarms += [a for a in mine if not (is_far and a.name == "ratio_mean" and a.value < 1)]
    return tuple(alarms)


def announce(alarms: Sequence[Alarm]) -> None:
    """Log the first alarm of each metric in this process."""
    for alarm in alarms:
        if alarm.name not in _announced:
            _announced.add(alarm.name)
            logger.warning("%s (logged once; see `alarms` of each step)", alarm.message)


def _limits(metrics: Mapping[str, float], prefix: str) -> dict[str, tuple[float, float]]:
    """The bounds of each metric; the correction's own metrics exist for the whole batch only."""
    entropy = max(metrics.get(f"{prefix}rollout_nll", math.inf), ENTROPY_FLOOR)
    bias = max(RATIO_BIAS, RATIO_SIGMAS * _ratio_error(metrics, prefix))
    limits = {
        "mismatch_kl_k3": (-math.inf, min(KL_MOST, KL_OF_ENTROPY * entropy)),
        "token_mult_prob_error": (1.0, PROB_ERROR),
        "ess": (ESS, math.inf),
        "ratio_mean": (1 - bias, 1 + bias),
    }
    if not prefix:
        limits |= {
            "weight_ess": (WEIGHT_ESS, math.inf),
            "masked_fraction": (0.0, MASKED_FRACTION),
            "kv_clipped": (0.0, KV_CLIPPED),
        }
    return limits


def _ratio_error(metrics: Mapping[str, float], prefix: str) -> float:
    """Standard error of the mean ratio, estimated from the batch.

    Given the tokens before it, a sampled token's ratio has expectation 1 if its logprob belongs to
    the distribution it was drawn from, however far apart the policies are. So ratios minus 1 are
    martingale differences, whose variances add up at any sequence length. The estimate is too small
    if the batch did not sample the tail.
    """
    names = (f"{prefix}{name}" for name in ("chi2_token", "ratio_mean", "tokens"))
    chi2, mean, tokens = (metrics.get(name, math.inf) for name in names)
    return math.sqrt(max(chi2 + 1 - mean**2, 0.0) / tokens) if chi2 < math.inf else 0.0


def _alarm(prefix: str, name: str, value: float, threshold: float) -> Alarm:
    version = _VERSION.match(prefix)
    of = f" of policy version {version[1]}" if version else ""
    side = "above" if value > threshold else "below"
    finding = f"{name}{of} is {value:.4g}, {side} {threshold:.4g}"
    return Alarm(f"{prefix}{name}", value, threshold, f"{finding}: {ADVICE[name]}")
