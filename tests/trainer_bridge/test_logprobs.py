"""The trainer's logprobs of a padded batch against single sequences in float64."""

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.trainer_bridge.moe_models import VOCAB, tiny
from trainer_bridge import response_logprobs
from trainer_bridge.rollouts import logprobs

PROMPTS = [[51, 43, 53, 61], [50], [7, 8], [9]]
RESPONSES = [[56, 10], [52, 44, 53, 10, 3], [], [4]]
NOISE = 1e-5
"""Between FP32 logprobs and float64 ones, in nats. Healthy: 2e-6."""


def oracle(model: Any, prompt: list[int], response: list[int], temperature: float) -> list[float]:
    """Each token from a forward pass of its own without padding, in float64 and plain Python."""
    found = []
    for t, token in enumerate(response):
        logits = model(torch.tensor([[*prompt, *response[:t]]])).logits[0, -1].tolist()
        scaled = [logit / temperature for logit in logits]
        most = max(scaled)
        total = math.fsum(math.exp(x - most) for x in scaled)
        found.append(scaled[token] - most - math.log(total))
    return found


@torch.no_grad()
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_padded_batch_is_the_single_sequences(temperature: float) -> None:
    model = tiny("qwen3")
    exact = tiny("qwen3").double()
    logprobs_BT = response_logprobs(model, PROMPTS, RESPONSES, temperature)
    assert logprobs_BT.dtype == torch.float32 and logprobs_BT.shape == (4, 5)
    for row, prompt, response in zip(logprobs_BT.tolist(), PROMPTS, RESPONSES, strict=True):
        end = len(response)
        expected = oracle(exact, prompt, response, temperature)
        assert row[:end] == pytest.approx(expected, abs=NOISE, rel=0)
        assert row[end:] == [0.0] * (5 - end)
        # The controls: another temperature, and the logits of one position later.
        for wrong in (
            oracle(exact, prompt, response, 2 * temperature),
            oracle(exact, [*prompt, 1], response, temperature),
        ):
            assert all(abs(a - b) > 10 * NOISE for a, b in zip(row, wrong, strict=False))


def test_the_gradient_is_that_of_the_tokens() -> None:
    logits_BLV = torch.zeros(1, 4, 4, requires_grad=True)
    model = SimpleLM(logits_BLV)
    response_logprobs(model, [[1, 2]], [[3, 1]], 2.0).sum().backward()
    expected_LV = torch.zeros(4, 4)
    for position, token in ((1, 3), (2, 1)):  # (one hot - softmax) / temperature
        expected_LV[position] -= 1 / 8
        expected_LV[position, token] += 1 / 2
    assert torch.equal(logits_BLV.grad[0], expected_LV)  # type: ignore[index]


def test_bf16_logits_are_divided_in_fp32() -> None:
    logits_BLV = torch.tensor([[[3.0, 1.0, -2.0], [0, 0, 0]]], dtype=torch.bfloat16)
    got = response_logprobs(SimpleLM(logits_BLV), [[0]], [[1]], 0.7).item()
    total = sum(math.exp(x / 0.7) for x in (3, 1, -2))
    assert got == pytest.approx(1 / 0.7 - math.log(total), abs=1e-6)
    in_bf16 = (logits_BLV[0, 0] / 0.7).log_softmax(-1)[1].item()  # the control
    assert abs(got - in_bf16) > 1e-3


def test_a_model_may_compute_elsewhere_than_its_parameters_lie() -> None:
    """As FSDP2 with CPU offload does."""
    logits = torch.empty(1, 3, 11, device="meta")
    model = Mock(device=torch.device("cpu"), return_value=SimpleNamespace(logits=logits))
    assert response_logprobs(model, [[1]], [[2, 3]]).device.type == "meta"


def test_no_response_has_a_token() -> None:
    logits_BLV = torch.zeros(2, 1, 4)
    assert response_logprobs(SimpleLM(logits_BLV), [[1], [2]], [[], []]).shape == (2, 0)


