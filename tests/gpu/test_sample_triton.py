"""The drawing kernels against the float64 oracle and against their reference."""

import math

import pytest
import torch

from sgl_fp8rl.ops import sample as reference
from sgl_fp8rl.ops import sample_triton
from tests.gpu.conftest import INTERPRETED
from tests.sample_oracle import check_sample

Tensor = torch.Tensor
QWEN3 = 151_936
# Measured: 7e-6, all of it the reference's: a CPU's softmax sums a whole vocabulary in few blocks.
REFERENCE_TOLERANCE = 2e-5
# On a GPU rows that lie otherwise are loaded and summed in another order; in 128 whole vocabularies
# ours and stock's logprobs, which do so too, differed by 1e-6 at most.
ORDER = 2e-6


@pytest.fixture(params=[64, sample_triton.CHUNK], ids="chunk-{}".format)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks bring many to a row at little work."""
    monkeypatch.setattr(sample_triton, "CHUNK", request.param)


def made(
    device: str, rows: int, vocab: int, *, temperature: float | None = None, spread: float = 3.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, temperatures (mixed unless one is given) and noise."""
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * spread + 5
    temperatures = torch.tensor([[1.0], [0.6], [1.3], [0.1]]).repeat(-(-rows // 4), 1)[:rows]
    if temperature is not None:
        temperatures = torch.full_like(temperatures, temperature)
    noise = torch.empty(rows, vocab).exponential_(generator=generator)
    noise.clamp_min_(2**-25)  # a GPU draws no less
    return logits.to(device), temperatures.to(device), noise.to(device)


def drawn(logits: Tensor, temperatures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels draw; it must be what the oracle and the reference draw."""
    before = logits.clone()
    tokens, logprobs = sample_triton.sample(logits, temperatures, noise)
    assert torch.equal(logits, before), "the logits are not ours to change"
    check_sample(tokens, logprobs, logits, temperatures, noise)
    reference_tokens, reference_logprobs = reference.sample(logits, temperatures, noise)
    # None of these inputs holds a tie: the same tokens.
    assert torch.equal(tokens, reference_tokens)
    torch.testing.assert_close(
        logprobs, reference_logprobs, rtol=REFERENCE_TOLERANCE, atol=REFERENCE_TOLERANCE
    )
    return tokens, logprobs


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 7), (3, 64), (5, 65), (2, 63), (7, 1000), (2, 4096), (3, 4097), (2, 12_345)],
    ids=str,
)
@pytest.mark.parametrize("temperature", [None, 1.0], ids=["mixed", "T=1"])
def test_what_is_drawn(
    device: str, chunk: None, shape: tuple[int, int], temperature: float | None
) -> None:
    drawn(*made(device, *shape, temperature=temperature))


@pytest.mark.parametrize("spread", [0.5, 8.0])
def test_a_whole_vocabulary(device: str, spread: float) -> None:
    tokens, _ = drawn(*made(device, 4 if INTERPRETED else 128, QWEN3, spread=spread))
    assert len({*tokens.tolist()}) > 1


def test_winners_come_from_every_chunk(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_triton, "CHUNK", 16)
    tokens, _ = drawn(*made(device, 200, 80, spread=0.1))
    assert {*(tokens // 16).tolist()} == {0, 1, 2, 3, 4}


def test_rows_with_gaps(device: str, chunk: None) -> None:
    logits, temperatures, noise = made(device, 5, 300)
    padded = torch.full((5, 320), math.inf, device=device)
    padded[:, :300] = logits
    got = drawn(padded[:, :300], temperatures, noise)
    tokens, logprobs = drawn(logits, temperatures, noise)
    assert torch.equal(got[0], tokens)
    torch.testing.assert_close(got[1], logprobs, rtol=ORDER, atol=ORDER)


def test_masked_tokens_are_never_drawn(device: str, chunk: None) -> None:
    logits, temperatures, noise = made(device, 8, 500)
    logits[:, :200] = -math.inf  # whole chunks, as a grammar masks them
    logits[3, :] = -math.inf
    logits[3, 421] = -80.0
    tokens, logprobs = drawn(logits, temperatures, noise)
    assert (tokens >= 200).all()
    assert (tokens[3].item(), logprobs[3].item()) == (421, 0.0)


def test_large_logits_do_not_overflow(device: str, chunk: None) -> None:
    logits, temperatures, noise = made(device, 4, 500)
    logits[0] += 1e4
    logits[1] -= 1e4
    logits[2, 250] = 1e30
    tokens, logprobs = sample_triton.sample(logits, temperatures, noise)
    check_sample(tokens, logprobs, logits, temperatures, noise)
    assert (tokens[2].item(), logprobs[2].item()) == (250, 0.0)


@pytest.mark.parametrize("at", [0, 130, 499, slice(None)], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution(
    device: str, chunk: None, bad: float, at: int | slice
) -> None:
    logits, temperatures, noise = made(device, 4, 500)
    want = [part.clone() for part in sample_triton.sample(logits, temperatures, noise)]
    logits[3, at] = bad
    if bad == -math.inf and at != slice(None):
        logits[3] = -math.inf
    tokens, logprobs = sample_triton.sample(logits, temperatures, noise)
    assert tokens[3].item() == 0 and math.isnan(logprobs[3].item())
    assert torch.equal(tokens[:3], want[0][:3]) and torch.equal(logprobs[:3], want[1][:3])
    reference_tokens, reference_logprobs = reference.sample(logits, temperatures, noise)
    assert reference_tokens[3].item() == 0 and math.isnan(reference_logprobs[3].item())


def test_noise_of_zero_divides_nothing(device: str, chunk: None) -> None:
    logits, temperatures, noise = made(device, 2, 200)
    noise[0, 123] = 0.0
    noise[1, 17] = 0.0
    logits[1, 17] = -math.inf
    tokens, logprobs = sample_triton.sample(logits, temperatures, noise)
    assert tokens[0].item() == 123
    assert tokens[1].item() != 17 and logprobs[1].item() > -math.inf
    assert torch.equal(tokens, reference.sample(logits, temperatures, noise)[0])


@pytest.mark.parametrize("spoil", ["next token", "second best", "no temperature", "one chunk"])
def test_the_oracle_sees(device: str, spoil: str) -> None:
    """Controls: what a wrong kernel would leave does not pass."""
    logits, temperatures, noise = made(device, 8, 500, temperature=0.7)
    tokens, logprobs = drawn(logits, temperatures, noise)
    scaled, at = logits / temperatures, tokens[:, None].long()
    if spoil == "second best":
        tokens, logprobs = reference.sample(logits, temperatures, noise.scatter(1, at, math.inf))
    elif spoil == "next token":  # a logprob gathered at the wrong place
        logprobs = torch.log_softmax(scaled, -1).gather(1, (at + 1) % 500)[:, 0]
    elif spoil == "no temperature":
        logprobs = torch.log_softmax(logits, -1).gather(1, at)[:, 0]
    else:  # winners of chunks compared each on its own scale
        tokens = (torch.softmax(scaled.view(8, 5, 100), -1).view(8, 500) / noise).argmax(-1).int()
        logprobs = torch.log_softmax(scaled, -1).gather(1, tokens[:, None].long())[:, 0]
    with pytest.raises(AssertionError, match=r"off by|behind"):
        check_sample(tokens, logprobs, logits, temperatures, noise)


@pytest.mark.skipif(INTERPRETED, reason="a GPU's generator")
def test_the_noise_is_what_multinomial_takes(device: str) -> None:
    logits, temperatures, _ = made(device, 64, QWEN3, temperature=1.0)
    torch.manual_seed(7)
    want = torch.multinomial(torch.softmax(logits, -1), 1).view(-1)
    torch.manual_seed(7)
    tokens, _ = sample_triton.sample(logits, temperatures, reference.exponential_noise(logits))
    assert torch.equal(tokens.long(), want)
    torch.manual_seed(8)
    tokens, _ = sample_triton.sample(logits, temperatures, reference.exponential_noise(logits))
    assert not torch.equal(tokens.long(), want)
