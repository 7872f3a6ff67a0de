"""The arms: they differ in the engine's precision, its KV scales, and the correction."""

from dataclasses import dataclass
from typing import Any

CORRECTED = "decoupled_token_is"
"""Token TIS, C = 2, as the published FP8 runs have it."""
UNCORRECTED = "disabled"

ALL_BF16 = "re:.*"
"""Pattern of layers that stay BF16: every one."""
# No backend is named: the plugin chooses what serves an FP8 KV cache.
KV8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": None}
UNIT = {"fp8rl_kv_scheme": "unit"}


@dataclass(frozen=True)
class Arm:
    """One kind of run."""

    name: str
    model: str
    """A key of ``policies.MODELS``."""
    ignored_layers: str
    """Which layers the engine keeps in BF16."""
    correction: str
    """Preset of ``trainer_bridge.correct``."""
    engine: dict[str, Any]
    """More keywords of ``sglang.Engine``."""
    reference: str | None
    """The arm that it is compared with; None for a reference itself."""
    planted: bool = False
    """Whether K has outlier channels (``policies.plant``)."""
    must_alarm: bool = False
    """Whether it is broken on purpose, so that alarms are to be seen."""
    is_timed: bool = False
    """Whether its steps are timed alone on a GPU; a correction that only changes numbers is not."""


ARMS = {
    arm.name: arm
    for arm in (
        Arm("bf16", "dense", ALL_BF16, CORRECTED, {}, None, is_timed=True),
        Arm("fp8", "dense", "", CORRECTED, {}, "bf16", is_timed=True),
        Arm("fp8-uncorrected", "dense", "", UNCORRECTED, {}, "bf16"),
        Arm("fp8-kv8", "dense", "", CORRECTED, KV8, "bf16", is_timed=True),
        Arm("fp8-kv8-uncorrected", "dense", "", UNCORRECTED, KV8, "bf16"),
        Arm("moe-bf16", "moe", ALL_BF16, CORRECTED, {}, None, is_timed=True),
        Arm("moe-fp8", "moe", "", CORRECTED, {}, "moe-bf16", is_timed=True),
        Arm("outliers-kv8", "dense", "", CORRECTED, KV8, "bf16", planted=True),
        Arm(
            "outliers-kv8-unit",
            "dense",
            "",
            CORRECTED,
            KV8 | UNIT,
            "bf16",
            planted=True,
            must_alarm=True,
        ),
    )
}

SEEDS = {"outliers-kv8": 1, "outliers-kv8-unit": 1}
"""Seeds of arms that show something else than a mean; all others have as many as are asked for."""


def seeds_of(arm: str, seeds: int) -> range:
    """Seeds that an arm runs with."""
    return range(min(seeds, SEEDS.get(arm, seeds)))
