"""Hooks that keep an engine's promises between updates: what is served, stamped, and refused."""

from http import HTTPStatus
from typing import Any

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.admission import why_not_in_vocabulary
from sgl_fp8rl.engine.control.attached import scheduler_weights, weights_of
from sgl_fp8rl.engine.control.internal_requests import isolate_prefix
from sgl_fp8rl.engine.control.retraction import refuse

VERSION_KEY, RUN_KEY = "policy_version", "policy_run"
"""Where ``meta_info`` of a response carries the policy version of each output token, and its run.

The run is empty where it is that of the token before."""
STOCK_UPDATE = (
    "this engine runs with --quantization fp8rl, whose weights change through "
    "trainer_bridge.update(model, engine, version=...)"
)
READING_CHECKS = ("snapshot", "compare", "checksum")
"""Actions of SGLang's weights checker that only read; ``reset_tensors`` writes random numbers."""


def refuse_generation(original: Any, scheduler: Any, request: Any, **kwargs: Any) -> None:
    """AROUND ``handle_generate_request`` and its like: only a committed version generates, and
    only from token ids that it has."""
    weights = scheduler_weights(scheduler)
    if weights is not None and not weights.may_generate:
        refuse(scheduler, request, weights.why_not_generate, HTTPStatus.SERVICE_UNAVAILABLE)
        return
    if weights is not None:
        unknown = why_not_in_vocabulary(request, scheduler.model_config.vocab_size)
        if unknown is not None:
            refuse(scheduler, request, unknown, HTTPStatus.BAD_REQUEST)
            return
        if weights.kv is not None:
            isolate_prefix(request)
    original(scheduler, request, **kwargs)


def check_copies(scheduler: Any) -> None:
    """Check, once graphs are captured, that SGLang knows of no copies that updates do not reach."""
    weights = scheduler_weights(scheduler)
    if weights is not None and (why := compat.derived_weight_error(weights.model)) is not None:
        raise ValueError(f"quantization fp8rl cannot update this engine: {why}")


def on_scheduler_step(original: Any, scheduler: Any, requests: Any) -> Any:
    """AROUND ``Scheduler.process_input_requests``, a step of every loop, idle or not.

    A release that waits is tried again. The memory of a trainer that has exited is closed,
    between two updates and on the thread that makes them.
    """
    weights = scheduler_weights(scheduler)
    if weights is None:
        return original(scheduler, requests)
    waiting, weights.waiting = weights.waiting, []
    output = original(scheduler, [*waiting, *requests])
    weights.memory.close_if_orphaned()
    return output


def stamp_policy(original: Any, runner: Any, logits_output: Any, forward_batch: Any) -> Any:
    """AROUND ``ModelRunner.sample``: each sampled token carries the policy that sampled it."""
    token_ids = original(runner, logits_output, forward_batch)
    weights = weights_of(runner.model)
    if weights is not None:
        count, (run, version) = len(token_ids), weights.policy
        # a request goes on under another run only by a prefill, as after a retraction
        changed = forward_batch.forward_mode.is_extend()
        logits_output.customized_info = {
            **(logits_output.customized_info or {}),
            VERSION_KEY: [version] * count,
            RUN_KEY: [run if changed else ""] * count,
        }
    return token_ids


def refuse_stock_update(output_class: str) -> Any:
    """Make the AROUND hook of one of SGLang's own weight updates.

    It would cast BF16 into FP8 storage without scales, and says nothing of versions.
    """

    def hook(original: Any, updater: Any, request: Any) -> Any:
        if weights_of(updater.tp_worker.model_runner.model) is None:
            return original(updater, request)
        return getattr(compat, output_class)(success=False, message=STOCK_UPDATE)

    return hook


def refuse_reset(original: Any, updater: Any, request: Any) -> Any:
    """AROUND ``check_weights``: no update brings all that a reset destroys, such as constants."""
    weights = weights_of(updater.tp_worker.model_runner.model)
    if weights is None or request.action in READING_CHECKS:
        return original(updater, request)
    return compat.CheckWeightsReqOutput(success=False, message=STOCK_UPDATE)


def refuse_kv_storage(original: Any, scheduler: Any, request: Any) -> Any:
    """AROUND ``attach_hicache_storage_wrapped``: no flush reaches the entries of a storage."""
    if scheduler_weights(scheduler) is None:
        return original(scheduler, request)
    return compat.AttachHiCacheStorageReqOutput(
        success=False,
        message="this engine runs with --quantization fp8rl, whose KV cache must not outlive an "
        "update; leave the storage of HiCache detached",
    )
