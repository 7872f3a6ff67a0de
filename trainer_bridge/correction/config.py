"""Options and presets of a correction, with verl's names.

verl: algorithm.rollout_correction, trainer/config/algorithm.py and trainer/ppo/
rollout_corr_helper.py of 0.9.1. The geometric level and the veto come from slime
(examples/train_infer_mismatch_helper/mis.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Literal, cast

LEVELS = ("token", "sequence", "geometric")
LOSS_TYPES = ("ppo_clip", "reinforce")
REJECTIONS = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)

Level = Literal["token", "sequence", "geometric"]
LossType = Literal["ppo_clip", "reinforce"]
Threshold = float | tuple[float, float]
"""An upper bound, or (lower, upper), inclusive."""


@dataclass(frozen=True)
class CorrectionConfig:
    """How to weigh tokens and which to reject. The default is verl's ``decoupled_token_is``.

    x = trainer - rollout logprob of a token, r = exp(x); exponents are clamped to +-20.

    Raises:
        ValueError: a value is unknown or out of range.
    """

    rollout_is: Level | None = "token"
    """Weight of a token: its own r, the product or the geometric mean of r over its sequence, or 1
    (None)."""
    rollout_is_threshold: Threshold = 2.0
    """C truncates weights to C (TIS); (low, high) sets those outside to 0 (MIS, IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over all tokens (at the other levels: over all sequences)."""
    rollout_rs: Mapping[str, Threshold] = field(default_factory=dict)
    """Names in REJECTIONS with their bounds; a token must pass all. The statistic is a token's own
    divergence, or its sum, mean or maximum over the sequence. k2 = x^2 / 2 and k3 = r - 1 - x take
    an upper bound. k1 = -x takes (low, high), bounds of exp(-x) = pi_rollout / pi_trainer; U stands
    for (1 / U, U)."""
    veto_threshold: float | None = None
    """Reject the whole sequence if the r of one token is below this."""
    bypass_mode: bool = False
    """True: pi_old is the rollout policy, and ``correct`` gets the current logprobs (two policies).
    False, decoupled: pi_old is the trainer's policy before the update (three policies)."""
    loss_type: LossType = "ppo_clip"
    """In bypass mode: PPO's ratio is itself a correction and gets no weights, REINFORCE gets
    them."""

    def __post_init__(self) -> None:
        # YAML and JSON have no tuples
        pairs = {name: _paired(threshold) for name, threshold in self.rollout_rs.items()}
        object.__setattr__(self, "rollout_rs", pairs)
        object.__setattr__(self, "rollout_is_threshold", _paired(self.rollout_is_threshold))
        for name, allowed in (("rollout_is", (*LEVELS, None)), ("loss_type", LOSS_TYPES)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"CorrectionConfig: {name} is {value!r}; use one of {allowed}")
        if unknown := sorted(set(self.rollout_rs) - set(REJECTIONS)):
            raise ValueError(
                f"CorrectionConfig: rollout_rs has {unknown}; known are {', '.join(REJECTIONS)}"
            )
        _check("rollout_is_threshold", self.rollout_is_threshold)
        for option, threshold in self.rollout_rs.items():
            _check(f"rollout_rs[{option!r}]", threshold)
            if isinstance(threshold, tuple) and not option.endswith("k1"):
                raise ValueError(
                    f"CorrectionConfig: rollout_rs[{option!r}] is {threshold}; "
                    f"pass one upper bound, only k1 has two"
                )
        if self.veto_threshold is not None and not 0 < self.veto_threshold <= 1:
            raise ValueError(
                f"CorrectionConfig: veto_threshold is {self.veto_threshold}; "
                f"pass a ratio above 0, at most 1"
            )

    @property
    def applies_weights(self) -> bool:
        """Whether the loss gets weights: in bypass mode PPO's ratio is itself a correction."""
        return self.rollout_is is not None and not (
            self.bypass_mode and self.loss_type == "ppo_clip"
        )

    @property
    def rejects(self) -> bool:
        """Whether a token may be rejected."""
        return bool(self.rollout_rs) or self.veto_threshold is not None

    @property
    def rejection_bounds(self) -> dict[str, tuple[float, float]]:
        """Inclusive bounds of the divergence of each option in ``rollout_rs``."""
        bounds = {}
        for option, threshold in self.rollout_rs.items():
            if not option.endswith("k1"):
                bounds[option] = -math.inf, cast(float, threshold)
                continue
            pair = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
            bounds[option] = math.log(pair[0]), math.log(pair[1])
        return bounds

    @property
    def means(self) -> tuple[str, ...]:
        """Names of the per-token means besides those of the mismatch."""
        weighs = ("weight_mean", "clipped_fraction") if self.rollout_is is not None else ()
        return (*weighs, *(("masked_fraction",) if self.rejects else ()))

    @classmethod
    def from_verl(cls, options: Mapping[str, Any]) -> "CorrectionConfig":
        """Read verl's algorithm.rollout_correction.

        Args:
            options: verl's names and values; thresholds are numbers or "low_high".

        Returns:
            The same correction.

        Raises:
            ValueError: an option is not verl's, or has a value that verl refuses too.
        """
        given = {"rollout_is": "sequence", **options}  # verl's default
        options_of_rs = [part.strip() for part in (given.pop("rollout_rs", None) or "").split(",")]
        thresholds = str(given.pop("rollout_rs_threshold", None) or "").split(",")
        names = list(dict.fromkeys(filter(None, options_of_rs)))
        if len(thresholds) not in (1, len(names)) or (names and not all(thresholds)):
            raise ValueError(
                f"CorrectionConfig: rollout_rs_threshold has {len(thresholds)} values for "
                f"{names}; pass one for all, or one for each"
            )
        if names:
            each = thresholds * len(names) if len(thresholds) == 1 else thresholds
            given["rollout_rs"] = dict(zip(names, map(_parse, each), strict=True))
        if "rollout_is_threshold" in given:
            given["rollout_is_threshold"] = _parse(given["rollout_is_threshold"])
        try:
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"CorrectionConfig: not an option of verl 0.9.1: {error}") from None


