"""Which requests are answered when they have no token yet; real engines: test_router_replay.py."""

from types import SimpleNamespace
from typing import Any

from sgl_fp8rl.engine.control.retraction import skip_empty


def request(tokens: int, *, retracted: bool = False, finished: bool = False) -> Any:
    return SimpleNamespace(
        output_ids=[0] * tokens, is_retracted=retracted, finished=lambda: finished
    )


def test_only_what_was_retracted_before_its_first_token_is_not_told() -> None:
    told: list[Any] = []

    def original(streamer: str, reqs: list[Any], return_logprob: bool, skip_req: Any) -> str:
        assert (streamer, return_logprob, skip_req) == ("streamer", True, None)
        told.extend(reqs)
        return "done"

    running, new = request(3), request(0)
    kept = [running, new, request(50, retracted=True), request(0, retracted=True, finished=True)]
    reqs = [request(0, retracted=True), *kept]
    assert skip_empty(original, "streamer", reqs, True, skip_req=None) == "done"
    assert told == kept and len(reqs) == 5, "SGLang's own list is as it was"
