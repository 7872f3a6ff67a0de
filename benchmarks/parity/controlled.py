"""A run's correction and its engine's precision: as the arm says, or as a controller decides."""

from dataclasses import replace

from benchmarks.parity.arms import Arm
from benchmarks.parity.run_log import Row
from examples.controller import Controller, Request
from trainer_bridge import PRESETS, CorrectionConfig

BUDGET_KL = 3e-3
"""Nats a token: three times the dose that a growing one begins with."""
PATIENCE, LAYERS_AT_ONCE = 2, 8
"""Less patient than by default: the dose grows within a run as elsewhere within many."""
PLANTED = (".qkv_proj", ".gate_up_proj")


class Fixed:
    """What the arm says."""

    def __init__(self, arm: Arm) -> None:
        self.config: CorrectionConfig = PRESETS[arm.correction]
        self.ignored_layers = arm.ignored_layers
        """Which layers the engine is to keep in BF16."""
        self.engine = arm.engine
        """The arm's keywords of the engine."""
        self.must_restart = False
        """Whether the engine that runs lacks what is asked for."""

    def started(self, formats: dict[str, str]) -> None:
        """Told of the layers of an engine that has started with what was asked for."""

    def observe(self, metrics: dict[str, float]) -> tuple[str, ...]:
        """Told of a step; returns why something changes from the next one on."""
        return ()

    def state(self) -> Row:
        """For a checkpoint."""
        return {}


class Controlled(Fixed):
    """What a controller decides.

    It is given the layers that read planted channels first. That stands for the list of
    ``sgl-fp8rl precision``, whose order depends on the policy.

    Args:
        state: of a run that goes on; empty for one that begins.
    """

    def __init__(self, arm: Arm, state: Row) -> None:
        super().__init__(arm)
        self._fp8_kv = "kv_cache_dtype" in arm.engine
        self._controller: Controller | None = None
        self._layers: list[str] = []
        if state:
            self._layers = state["layers"]
            self._controller = self._made()
            self._controller.load_state_dict(state["controller"])
            self._ask([Request(*each) for each in state["controller"]["requests"]])
            bound = state["threshold"]
            threshold = tuple(bound) if isinstance(bound, list) else bound
            self.config = replace(self.config, rollout_is_threshold=threshold)

    def started(self, formats: dict[str, str]) -> None:
        if self._controller is None:
            fp8 = [name for name, kept in formats.items() if kept != "bf16"]
            self._layers = sorted(fp8, key=lambda name: not name.endswith(PLANTED))
            self._controller = self._made()
        self._controller.restarted()
        self.must_restart = False

    def observe(self, metrics: dict[str, float]) -> tuple[str, ...]:
        assert self._controller is not None
        decision = self._controller.observe(metrics)
        self.config = decision.config
        self._ask(list(decision.requests))
        return decision.reasons

    def state(self) -> Row:
        assert self._controller is not None
        return {
            "layers": self._layers,
            "controller": self._controller.state_dict(),
            "threshold": self.config.rollout_is_threshold,
        }

    def _made(self) -> Controller:
        return Controller(
            BUDGET_KL,
            self.config,
            fp8_kv=self._fp8_kv,
            layers=self._layers,
            layers_at_once=LAYERS_AT_ONCE,
            patience=PATIENCE,
        )

    def _ask(self, requests: list[Request]) -> None:
        before = self.ignored_layers, self.engine
        for request in requests:
            if request.kind == "ignored_layers":
                self.ignored_layers = request.value
            else:
                self.engine = {}  # BF16 KV, and the attention that goes with it
        self.must_restart |= (self.ignored_layers, self.engine) != before
