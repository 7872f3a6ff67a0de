"""What verl's rollout configuration says to an fp8rl server, and what it must not say."""

from collections.abc import Sequence
from typing import Any

from sgl_fp8rl.constants import NAME

SAMPLING_OFF = {"top_p": (1.0,), "top_k": (-1, 0), "repetition_penalty": (1.0,)}
"""verl's options of training rollouts that change logprobs, and the values that turn them off."""
DELTA = "delta_sharded"
"""The checkpoint engine that sends differences of weights."""


def is_ours(config: Any) -> bool:
    """Whether a rollout asks for this quantization."""
    return bool(config.get("quantization") == NAME)


def check(config: Any) -> None:
    """Refuse what an fp8rl server cannot do, before it starts.

    Raises:
        ValueError: an option makes rollout logprobs differ from what the trainer computes, or
            weights come as differences.
    """
    for name, off in SAMPLING_OFF.items():
        value = config.get(name)
        if value is not None and value not in off:
            raise ValueError(
                f"actor_rollout_ref.rollout.{name}={value} makes the engine's logprobs differ from "
                f"what the trainer computes; set it to {off[0]} (val_kwargs may keep it)"
            )
    if config.checkpoint_engine.backend == DELTA:
        raise ValueError(
            f"rollout.checkpoint_engine.backend={DELTA} sends differences of weights, and an fp8rl "
            f"engine needs whole tensors; use naive, nccl, nixl or mooncake"
        )


def hand_over(config: Any) -> None:
    """Make the key an argument of SGLang, since verl's server knows only ``fp8``."""
    given = dict(config.engine_kwargs or {})
    sglang = {name: _tuple_of(name, value) for name, value in (given.get("sglang") or {}).items()}
    given["sglang"] = {**sglang, "quantization": NAME}
    object.__setattr__(config, "engine_kwargs", given)  # verl's configurations are frozen
    object.__setattr__(config, "quantization", None)


def _tuple_of(name: str, value: Any) -> Any:
    """One of our options as its class has it: YAML knows lists only."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(value) if is_list and name.startswith(f"{NAME}_") else value
