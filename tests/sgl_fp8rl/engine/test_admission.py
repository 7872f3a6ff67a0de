"""Which requests an engine takes, by SGLang's own decoder; ``tests/engine/test_bad_requests.py``
has them at engines."""

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    TokenizedGenerateReqInput,
    msgpack_encode,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_fp8rl.engine.control import admission
from tests.engine.bad_requests import WRONG_SAMPLING

VOCAB = 512
TAKEN: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": None, "temperature": 1, "top_k": -1, "stop": "x", "stop_regex": ["a+"]},
    {"temperature": np.float32(0.5), "top_p": np.float64(0.5)},
    {"stop_token_ids": [3, None], "logit_bias": {"5": 1}, "custom_params": {"a": [1, "b"]}},
    {"json_schema": "{}", "ignore_eos": True, "sampling_seed": 7, "n": 2},
    {"max_new_tokens": 10**9, "min_new_tokens": 1, "stream_interval": 4},
]


def manager(quantization: str = "fp8rl") -> Any:
    return SimpleNamespace(server_args=SimpleNamespace(quantization=quantization))


def admit(sampling: Any, **of_manager: Any) -> Any:
    request = GenerateReqInput(input_ids=[1], sampling_params=sampling)
    return admission.check_kinds(lambda _, obj: obj, manager(**of_manager), request)


@pytest.mark.parametrize("sampling", TAKEN, ids=str)
def test_what_sglang_takes_is_taken(sampling: dict[str, Any]) -> None:
    decoded = msgspec.msgpack.decode(
        msgpack_encode(SamplingParams(**sampling)), type=SamplingParams
    )
    assert isinstance(decoded, SamplingParams)  # the control: its scheduler decodes it
    assert admit(sampling).sampling_params is sampling
    assert admit([sampling, {}]) is not None


@pytest.mark.parametrize(
    "sampling",
    [
        *WRONG_SAMPLING,
        {"temperature": torch.tensor(1.0)},
        {"logit_bias": {5: 1.0}},
        {"max_new_tokens": 2**70},
    ],
    ids=str,
)
def test_a_wrong_kind_is_named(sampling: dict[str, Any]) -> None:
    (name,) = sampling
    for given in (sampling, [{}, sampling], {"top_p": 0.5, **sampling}):
        with pytest.raises(ValueError, match=f"parameter {name} is "):
            admit(given)
    assert admit(sampling, quantization="fp8") is not None  # another engine's own affair


@pytest.mark.parametrize("sampling", ["x", 5, [5], [{}, "x"]])
def test_what_is_no_mapping(sampling: Any) -> None:
    with pytest.raises(ValueError, match="give a dict"):
        admit(sampling)


def a_request(**fields: Any) -> TokenizedGenerateReqInput:
    """What SGLang's main process sends of a request."""
    return TokenizedGenerateReqInput(
        **{
            "rid": "r",
            "input_text": None,
            "input_ids": array("q", [1, 2]),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": SamplingParams(),
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "token_ids_logprob": None,
            "stream": False,
            **fields,
        }
    )


@pytest.mark.parametrize(
    "field",
    [{"top_logprobs_num": 1.5}, {"return_logprob": 1}, {"rid": 5}, {"extra_key": 7}],
    ids=str,
)
def test_a_field_of_a_wrong_kind_is_not_sent(field: dict[str, Any]) -> None:
    def create(_: Any, obj: Any) -> Any:
        return a_request(**field)

    with pytest.raises(ValueError, match=r"does not take: Expected .*got"):
        admission.check_fields(create, manager(), None)
    assert admission.check_fields(create, manager("fp8"), None) is not None


def test_what_is_no_regex() -> None:
    def create(_: Any, obj: Any) -> Any:
        return SamplingParams(stop_regex=obj).normalize(None)

    with pytest.raises(ValueError, match="does not take: missing"):
        admission.check_fields(create, manager(), "a(")


def test_what_is_sent_is_what_sglang_made() -> None:
    """Images, which SGLang pickles later, included."""
    request = a_request(mm_inputs=object(), time_stats=object())
    assert admission.check_fields(lambda *_: request, manager(), None) is request
    assert request.mm_inputs is not None and request.time_stats is not None


PROMPTS = [None, [], [1], [[1], [2]], [np.int64(3)], [True], array("q", [1])]
NO_PROMPTS = [[1.5], ["1"], [1, None], 5, [[1], [2, 3.0]], "ab", [[1], 2], [1, [2]]]


@pytest.mark.parametrize("ids", [*PROMPTS, *NO_PROMPTS], ids=str)
def test_a_prompt(ids: Any) -> None:
    request = SimpleNamespace(input_ids=ids, sampling_params=None)
    assert admission.check_kinds(lambda _, obj: obj, manager("fp8"), request) is request
    if any(ids is known for known in PROMPTS):
        assert admission.check_kinds(lambda _, obj: obj, manager(), request) is request
    else:
        with pytest.raises(ValueError, match="token ids"):
            admission.check_kinds(lambda _, obj: obj, manager(), request)


def test_an_id_that_no_array_of_sglangs_holds() -> None:
    with pytest.raises(ValueError, match="does not take"):
        admission.check_fields(lambda _, obj: array("q", obj), manager(), [2**64])


@pytest.mark.parametrize(
    ("ids", "unknown"),
    [
        ([0, VOCAB - 1], None),
        ([], None),
        ([1, VOCAB], 1),
        ([-1, 3], 0),
        ([3, 2**40], 1),
        ([2**62, -(2**62)], 0),
    ],
)
def test_the_vocabulary(ids: list[int], unknown: int | None) -> None:
    why = admission.why_not_in_vocabulary(a_request(input_ids=array("q", ids)), VOCAB)
    if unknown is None:
        assert why is None
    else:
        assert why is not None and why.startswith(
            f"token {unknown} of the prompt is {ids[unknown]}"
        )


def test_what_embeddings_take_the_place_of() -> None:
    ids = array("q", [1, VOCAB + 8])  # a placeholder of some models
    for more in ({"mm_inputs": object()}, {"input_embeds": [[0.0]]}):
        assert admission.why_not_in_vocabulary(a_request(input_ids=ids, **more), VOCAB) is None


def test_sglang_calls_what_is_hooked_with_these_arguments() -> None:
    names = TokenizerManager._create_tokenized_object.__code__.co_varnames
    assert names[:2] == ("self", "obj")
