"""What users pass to the public calls: NumPy's and torch's values work, others get a sentence."""

import array
import math
import re
from collections import UserDict
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sgl_fp8rl.protocol.values import token_ids
from tests.trainer_bridge.moe_models import tiny
from tests.trainer_bridge.test_rollout import FakeEngine, Reply, serve
from trainer_bridge import KVCalibrator, response_logprobs, rollout
from trainer_bridge.chain import ChainError, ChainPublisher, follow
from trainer_bridge.engines.engine_client import connect
from trainer_bridge.rollouts.sampling import check_sampling, read_sampling
from trainer_bridge.session.participant import check_required
from trainer_bridge.updates.update import ask

ROWS = [[1, 2], [3, 4]]
BATCHES: list[Any] = [
    *(ROWS, ((1, 2), (3, 4)), [range(1, 3), range(3, 5)]),
    *(np.array(ROWS), np.array(ROWS, np.uint8), np.array([[1, 2], None], object)),
    *(torch.tensor(ROWS), torch.tensor(ROWS, dtype=torch.int32)),
    [np.array(row) for row in ROWS],
    tuple(torch.tensor(row) for row in ROWS),
    [list(torch.tensor(row)) for row in ROWS],
    [[np.int64(token) for token in row] for row in ROWS],
]
BATCHES[5][1] = [3, 4]


@pytest.mark.parametrize("batch", BATCHES, ids=repr)
def test_token_ids_of_any_kind_are_the_same(batch: Any) -> None:
    client, model = FakeEngine(), tiny("qwen3")
    assert rollout(client, batch, {}).prompt_tokens == ROWS
    assert [request["input_ids"] for request in client.requests] == ROWS
    assert {type(token) for request in client.requests for token in request["input_ids"]} == {int}
    wanted = response_logprobs(model, ROWS, ROWS)
    assert torch.equal(response_logprobs(model, batch, ROWS, np.float32(1.0)), wanted)
    assert torch.equal(response_logprobs(model, ROWS, batch, torch.tensor(1.0)), wanted)


@pytest.mark.parametrize("batch", [["a", "bc"], ("a", "bc"), np.array(["a", "bc"])], ids=repr)
def test_texts_of_any_kind_are_the_same_request(batch: Any) -> None:
    client = FakeEngine()
    rollout(client, batch, {})
    assert [request["text"] for request in client.requests] == ["a", "bc"]


class Encoding(UserDict[str, Any]):
    """As a tokenizer's ``BatchEncoding``."""


NO_ROWS: list[Any] = [
    *("hello", b"hi", None, 5, {"input_ids": ROWS}, Encoding(input_ids=ROWS), {1, 2}, iter(ROWS)),
    *(np.array(5), torch.tensor(5)),
]
NO_ROW: list[Any] = [
    *("12", b"hi", bytearray(b"hi"), memoryview(b"hi"), 5, None),
    *(["1", "2"], [b"1"], [1.0], [1.9], [True], [1, None], [[1, 2]], [2**64]),
    *({"input_ids": [1]}, Encoding(input_ids=[1])),
    *({"role": "user", "content": "hi"}, [{"role": "user", "content": "hi"}]),
    *(make(row) for make in (np.array, torch.tensor) for row in ([1.0], [True])),
    *(np.array(ROWS), [torch.tensor(1.5)], [np.bool_(True)]),
]


def check_refused(call: Callable[[], Any], *names: str) -> None:
    with pytest.raises(ValueError) as refused:
        call()
    text = str(refused.value)
    assert all(name in text for name in names), text
    assert "; pass " in text and "\n" not in text and len(text) < 700, text


def without_address(value: object) -> str:
    """A name that is the same in every process."""
    return re.sub(r" at 0x\w+", "", repr(value))


