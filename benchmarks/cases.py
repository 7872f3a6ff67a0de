"""The arms of the update benchmark: how each starts its engine and how weights get there."""

from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One way of an update, run in a process of its own."""

    arm: str
    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``sglang.Engine`` besides those that all arms share."""
    source: str = "bf16"
    """What the trainer holds: "bf16", or "fp8" for codes and scales."""
    target: str = "bf16"
    """What the engine holds its linears in."""
    bucket_bytes: int | None = None
    """Stock only: size of a flattened bucket."""
    mapped: bool | None = None
    """True: the engine must read the trainer's memory in place. False: it must not be able to, so
    the trainer uses expandable segments, which CUDA IPC cannot export. None: as it comes."""
    checkpoint_layers: int | None = None
    """For an engine that loads no dummy weights: layers of the random checkpoint it starts on."""

    @property
    def stock(self) -> bool:
        """Whether SGLang runs as it is, without plugins."""
        return self.bucket_bytes is not None


def _fp8rl(name: str, source: str, mapped: bool | None) -> Case:
    engine = {"quantization": "fp8rl", "load_format": "dummy"}
    return Case("fp8rl", name, engine, source, "fp8", mapped=mapped)


_DUMMY = {"load_format": "dummy"}
_FLASH_RL = {"quantization": "fp8", "load_format": "flash_rl"}

CASES = (
    Case("stock-bf16", "buckets of 2 GiB", _DUMMY, bucket_bytes=2048 * MIB),
    Case("stock-bf16", "buckets of 512 MiB", _DUMMY, bucket_bytes=512 * MIB),
    Case(
        "stock-flash-rl",
        "buckets of 2 GiB, 4 layers",
        _FLASH_RL,
        target="fp8",
        bucket_bytes=2048 * MIB,
        checkpoint_layers=4,
    ),
    _fp8rl("from BF16, mapped", "bf16", mapped=True),
    _fp8rl("from BF16, bucket", "bf16", mapped=False),
    _fp8rl("from FP8 + scales", "fp8", mapped=None),
)
ARMS = tuple(dict.fromkeys(case.arm for case in CASES))


def find(arm: str, name: str) -> Case:
    """The case of that arm and name."""
    return next(case for case in CASES if (case.arm, case.name) == (arm, name))
