"""Requests in flight at an update that are retracted: they keep their tokens and go on after it.

These run on every rank, at the same step of its scheduler's event loop.
"""

from itertools import compress
from typing import Any

from sgl_fp8rl.engine import compat

TOO_LONG = (
    "an update retracted this request, and its prompt and answer do not fit the KV cache again; "
    "update with in_flight='finish' to keep such requests"
)


def retract(scheduler: Any) -> bool:
    """Take all requests off the batch, to wait before all others, and reset the KV cache.

    They keep their tokens; when they run again, prompt and tokens are prefilled again.

    Returns:
        whether the cache was reset: no entry of it is left, and no request runs.
    """
    # SGLang flushes no cache while requests wait (0.5.17 ends itself where an update must), though
    # none that waits, in the queue or for its grammar, holds a part of it. So they are set aside.
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    grammars = scheduler.grammar_manager
    compiling, grammars.grammar_queue = grammars.grammar_queue, []
    was_paused = scheduler._engine_paused
    limit, scheduler.max_queued_requests = scheduler.max_queued_requests, None
    scheduler.pause_generation(compat.PauseGenerationReqInput(mode="retract"))
    scheduler.max_queued_requests = limit
    if not was_paused:
        scheduler.continue_generation(compat.ContinueGenerationReqInput(torch_empty_cache=False))

    retracted, scheduler.waiting_queue = scheduler.waiting_queue, []
    flushed = bool(scheduler.flush_cache(empty_cache=False))
    if flushed:
        # an abort that SGLang put off until a chunk of the prompt is done would be lost
        given_up, scheduler._pending_chunked_abort_req = scheduler._pending_chunked_abort_req, None
        goes_on = [r is not given_up and fits(scheduler, r) for r in retracted]
        scheduler.waiting_queue = [r for r, on in zip(retracted, goes_on, strict=True) if not on]
        if scheduler.waiting_queue:
            refuse_waiting(scheduler, TOO_LONG)
        retracted = list(compress(retracted, goes_on))
    scheduler.waiting_queue = [*retracted, *waiting]
    grammars.grammar_queue = compiling
    return flushed


def outlasts_abort(scheduler: Any) -> bool:
    """Whether a request has begun or waits for its grammar: a pause keeps those from ending."""
    waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
    try:
        return not scheduler.is_fully_idle()
    finally:
        scheduler.waiting_queue = waiting


def fits(scheduler: Any, request: Any) -> bool:
    """Whether SGLang admits a retracted request to an empty cache; else it would wait for ever.

    Its length grew since it was first admitted, what SGLang reserves for the rest did not shrink
    where that exceeds a bound, and pages are whole. A prompt of embeddings has no tokens to go on
    from: SGLang would begin its answer again.
    """
    if request.input_embeds is not None:
        return False
    page = scheduler.page_size
    length = len(request.origin_input_ids) + len(request.output_ids)
    rest = max(request.sampling_params.max_new_tokens - len(request.output_ids), 0)
    needed = -(-length // page) * page + min(rest, compat.CLIP_MAX_NEW_TOKENS) + page
    return bool(needed < scheduler.token_to_kv_pool_allocator.available_size())


def refuse(scheduler: Any, request: Any, message: str, status: int | None = None) -> None:
    """Answer a request with an abort; with an HTTP status, as an error."""
    reason: dict[str, Any] = {"type": "abort", "message": message}
    if status is not None:
        reason["status_code"] = status
    refusal = compat.AbortReq(rid=request.rid, finished_reason=reason)
    scheduler.ipc_channels.send_to_tokenizer.send_output(refusal, request)


def refuse_waiting(scheduler: Any, message: str, status: int | None = None) -> None:
    """Answer all that wait with an abort, while nothing runs; with an HTTP status, as an error."""
    grammars = scheduler.grammar_manager
    for request in (*scheduler.waiting_queue, *grammars.grammar_queue):
        refuse(scheduler, request, message, status)
    # clears the queue as SGLang does; its own answers come second, so the tokenizer drops them
    scheduler.abort_request(compat.AbortReq(abort_all=True))
    grammars.grammar_queue = []  # SGLang would prefill one token of each, under any weights


def skip_empty(original: Any, streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``SchedulerOutputStreamer.stream_output``: keep the first logprob of a request that is
    retracted before it.

    SGLang retracts the requests with the fewest tokens first, so often one whose prefill has just
    run and whose first token is not read yet. 0.5.17 then sends a reply without tokens and counts
    one logprob as sent, so that of the first token is never sent. Skipping that empty reply loses
    nothing; 0.5.23 counts correctly.
    """
    sent = [req for req in reqs if not req.is_retracted or req.output_ids or req.finished()]
    return original(streamer, sent, *args, **kwargs)
