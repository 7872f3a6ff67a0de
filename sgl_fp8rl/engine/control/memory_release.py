"""Release and resume of GPU memory by SGLang's memory saver: nothing runs while memory is released.

SGLang ends itself where a release finds anything running, be it the step that the overlapped
scheduler began before it saw the last token, and where a resume names what was not released.
"""

import asyncio
import inspect
from http import HTTPStatus
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import scheduler_weights, weights_of
from sgl_fp8rl.engine.control.retraction import refuse_waiting


async def release_when_idle(original: Any, manager: Any, *args: Any, **kw: Any) -> Any:
    """AROUND the main process's ``release_memory_occupation``: requests end first, and new ones
    wait for its end. What a caller gave up is not released.

    Raises:
        ControlError: requests do not end; nothing was released.
    """
    control = getattr(manager, "fp8rl_control", None)
    if control is None:  # of another engine, or of one that this process never updated
        return await original(manager, *args, **kw)
    is_wanted = True

    async def release() -> Any:
        async with control.idle():
            return await original(manager, *args, **kw) if is_wanted else None

    try:
        # a caller that goes away must not leave a reply of the schedulers unread
        return await asyncio.shield(release())
    except asyncio.CancelledError:
        is_wanted = False
        raise


async def resume_in_turn(original: Any, manager: Any, *args: Any, **kw: Any) -> Any:
    """AROUND the main process's ``resume_memory_occupation``: after a release that waits."""
    control = getattr(manager, "fp8rl_control", None)
    if control is None:
        return await original(manager, *args, **kw)
    async with control.lock:
        return await original(manager, *args, **kw)


def is_idle(scheduler: Any) -> bool:
    """Whether SGLang would release now: newer versions do while a pause keeps requests waiting."""
    takes = inspect.signature(scheduler.is_fully_idle).parameters
    kept = {"ignore_waiting": scheduler._engine_paused} if "ignore_waiting" in takes else {}
    return bool(scheduler.is_fully_idle(**kept))


def release(original: Any, updater: Any, request: Any) -> Any:
    """AROUND the scheduler's ``release_memory_occupation``: released weights are lost, so none may
    be sampled. It is put off, step by step, while anything runs."""
    weights = weights_of(updater.tp_worker.model_runner.model)
    if weights is None:
        return original(updater, request)
    tags = [tag for tag in _tags(request) if tag not in updater.offload_tags]
    if not tags:
        return compat.ReleaseMemoryOccupationReqOutput()
    request.tags = tags
    if not is_idle(updater.scheduler):
        weights.waiting.append(request)
        return None
    output = original(updater, request)
    weights.released_tags = frozenset(updater.offload_tags)
    if weights.released:
        weights.quarantine("the weights' memory was released; resume it and send a complete update")
    return output


def unmap_unused(original: Any, adapter: Any, tag: str) -> None:
    """AROUND the memory saver's ``pause``: SGLang unmaps the weights behind its copies of their
    buffers without waiting for them, which ended an engine on a busy GPU."""
    torch.get_device_module().synchronize()
    original(adapter, tag)


def resume(original: Any, updater: Any, request: Any) -> Any:
    """AROUND the scheduler's ``resume_memory_occupation``: there is memory to update again, still
    quarantined. It comes after a release that was put off."""
    weights = weights_of(updater.tp_worker.model_runner.model)
    if weights is None:
        return original(updater, request)
    if weights.waiting:
        weights.waiting.append(request)
        return None
    request.tags = [tag for tag in _tags(request) if tag in updater.offload_tags]
    if not request.tags:
        return compat.ResumeMemoryOccupationReqOutput()
    output = original(updater, request)
    weights.released_tags = frozenset(updater.offload_tags)
    return output


def continue_served(original: Any, scheduler: Any, request: Any) -> Any:
    """AROUND ``Scheduler.continue_generation``: what a pause kept does not go on in quarantine, nor
    on memory that is away: SGLang 0.5.23 releases while a pause keeps requests."""
    weights = scheduler_weights(scheduler)
    if weights is not None and not weights.may_generate:
        refuse_waiting(scheduler, weights.why_not_generate, HTTPStatus.SERVICE_UNAVAILABLE)
    return original(scheduler, request)


def _tags(request: Any) -> list[str]:
    return list(request.tags or compat.GPU_MEMORY_ALL_TYPES)
