"""Logprobs in chunks through the head, beside those of all logits at once and float64."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.trainer_bridge import ranks
from trainer_bridge import response_logprobs
from trainer_bridge.rollouts import head, logprobs

VOCAB = 61
PROMPTS = [[5, 43, 53, 60], [50], [7, 8], []]
RESPONSES = [[56, 10], [52, 44, 53, 10, 3], [], []]
TEMPERATURE = 0.7
GRADIENT = 1e-5
"""Between FP32 gradients in another order, of the largest. Healthy: 1e-6."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # logits of some size
        model.get_output_embeddings().weight.mul_(30)
    return model.to(dtype)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(head, "CHUNK_BYTES", 3 * 4 * VOCAB)  # three tokens
    yield
    head._unknown.clear()


def whole(model: Any) -> torch.Tensor:
    """By all logits at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "head_of", lambda _: None)
        return response_logprobs(model, PROMPTS, RESPONSES, TEMPERATURE)


def gradients(model: Any, logprobs_BT: torch.Tensor) -> list[torch.Tensor]:
    weights_BT = torch.arange(logprobs_BT.numel()).view_as(logprobs_BT) - 5.0
    (logprobs_BT * weights_BT).sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_gradients_are_those_of_all_logits(name: str) -> None:
    model, exact = model_of(name), model_of(name, torch.float64)
    found_BT, whole_BT = response_logprobs(model, PROMPTS, RESPONSES, TEMPERATURE), whole(model)
    assert not head._unknown
    wanted_BT = whole(exact)
    assert found_BT.dtype == torch.float32 and found_BT.shape == wanted_BT.shape
    off, plain_off = ((x - wanted_BT).abs().max() for x in (found_BT, whole_BT))
    assert off <= 2 * plain_off + 1e-6  # healthy: 0.9 to 1.1 of it
    mine, plain = gradients(model, found_BT), gradients(model, whole_BT)
    wanted = gradients(exact, wanted_BT)
    assert len(mine) == len(wanted)
    for a, b, c in zip(mine, plain, wanted, strict=True):
        size = c.abs().max()
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + GRADIENT * size


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_what_a_model_does_with_its_logits_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its config does not tell it: all logits at once, and one warning."""
    monkeypatch.setattr(head.After, "of", lambda _: head.After())
    model = model_of(name)
    for _ in range(2):
        found_BT = response_logprobs(model, PROMPTS, RESPONSES, TEMPERATURE)
        assert torch.equal(found_BT, whole(model))
    assert model.get_output_embeddings() in head._unknown
    assert caplog.text.count("that is not known here") == 1


def test_a_bias_and_autocast_to_bf16() -> None:
    model = model_of("qwen3")
    of_bias = model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, VOCAB))
    with torch.autocast("cpu", torch.bfloat16):
        found_BT, whole_BT = response_logprobs(model, PROMPTS, RESPONSES, TEMPERATURE), whole(model)
    assert not head._unknown
    response_logprobs(model, PROMPTS, RESPONSES).sum().backward()
    assert of_bias.grad is not None and float(of_bias.grad.abs().max()) > 0
    torch.testing.assert_close(found_BT[0, 0], whole_BT[0, 0], atol=0.5, rtol=0)
    assert model.lm_head.weight.grad.dtype == torch.float32
    assert "forward" not in vars(model.lm_head)


def test_a_frozen_head_and_checkpointing() -> None:
    model = model_of("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model.lm_head.requires_grad_(False)
    mine = gradients(model, response_logprobs(model, PROMPTS, RESPONSES, TEMPERATURE))
    plain = gradients(model, whole(model))
    assert len(mine) == sum(p.requires_grad for p in model.parameters())
    for a, b in zip(mine, plain, strict=True):
        torch.testing.assert_close(a, b, atol=GRADIENT * float(b.abs().max()), rtol=0)


def test_a_compiled_model_and_another_head_run_as_they_are() -> None:
    model = model_of("qwen3")
    assert head.head_of(torch.compile(model)) is None

    class Other(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return -super().forward(hidden)

    model.lm_head.__class__ = Other
    assert head.head_of(model) is None
    torch.testing.assert_close(
        response_logprobs(model, PROMPTS, RESPONSES, TEMPERATURE), whole(model)
    )


def test_an_error_in_the_model_leaves_its_head() -> None:
    model = model_of("qwen3")
    response_logprobs(model, PROMPTS, RESPONSES)
    model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        response_logprobs(model, PROMPTS, RESPONSES)
    assert "forward" not in vars(model.lm_head)


def of_rank(rank: int, folder: Path) -> None:
    model = model_of("qwen3")
    reshard = (folder / "reshard").exists()
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    if (folder / "head apart").exists():
        fully_shard(model.lm_head, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    mine = slice(0, 2) if rank else slice(2, 4)  # the first rank's rows have no token
    found_BT = response_logprobs(model, PROMPTS[mine], RESPONSES[mine], TEMPERATURE)
    (found_BT.sum() * 2).backward()  # which FSDP averages
    torch.save([p.grad.full_tensor() for p in model.parameters()], folder / f"of {rank}")


@pytest.mark.parametrize("kinds", [(), ("reshard",), ("reshard", "head apart")], ids=str)
def test_ranks_of_fsdp_have_the_gradient_of_the_whole(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    for kind in kinds:
        (tmp_path / kind).touch()
    ranks.run(of_rank, tmp_path, 2, 60.0)
    model = model_of("qwen3")
    whole(model).sum().backward()
    for found, parameter in zip(torch.load(tmp_path / "of 1"), model.parameters(), strict=True):
        size = float(parameter.grad.abs().max())
        torch.testing.assert_close(found, parameter.grad, atol=GRADIENT * size, rtol=0)