@pytest.mark.parametrize("batch", [*NO_ROWS, *([row] for row in NO_ROW)], ids=without_address)
def test_what_is_not_token_ids_is_refused(batch: Any) -> None:
    client = FakeEngine()
    if repr(batch) != "['12']":  # a prompt of text
        check_refused(lambda: rollout(client, batch, {}), "rollout: prompts")
    if isinstance(batch, list):
        check_refused(lambda: rollout(client, [[1], *batch], {}), "rollout: prompts[1]")
    model = SimpleNamespace()
    check_refused(lambda: response_logprobs(model, batch, [[1]]), "response_logprobs: prompts")
    check_refused(lambda: response_logprobs(model, [[1]], batch), "response_logprobs: responses")
    assert not client.requests


@pytest.mark.parametrize("prompts", [[], ["a", [5]], [[5], "a"]], ids=str)
def test_prompts_are_of_one_kind(prompts: Any) -> None:
    check_refused(lambda: rollout(FakeEngine(), prompts, {}), "rollout: prompts")


def test_a_long_row_is_quoted_in_part() -> None:
    for row in (np.arange(1e5), ["1"] * 10**6):
        check_refused(lambda row=row: token_ids("row 3", row), "row 3 is ", "...")
    check_refused(lambda: token_ids("row", memoryview(array.array("i", [1, 2]))), "row is")


SENT: dict[str, tuple[Any, Any]] = {
    "temperature": (np.float32(0.5), 0.5),
    "max_new_tokens": (torch.tensor(4), 4),
    "stop": (np.array(["a", "b"]), ["a", "b"]),
    "stop_token_ids": (torch.tensor([1, 2]), [1, 2]),
    "stop_regex": (("a+",), ["a+"]),
    "ignore_eos": (np.bool_(True), True),
    "no_stop_trim": (1, True),
    "top_p": (np.float64(1.0), 1.0),
    "top_k": (torch.tensor(-1), -1),
}
"""What is given, and what is sent."""


def test_values_of_numpy_and_torch_are_sent_as_json() -> None:
    """Over HTTP, and as Python's own in this process."""
    sampling = {name: given for name, (given, _) in SENT.items()}
    sampling |= {"n": np.int64(2), "sampling_seed": np.uint8(7)}
    engine, found = FakeEngine(), []

    def answer(request: Reply) -> tuple[int, Any]:
        found.append(request["sampling_params"])
        return 200, engine.reply(0, request)

    with serve(engine, answer) as url:
        result = rollout(
            url, torch.tensor([[5]]), sampling, expected_version=np.int64(3), timeout=np.float32(50)
        )
    assert (len(result.tokens), result.temperature) == (2, 0.5)
    assert len({sent["sampling_seed"] for sent in found}) == 2
    assert {name: found[0][name] for name in SENT} == {
        name: sent for name, (_, sent) in SENT.items()
    }


def test_sets_and_missing_stop_tokens_are_sent_as_sglang_reads_them() -> None:
    """It takes both; JSON knows no sets."""
    *_, sent = read_sampling({"stop": {"a"}, "stop_token_ids": {3}})
    assert (sent["stop"], sent["stop_token_ids"]) == (["a"], [3])
    *_, sent = read_sampling({"stop": "a", "stop_token_ids": [3, None], "stop_regex": None})
    assert (sent["stop"], sent["stop_token_ids"]) == (["a"], [3]) and "stop_regex" not in sent


NO_SAMPLING: list[Any] = [
    None,
    "temperature=1",
    [("temperature", 1.0)],
    *({"n": n} for n in (True, 0, -1, 1.0, "8", math.nan, [8], np.array([8]))),
    *({"temperature": t} for t in ("1", True, -1, math.nan, math.inf, 10**400, [1.0], 1j)),
    *({"max_new_tokens": m} for m in (1.5, 2.0, "2", -1, True, 2**63, [2], Fraction(2))),
    *({"stop": stop} for stop in (5, b"a", ["a", 5], [None], {"a": 1}, True)),
    *({"stop_regex": regex} for regex in ("(", "a{2,1}", ["a", "["], 5, [None], "a{9999999999}")),
    *({"stop_token_ids": ids} for ids in (5, "5", ["5"], [5.0], [True], {"5": 1}, [[5]])),
    *({"sampling_seed": seed} for seed in (1.5, "1", True, 2**63, [1], math.nan)),
    *({"ignore_eos": flag} for flag in ("false", "True", 2, 1.5, [True])),
    *({"top_p": p} for p in ("1", [1.0], np.array([1.0, 1.0]), math.nan)),
    *({f"{name}_special_tokens": "no"} for name in ("skip", "spaces_between")),
    {"no_stop_trim": "yes"},
    {1: 2, "best_of": 3},
]


