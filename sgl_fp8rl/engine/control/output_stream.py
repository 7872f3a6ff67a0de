"""A hook on SGLang's output: keep the first logprob of a request that is retracted before it.

SGLang retracts the requests with the fewest tokens first, so often one whose prefill has just run
and whose first token is not read yet. 0.5.17 then sends a reply without tokens and counts one
logprob as sent, so that of the first token is never sent. Skipping that empty reply loses nothing;
0.5.23 counts correctly.
"""

from typing import Any


def skip_empty(original: Any, streamer: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``SchedulerOutputStreamer.stream_output``."""
    sent = [req for req in reqs if not req.is_retracted or req.output_ids or req.finished()]
    return original(streamer, sent, *args, **kwargs)
