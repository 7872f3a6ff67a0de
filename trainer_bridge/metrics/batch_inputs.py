"""Whether tensors are logprobs of the same tokens: torch broadcasts other shapes in silence.

Shapes: B sequences, T tokens of the longest response.
"""

from typing import Any

import torch
import torch.distributed as dist

from sgl_fp8rl.protocol.values import excerpt
from trainer_bridge.metrics.groups import Groups, agree_on_versions
from trainer_bridge.metrics.mismatch import Values
from trainer_bridge.ranks.group import device_of

MOST_LOGPROB = 0.01
"""In nats: beyond rounding, which is 1e-4 in FP32 for logits of 1000; nearly all probabilities of
sampled tokens are larger."""
NOT_LOGPROBS = f"above {MOST_LOGPROB}; pass those of log_softmax, not probabilities or losses"


def check_tensors(caller: str, **given: Any) -> None:
    """Raise ValueError if an argument is no tensor, on this rank alone: without a tensor no device
    is known to tell other ranks on, and they run the same code."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{caller}: {name} is a {type(value).__name__}; pass a torch.Tensor")


def fault_of(
    remedy: str,
    *,
    mask_BT: torch.Tensor,
    versions_BT: torch.Tensor | None = None,
    **floats_BT: torch.Tensor,
) -> str | None:
    """What is wrong with shapes, dtypes and devices of [B, T] tensors, if anything.

    Args:
        remedy: what to do about shapes that differ.
        versions_BT: on any device.
        floats_BT: all others by name, the one that gives the shape first.
    """
    given = floats_BT | {"mask_BT": mask_BT}
    devices = {name: str(tensor.device) for name, tensor in given.items()}
    if versions_BT is not None:
        given |= {"versions_BT": versions_BT}
    (first, shape), *others = [(name, tuple(tensor.shape)) for name, tensor in given.items()]
    if len(shape) != 2 or any(other != shape for _, other in others):
        return f"{first} has shape {shape}, but {dict(others)}; {remedy}"
    for name, tensor in given.items():
        kind = {"mask_BT": "bool", "versions_BT": "int64"}.get(name, "float")
        is_sound = {
            "bool": tensor.dtype == torch.bool,
            "int64": not (tensor.is_floating_point() or tensor.is_complex()),
            "float": tensor.is_floating_point(),
        }
        if not is_sound[kind]:
            return f"{name} has dtype {tensor.dtype}; pass it as {kind}"
    if len(set(devices.values())) > 1:
        return f"tensors are on several devices, {devices}; pass them on that of {first}"
    return None


def each_row(
    name: str, values: Any, dtype: torch.dtype, count: int
) -> tuple[torch.Tensor, str | None]:
    """``values`` as a tensor [B] on the host, and what is wrong with them."""
    try:
        found_B = torch.as_tensor(values, dtype=dtype).cpu()
    except (TypeError, ValueError, RuntimeError):
        found_B = torch.empty(0, 0, dtype=dtype)
    if found_B.shape == (count,):
        return found_B, None
    kind = str(dtype).removeprefix("torch.")
    return found_B, f"{name} is {excerpt(values)}; pass a {kind} for each of {count} sequences"


def checked_groups(
    caller: str,
    trainer_BT: torch.Tensor,
    rollout_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    versions_BT: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    fault: str | None = None,
) -> Groups:
    """The groups that all ranks agree on, or a ValueError on each if one rank has a fault.

    Args:
        fault: one that is known of this rank.
    """
    named = {"trainer_logprobs_BT": trainer_BT, "rollout_logprobs_BT": rollout_BT}
    known = {} if versions_BT is None else {"versions_BT": versions_BT}
    check_tensors(caller, **named, mask_BT=mask_BT, **known)
    fault = fault or fault_of(
        "pass one [B, T] logprob for each response token, without the prompt",
        mask_BT=mask_BT,
        versions_BT=versions_BT,
        **named,
    )
    sent_mask_BT = None if fault else mask_BT
    device = trainer_BT.device if group is None else device_of(group, trainer_BT.device)
    versions, refused = agree_on_versions(versions_BT, sent_mask_BT, device, group)
    if refused and not fault:
        fault = f"{refused} other ranks refused their inputs; see their errors"
    if fault:
        raise ValueError(f"{caller}: {fault}")
    return Groups.of(versions, versions_BT, mask_BT)


def check_values(caller: str, values: Values) -> None:
    """Raise ValueError on all ranks if a logprob is NaN, infinite or positive, or if there are no
    tokens."""
    if broken := int(values["broken"]):
        raise ValueError(
            f"{caller}: {broken} sequences have a NaN or infinite trainer or rollout logprob; "
            f"look for NaN or Inf in the logits, and for a mask that covers padding"
        )
    if not values["tokens"][0, 0]:
        raise ValueError(f"{caller}: mask_BT selects no tokens; pass at least one response")
    for whose, most in zip(("trainer", "rollout"), values["most"].tolist(), strict=True):
        if most > MOST_LOGPROB:
            raise ValueError(f"{caller}: a {whose} logprob is {most:.4g}, {NOT_LOGPROBS}")
