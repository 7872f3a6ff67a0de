"""The arms: they differ in the engine, its precision and scales, in the correction, and in what is
planted; here those of the first study, in ``dose_arms`` those of the second."""

from dataclasses import dataclass, field
from typing import Any, Literal

CORRECTED = "decoupled_token_is"
"""Token TIS, C = 2, as the published FP8 runs have it."""
MASKED = "decoupled_token_icepop"
"""Token MIS: tokens whose ratio is outside of 0.5 to 5 weigh nothing."""
UNCORRECTED = "disabled"
ALL_BF16 = "re:.*"
"""Pattern of layers that stay BF16: every one."""
# No backend is named: the plugin chooses what serves an FP8 KV cache.
KV8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": None}


@dataclass(frozen=True)
class Arm:
    """One kind of run."""

    name: str
    reference: str | None
    """The arm that it is compared with; None for a reference itself."""
    model: str = "dense"
    """One of ``models.MODELS``, or ``models.PRETRAINED``."""
    ignored_layers: str = ""
    """Which layers the engine keeps in BF16."""
    correction: str = CORRECTED
    """Preset of ``trainer_bridge.correct``."""
    engine: dict[str, Any] = field(default_factory=dict)
    """More keywords of ``sglang.Engine``."""
    stock: bool = False
    """Whether SGLang runs as it is, without our plugin."""
    planted: bool = False
    """Whether K has outlier channels (``planting.kv_outliers``); it runs with one seed."""
    dose: float | None = None
    """Mismatch (k3, nats a token) of the first step, by outliers in the inputs of layers."""
    grows: bool = False
    """Whether the outliers double again and again (``Settings.grows_after``)."""
    controlled: bool = False
    """Whether a ``Controller`` decides on the correction and on the engine's precision."""
    fp8_forward: bool = False
    """Whether the trainer computes with the engine's codes; where the engine has none, with those
    that it would have."""
    mini_batches: int = 1
    """Optimizer steps on each rollout."""
    retract: bool = False
    """Whether the next rollout runs while an update comes, which retracts its requests."""
    must_alarm: bool | None = False
    """Whether alarms are to be seen; None where nothing was predicted."""
    predicted: Literal["same", "worse"] | None = None
    """Its final reward beside that of its reference, written down before the runs."""

    @property
    def has_bf16_engine(self) -> bool:
        """Whether its engine keeps no layer in FP8."""
        return self.ignored_layers == ALL_BF16

    @property
    def is_timed(self) -> bool:
        """Whether its steps are timed alone on a GPU; a correction that only changes numbers is
        not."""
        return self.correction == CORRECTED and not self.planted


_UNIT = KV8 | {"fp8rl_kv_scheme": "unit"}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("bf16", None, ignored_layers=ALL_BF16),
        Arm("fp8", "bf16"),
        Arm("fp8-uncorrected", "bf16", correction=UNCORRECTED),
        Arm("fp8-kv8", "bf16", engine=KV8),
        Arm("fp8-kv8-uncorrected", "bf16", correction=UNCORRECTED, engine=KV8),
        Arm("moe-bf16", None, "moe", ALL_BF16),
        Arm("moe-fp8", "moe-bf16", "moe"),
        Arm("smollm2-bf16", None, "smollm2", ALL_BF16),
        Arm("smollm2-fp8-kv8", "smollm2-bf16", "smollm2", engine=KV8),
        Arm(
            "smollm2-fp8-kv8-uncorrected",
            "smollm2-bf16",
            "smollm2",
            correction=UNCORRECTED,
            engine=KV8,
        ),
        Arm("outliers-kv8", "bf16", engine=KV8, planted=True),
        Arm("outliers-kv8-unit", "bf16", engine=_UNIT, planted=True, must_alarm=True),
    )
}