def _parse(threshold: Any) -> Threshold:
    """verl's notation of a threshold: a number, or "low_high"."""
    try:
        numbers = [float(part) for part in str(threshold).split("_", 1)]
    except ValueError:
        raise ValueError(
            f"CorrectionConfig: threshold {threshold!r} is neither a number nor 'low_high'"
        ) from None
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _paired(threshold: Any) -> Any:
    return tuple(threshold) if isinstance(threshold, list) else threshold


def _check(name: str, threshold: Threshold) -> None:
    bounds = threshold if isinstance(threshold, tuple) else (threshold,)
    is_sound = len(bounds) == (2 if isinstance(threshold, tuple) else 1) and all(
        isinstance(bound, Real) and type(bound) is not bool and 0 < bound < math.inf
        for bound in bounds
    )
    if not is_sound or list(bounds) != sorted(bounds):
        raise ValueError(
            f"CorrectionConfig: {name} is {threshold}; "
            f"pass a positive finite number, or two in ascending order"
        )


_GEO, _K3 = {"seq_mean_k1": (0.999, 1.001)}, {"seq_mean_k3": 0.01}
_ICEPOP = (0.5, 5.0)
_reinforce = partial(CorrectionConfig, bypass_mode=True, loss_type="reinforce")

PRESETS: dict[str, CorrectionConfig] = {
    "decoupled_token_is": CorrectionConfig("token"),
    "decoupled_seq_is": CorrectionConfig("sequence"),
    "decoupled_token_icepop": CorrectionConfig("token", _ICEPOP),
    "decoupled_seq_is_rs": CorrectionConfig("sequence", rollout_rs={"seq_sum_k1": (0.5, 2.0)}),
    "decoupled_geo_rs": CorrectionConfig(None, rollout_rs=_GEO),
    "decoupled_geo_rs_seq_tis": CorrectionConfig("sequence", rollout_rs=_GEO),
    "decoupled_geo_rs_token_tis": CorrectionConfig("token", rollout_rs=_GEO),
    "decoupled_k3_rs": CorrectionConfig(None, rollout_rs=_K3),
    "decoupled_k3_rs_seq_tis": CorrectionConfig("sequence", rollout_rs=_K3),
    "decoupled_k3_rs_token_tis": CorrectionConfig("token", rollout_rs=_K3),
    "bypass_ppo_clip": CorrectionConfig(None, bypass_mode=True),
    "bypass_ppo_clip_geo_rs": CorrectionConfig(None, rollout_rs=_GEO, bypass_mode=True),
    "bypass_ppo_clip_k3_rs": CorrectionConfig(None, rollout_rs=_K3, bypass_mode=True),
    "bypass_pg_is": _reinforce("sequence"),
    "bypass_pg_token_icepop": _reinforce("token", _ICEPOP),
    "bypass_pg_geo_rs": _reinforce(None, rollout_rs=_GEO),
    "bypass_pg_geo_rs_seq_tis": _reinforce("sequence", rollout_rs=_GEO),
    "bypass_pg_geo_rs_token_tis": _reinforce("token", rollout_rs=_GEO),
    "disabled": CorrectionConfig(None),
}
"""Presets by verl's names; change one with ``dataclasses.replace``."""
