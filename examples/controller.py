"""Hold a run within a budget of mismatch: correct more strictly, then ask for more precision.

Each mitigation is used for what it can do.

- No correction lowers the mismatch KL, which is a property of the two policies. Truncation at C
  bounds the second moment of the weights, E[w^2] <= C E[r] = C, and with it the gradient's
  variance; the price is a bias, the truncated mass E[r] - E[w]. The gain shows in the effective
  sample size of the weights, E[w]^2 / E[w^2]. So C is tightened while that is too small and little
  mass is truncated. If much is, the tail is disagreement and not noise: masking (MIS) keeps it out
  of the gradient.
- Higher precision, of the KV cache and then of the worst layers, lowers the KL. It takes a restart
  of the engine, so the controller only requests it.

Both share one budget: log ratios near a normal distribution have ESS = exp(-2 KL). So a budget of B
nats per token implies an ESS of exp(-2 B); a lower ESS with the KL within budget is a heavy tail.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sgl_fp8rl.protocol.values import real, whole
from trainer_bridge.correction.config import PRESETS, CorrectionConfig, Threshold
from trainer_bridge.metrics.alarms import check_alarms

TIGHTEN = 0.85  # C of one step of tightening to the next
TIGHTEST = 1.5  # published runs use C from 1.5 to 5
MOST_CUT = 0.05  # of the ratios' mass, which is 1
HYSTERESIS = 0.5  # share of the budget below which a correction is loosened again
_READ = ("mismatch_kl_k3", "ess", "weight_ess", "ratio_mean", "weight_mean", "ratio_max")


@dataclass(frozen=True)
class Request:
    """An option that the engine must be restarted with."""

    kind: Literal["kv_cache_dtype", "ignored_layers"]
    """The option."""
    value: str
    """The whole value: "bf16", or the names of all layers so far, separated by spaces."""
    reason: str
    """One sentence with the figures that led to it."""

    @property
    def flag(self) -> str:
        """The engine's command line flag, quoted for a shell."""
        if self.kind == "kv_cache_dtype":
            return f"--kv-cache-dtype {self.value}"
        return f"--fp8rl-ignored-layers {shlex.quote(self.value)}"


@dataclass(frozen=True)
class Decision:
    """What to use from the next step on."""

    config: CorrectionConfig
    """The config for ``correct``."""
    requests: tuple[Request, ...]
    """All requests, open or fulfilled: what the engine needs in addition to its own options."""
    reasons: tuple[str, ...]
    """One sentence on what changed in this step, or why nothing may change; else empty."""


