"""A hook on SGLang's output: a request that is retracted before its first token loses no logprob.

SGLang retracts the requests with the fewest tokens first, so often one whose prefill has just run,
with its token not read yet. 0.5.17 then sends an answer of no tokens and counts one logprob as
sent: that of the first token, when it comes, never is. Nothing is lost by not sending that answer;
0.5.23 counts right.
"""

from typing import Any


def skip_empty(original: Any, streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``SchedulerOutputStreamer.stream_output``."""
    told = [req for req in reqs if not req.is_retracted or req.output_ids or req.finished()]
    return original(streamer, told, *args, **kwargs)