@pytest.mark.parametrize("sampling", NO_SAMPLING, ids=repr)
def test_sampling_of_other_kinds_is_refused_before_there_is_an_engine(sampling: Any) -> None:
    with pytest.raises(ValueError, match=r"^rollout: sampling") as refused:
        check_sampling(sampling)
    assert "; " in str(refused.value) and "\n" not in str(refused.value)
    client = FakeEngine()
    with pytest.raises(ValueError, match=r"^rollout: sampling"):
        rollout(client, [[5]], sampling)
    assert not client.requests


NO_SECONDS = [0, -1, math.nan, math.inf, -math.inf, "10", True, [1.0], 10**400]
NO_VERSIONS = [1.0, "1", True, -2, 2**63, [1], np.array([1])]


@pytest.mark.parametrize("value", NO_SECONDS, ids=repr)
def test_timeouts_that_are_none_are_refused(value: Any) -> None:
    client = FakeEngine()
    check_refused(lambda: rollout(client, [[5]], {}, timeout=value), "timeout")
    check_refused(lambda: connect("http://127.0.0.1:9").control({}, value), "timeout")
    assert not client.requests


@pytest.mark.parametrize("value", NO_VERSIONS, ids=repr)
def test_versions_that_are_none_are_refused(value: Any) -> None:
    client = FakeEngine(version=1)
    check_refused(lambda: rollout(client, [[5]], {}, expected_version=value), "expected_version")
    with pytest.raises(ValueError, match="version is"):
        ask(lambda: None, "a", None, value)
    assert not client.requests


def test_a_timeout_may_be_longer_than_a_selector_waits() -> None:
    engine = FakeEngine()
    with serve(engine, lambda request: (200, engine.reply(0, request))) as url:
        assert rollout(url, [[5]], {}, timeout=1e300).tokens == [[0]]


@pytest.mark.parametrize("version", [np.int64(1), np.uint8(1), torch.tensor(1), np.array(1)])
def test_versions_of_numpy_and_torch(version: Any) -> None:
    policy = ask(lambda: None, "a", None, version).policy
    assert policy == ("a", 1) and type(policy.version) is int
    assert check_required(version, 2) == 1
    assert ChainPublisher("unused", None, version)._anchor_every == 1
    calibrator = KVCalibrator(version, version, percentile=np.float32(50), decay=np.float32(0.5))
    assert (calibrator.layers, calibrator.decay) == (1, 0.5)


CALLS: list[Callable[[Any], Any]] = [
    lambda value: KVCalibrator(value, 1),
    lambda value: KVCalibrator(1, value),
    lambda value: KVCalibrator(1, 1, percentile=value),
    lambda value: KVCalibrator(1, 1, margin=value),
    lambda value: KVCalibrator(1, 1, decay=value),
    lambda value: response_logprobs(SimpleNamespace(), [[1]], [[1]], value),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", ["1", True, math.nan, math.inf, -1, [1]], ids=repr)
def test_numbers_of_other_kinds_are_refused(call: Callable[[Any], Any], value: Any) -> None:
    check_refused(lambda: call(value))


@pytest.mark.parametrize("value", ["1", True, math.nan, -1, 1.5], ids=repr)
def test_numbers_of_a_chain(value: Any, tmp_path: Any) -> None:
    with pytest.raises(ChainError, match="anchor_every is"):
        ChainPublisher(tmp_path, None, value)
    if value != 1.5:
        with pytest.raises(ChainError, match="poll_s is"):
            follow(tmp_path, [], poll_s=value)
