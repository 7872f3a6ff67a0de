"""The arms: they differ in the engine's precision, its KV scales, and the correction."""

from dataclasses import dataclass, field
from typing import Any

CORRECTED = "decoupled_token_is"
"""Token TIS, C = 2, as the published FP8 runs have it."""
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
    planted: bool = False
    """Whether K has outlier channels (``models.plant``); such an arm runs with one seed."""
    must_alarm: bool = False
    """Whether it is broken on purpose, so that alarms are to be seen."""

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
        Arm("fp8-uncorrected", "bf16", correction="disabled"),
        Arm("fp8-kv8", "bf16", engine=KV8),
        Arm("fp8-kv8-uncorrected", "bf16", correction="disabled", engine=KV8),
        Arm("moe-bf16", None, "moe", ALL_BF16),
        Arm("moe-fp8", "moe-bf16", "moe"),
        Arm("smollm2-bf16", None, "smollm2", ALL_BF16),
        Arm("smollm2-fp8-kv8", "smollm2-bf16", "smollm2", engine=KV8),
        Arm(
            "smollm2-fp8-kv8-uncorrected",
            "smollm2-bf16",
            "smollm2",
            correction="disabled",
            engine=KV8,
        ),
        Arm("outliers-kv8", "bf16", engine=KV8, planted=True),
        Arm("outliers-kv8-unit", "bf16", engine=_UNIT, planted=True, must_alarm=True),
    )
}