@pytest.mark.parametrize(
    ("prompts", "responses", "temperature", "words"),
    [
        ([], [], 1.0, "at least one"),
        ([[1]], [[1], [2]], 1.0, "1 prompts and 2 responses"),
        ([[1], []], [[1], [2]], 1.0, "prompt 1 is empty"),
        ([[1]], [[1]], 0.0, "temperature 0 "),
    ],
)
def test_refused(prompts: Any, responses: Any, temperature: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        response_logprobs(None, prompts, responses, temperature)


class Around(nn.Module):
    """A wrapper as users write it: neither device, nor config, nor embeddings."""

    def __init__(self, inner: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.inner, self.keywords = inner, keywords

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self.inner(*args, **keywords, **self.keywords)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "model": lambda model: model,
    "own": Around,
    "data parallel": nn.DataParallel,
    "averaged": AveragedModel,
    "adapter": lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj"])),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_is_the_model(wrap: Callable[[Any], nn.Module]) -> None:
    expected = response_logprobs(tiny("qwen3"), PROMPTS, RESPONSES)
    model = wrap(tiny("qwen3"))
    torch.testing.assert_close(response_logprobs(model, PROMPTS, RESPONSES), expected)
    for odd, where in ((VOCAB, "prompt"), (VOCAB, "response"), (-100, "response")):
        given = {"prompt": [[1, 2]], "response": [[3]]}
        given[where][0].append(odd)
        with pytest.raises(ValueError, match=f"token id {odd} is not one of the model's {VOCAB}"):
            response_logprobs(model, given["prompt"], given["response"])


def test_an_id_beyond_the_logits() -> None:
    """Of a model that is no transformers', or embeds ids that it never predicts."""
    model = SimpleLM(torch.zeros(1, 3, 11))
    response_logprobs(model, [[11, 12]], [[10]])
    with pytest.raises(ValueError, match="token id 11 is not one of the model's 11"):
        response_logprobs(model, [[1, 2]], [[11]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny("qwen3", return_dict=False),
        lambda: Around(tiny("qwen3", return_dict=False)),
        lambda: Around(tiny("qwen3"), return_dict=False),
        lambda: Around(tiny("qwen3").model),
        lambda: Around(tiny("qwen3"), logits_to_keep=1),
    ],
    ids=["config", "wrapped", "tuple", "without head", "last logits"],
)
def test_a_model_without_logits_of_all_tokens(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"no logits|return_dict is False"):
        response_logprobs(make(), [[1, 2]], [[3]])


RANDOM: dict[str, Callable[[], Any]] = {
    "attention": lambda: tiny("qwen3", attention_dropout=0.1),
    "modules": lambda: tiny("gpt2", resid_pdrop=0.1),
    "router": lambda: tiny("mixtral", router_jitter_noise=0.1),
    "adapter": lambda: get_peft_model(
        tiny("qwen3"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
    ),
}


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
def test_dropout_is_warned_of_once(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logprobs, "_warned", set())
    given, calm = ([[1, 2]], [[3]]), tiny("qwen3").train()
    with caplog.at_level(logging.WARNING, logprobs.__name__):
        response_logprobs(calm, *given)
        model = make().eval()
        response_logprobs(model, *given)
        assert not caplog.records
        for wrapped in (model.train(), Around(model)):
            response_logprobs(wrapped, *given)
    first, *others = (record.getMessage() for record in caplog.records)
    assert "is 0.1" in first and "model.eval()" in first
    assert len(others) < 2  # under another name


class SimpleLM:
    """Answers with given logits."""

    device = torch.device("cpu")

    def __init__(self, logits_BLV: torch.Tensor) -> None:
        self.logits_BLV = logits_BLV

    def __call__(self, tokens_BL: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert tokens_BL.shape == self.logits_BLV.shape[:2] and not use_cache
        return SimpleNamespace(logits=self.logits_BLV)