class Controller:
    """Keeps a run within a budget of mismatch, with one change per ``patience`` steps.

    Decisions depend on the metrics alone. ``Correction.metrics`` are global, so all ranks that pass
    them decide the same.

    Requests are never withdrawn: the mismatch is low because of them.
    """

    def __init__(
        self,
        budget_kl: float,
        config: CorrectionConfig = PRESETS["decoupled_token_is"],
        *,
        fp8_kv: bool = False,
        layers: Sequence[str] = (),
        layers_at_once: int = 4,
        patience: int = 5,
    ) -> None:
        """Make a controller that starts with ``config`` and no requests.

        Args:
            budget_kl: upper bound of mismatch_kl_k3, in nats per token; two or three times that of
                a healthy run of this model, or of the prediction of ``sgl-fp8rl precision``.
            config: the loosest correction; its weights must be per token.
            fp8_kv: whether the engine's KV cache is FP8, so that BF16 can be requested.
            layers: layers to request in BF16, worst first: the names under "layers" in the JSON of
                ``sgl-fp8rl precision``.
            layers_at_once: layers per request.
            patience: steps to average over before each change.

        Raises:
            ValueError: a number is not positive, or the loss gets no weights by token.
        """
        budget_kl = real("Controller: budget_kl", budget_kl, above=True)
        patience = whole("Controller: patience", patience, least=1)
        layers_at_once = whole("Controller: layers_at_once", layers_at_once, least=1)
        if config.rollout_is != "token":
            raise ValueError(
                f"Controller: rollout_is is {config.rollout_is!r}; only token weights have a "
                f"second moment that follows from a KL, so pass a config with 'token'"
            )
        if not config.applies_weights:
            raise ValueError(
                "Controller: in bypass mode PPO's loss gets no weights, so tightening them would "
                "change nothing; pass loss_type='reinforce', or a decoupled config"
            )
        self.budget_kl, self.patience = budget_kl, patience
        self._config, self._thresholds = config, _ladder(config.rollout_is_threshold)
        self._fp8_kv, self._layers, self._at_once = fp8_kv, list(layers), layers_at_once
        self._rung = 0
        self._requests: list[Request] = []
        self._waiting = False
        self._window: list[list[float]] = []

    def observe(self, metrics: Mapping[str, float]) -> Decision:
        """Process the metrics of one step and decide on the next one.

        Args:
            metrics: ``Correction.metrics``, computed with the last decision's config.

        Returns:
            The config from now on, all requests, and the reason if something changed.

        Raises:
            ValueError: a metric is missing.
        """
        if missing := [name for name in _READ if name not in metrics]:
            raise ValueError(
                f"Controller: the metrics lack {', '.join(missing)}; pass the Correction.metrics "
                f"that the last decision's config produced"
            )
        reasons = [alarm.message for alarm in check_alarms(metrics) if alarm.name == "ratio_mean"]
        if reasons:  # no mitigation helps against wrong logprobs
            self._window.clear()
            return self._decision(f"nothing changes: {reasons[0]}")
        row = [metrics[name] for name in _READ]
        self._window = [*self._window, row][-self.patience :]  # loaded with another patience
        if len(self._window) < self.patience:
            return self._decision()
        columns = [*zip(*self._window, strict=True)]
        kl, ess, weight_ess, mass, kept, _ = (sum(column) / self.patience for column in columns)
        reason = self._decide(kl, ess, weight_ess, mass - kept, max(columns[-1]))
        self._window = [] if reason else self._window[1:]
        return self._decision(reason)

    def restarted(self) -> None:
        """Report that the engine was restarted with all requests; more may follow."""
        self._waiting = False
        self._window.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain types, for a checkpoint.

        Returns:
            What ``load_state_dict`` takes.
        """
        return {
            "rung": self._rung,
            "requests": [[r.kind, r.value, r.reason] for r in self._requests],
            "waiting": self._waiting,
            "window": [list(row) for row in self._window],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a controller that was made with the same config; its budget and
        patience may be others.

        Args:
            state: a return value of ``state_dict``.

        Raises:
            ValueError: it is of a config with more thresholds.
        """
        if state["rung"] not in range(len(self._thresholds)):
            raise ValueError(
                f"Controller: the state is at threshold {state['rung'] + 1}, of which this config "
                f"has {len(self._thresholds)}; make the controller with the config of that run"
            )
        self._rung, self._waiting = state["rung"], state["waiting"]
        self._requests = [Request(*request) for request in state["requests"]]
        self._window = [list(row) for row in state["window"]]

    def _decide(
        self, kl: float, ess: float, weight_ess: float, cut: float, ratio_max: float
    ) -> str | None:
        """Change at most one thing, and return the reason."""
        rungs, least = self._thresholds, math.exp(-2 * self.budget_kl)
        too_few = (
            f"weight_ess is {weight_ess:.4f}, below exp(-2 x {self.budget_kl:g}) = {least:.4f}, "
            f"with {cut:.2%} of the ratios' mass truncated"
        )
        if weight_ess < least and self._rung + 1 < len(rungs):
            rung = len(rungs) - 1 if cut > MOST_CUT else self._rung + 1
            if ratio_max > _upper(rungs[rung]):  # else it would truncate nothing more
                self._rung, before = rung, self._rung
                return f"{too_few}: {_describe(rungs[before])} becomes {_describe(rungs[rung])}"
        if kl > self.budget_kl:
            return self._ask(
                f"mismatch_kl_k3 is {kl:.2g} nats per token, above the budget of "
                f"{self.budget_kl:g}, and no correction lowers it"
            )
        if weight_ess < least:
            return self._ask(f"{too_few}, and correction cannot do more")
        enough = math.exp(-2 * HYSTERESIS * self.budget_kl)
        if self._rung and kl <= HYSTERESIS * self.budget_kl and ess >= enough:
            self._rung -= 1
            return (
                f"ess, of the ratios themselves, is {ess:.4f}, above {enough:.4f}, and "
                f"mismatch_kl_k3 {kl:.2g}: {_describe(rungs[self._rung + 1])} becomes "
                f"{_describe(rungs[self._rung])} again"
            )
        return None

    def _ask(self, why: str) -> str | None:
        """Add the next request, unless one awaits a restart or none is left."""
        if self._waiting:
            return None
        named = sum(len(r.value.split()) for r in self._requests if r.kind == "ignored_layers")
        if self._fp8_kv and not any(r.kind == "kv_cache_dtype" for r in self._requests):
            request = Request("kv_cache_dtype", "bf16", why)
        elif named < len(self._layers):
            names = " ".join(self._layers[: named + self._at_once])
            request = Request("ignored_layers", names, why)
        else:
            return f"{why}; no request is left, so raise the budget or find the fault"
        self._requests = [r for r in self._requests if r.kind != request.kind] + [request]
        self._waiting = True
        return f"{why}: start the engine with {request.flag}"

    def _decision(self, reason: str | None = None) -> Decision:
        config = replace(self._config, rollout_is_threshold=self._thresholds[self._rung])
        return Decision(config, tuple(self._requests), (reason,) if reason else ())


def _ladder(threshold: Threshold) -> list[Threshold]:
    """From loose to strict: C, smaller values of C, then a band up to the first C."""
    if isinstance(threshold, tuple) or threshold <= 1:
        return [threshold]
    ladder = [threshold]
    while ladder[-1] > TIGHTEST:
        ladder.append(max(TIGHTEST, TIGHTEN * ladder[-1]))
    return [*ladder, (1 / threshold, threshold)]


def _upper(threshold: Threshold) -> float:
    return threshold[1] if isinstance(threshold, tuple) else threshold


def _describe(threshold: Threshold) -> str:
    if isinstance(threshold, tuple):
        return f"MIS within {threshold[0]:g} to {threshold[1]:g}"
    return f"TIS at C = {threshold:.3g}"
