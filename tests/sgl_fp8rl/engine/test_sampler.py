"""Our draw beside SGLang's own sampler: the same tokens and logprobs, and whom it serves."""

import math
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as stock
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers import lost_rows, sampler
from sgl_fp8rl.ops import sample
from tests.sgl_fp8rl.conftest import Publish

ROWS, VOCAB = 12, 3001


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> None:
    """What SGLang's sampler reads of an engine that serves fp8rl, on one rank."""
    publish(quantization="fp8rl", sampling_backend="pytorch", sampling_mask_max_tokens=8)
    group = SimpleNamespace(device_group=None)
    parallel = SimpleNamespace(tp_group=group, attn_cp_size=1, attn_tp_group=group)
    monkeypatch.setattr(stock, "get_tp_group", lambda: group, raising=False)
    monkeypatch.setattr(stock, "get_parallel", lambda: parallel)
    monkeypatch.setattr(stock, "is_dp_attention_enabled", lambda: False)


def batch(**changes: Any) -> SamplingBatchInfo:
    """Requests that all sample plainly, but for ``changes``."""
    one = torch.ones(ROWS)
    plain: dict[str, Any] = {
        "temperatures": torch.tensor([1.0, 0.6, 1.3, 0.1]).repeat(ROWS // 4).view(-1, 1),
        "top_ps": one,
        "top_ks": torch.full((ROWS,), 1 << 30, dtype=torch.int32),
        "min_ps": one * 0,
        "is_all_greedy": False,
        "is_any_greedy": False,
        "need_top_p_sampling": False,
        "need_top_k_sampling": False,
        "need_min_p_sampling": False,
        "vocab_size": VOCAB,
        "return_sampling_masks": [False] * ROWS,
        "device": "cpu",
    }
    return SamplingBatchInfo(**{**plain, **changes})


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def second(value: Any, rest: Any) -> list[Any]:
    return [rest, value, *[rest] * (ROWS - 2)]


TOP_P = {"need_top_p_sampling": True, "top_ps": torch.full((ROWS,), 0.9)}
TOP_K = {
    "need_top_k_sampling": True,
    "is_any_greedy": True,
    "top_ks": torch.tensor(second(1, 1 << 30), dtype=torch.int32),
}
MIN_P = {"need_min_p_sampling": True, "min_ps": torch.full((ROWS,), 0.1)}


class Step:
    """One call of a sampler, stock's or through our hook, from one seed."""

    def __init__(
        self,
        info: SamplingBatchInfo,
        logits: torch.Tensor,
        *,
        ours: bool,
        return_logprob: bool = True,
        top: list[int] | None = None,
        ids: list[Any] | None = None,
        change: Any = None,
        **more: Any,
    ) -> None:
        self.left_to_stock = False
        self.output = LogitsProcessorOutput(next_token_logits=logits.clone())
        made = stock.Sampler()
        if change is not None:
            change(made)
        asked = return_logprob, top or [0] * ROWS, ids or [None] * ROWS
        arguments = self.output, info, *asked, torch.arange(ROWS)
        torch.manual_seed(11)
        if ours:
            self.tokens = sampler.fast_sample(self.forward, made, *arguments, **more)
        else:
            self.tokens = stock.Sampler.forward(made, *arguments, **more)
        self.logprobs = self.output.next_token_logprobs
        self.next_random = torch.rand(1).item()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.left_to_stock = True
        return stock.Sampler.forward(*args, **kwargs)


def assert_same(mine: Step, theirs: Step) -> None:
    assert mine.tokens.dtype == theirs.tokens.dtype
    assert torch.equal(mine.tokens, theirs.tokens)
    assert (mine.logprobs is None) == (theirs.logprobs is None)
    if mine.logprobs is not None and theirs.logprobs is not None:
        assert mine.logprobs.dtype == theirs.logprobs.dtype
        assert torch.equal(mine.logprobs, theirs.logprobs), "not bit for bit"
    assert mine.next_random == theirs.next_random, "the next step's random numbers differ"


@pytest.mark.parametrize("return_logprob", [True, False])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", ["one", "mixed"])
def test_the_tokens_and_logprobs_of_stock(
    seed: int, return_logprob: bool, temperature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest SGLang has two ways to draw; tokens are the same."""
    info = batch(**({"temperatures": torch.ones(ROWS, 1)} if temperature == "one" else {}))
    mine = Step(info, logits(seed), ours=True, return_logprob=return_logprob)
    assert not mine.left_to_stock
    assert (mine.logprobs is not None) == return_logprob
    for own_race in (True, False):
        monkeypatch.setenv("SGLANG_OPT_USE_GUMBEL_SAMPLE", str(own_race))
        assert_same(mine, Step(info, logits(seed), ours=False, return_logprob=return_logprob))


def test_masked_tokens_and_a_probability_of_one() -> None:
    x = logits()
    x[:, :2000] = -math.inf
    x[0] = -math.inf
    x[0, 2500] = 1.0
    mine = Step(batch(), x, ours=True)
    assert_same(mine, Step(batch(), x, ours=False))
    assert mine.tokens.min() >= 2000 and mine.logprobs is not None
    assert (mine.tokens[0].item(), mine.logprobs[0].item()) == (2500, 0.0)


def test_a_wrong_gather_and_other_noise_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: logprobs of other tokens than those drawn do not pass for stock's."""

    def wrong(x: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> Any:
        tokens, logprobs = right(x, t, noise)
        return tokens, logprobs.roll(1)

    right, theirs = sample.sample, Step(batch(), logits(), ours=False)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="not bit for bit"):
        patch.setattr(sample, "sample", wrong)
        assert_same(Step(batch(), logits(), ours=True), theirs)
    monkeypatch.setattr(sampler, "exponential_noise", lambda x: -torch.rand_like(x).log())
    with pytest.raises(AssertionError):
        assert_same(Step(batch(), logits(), ours=True), theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("way", ["plain", "greedy", "top-p", "one greedy"])
def test_rows_without_a_distribution_are_noted_and_the_others_are_drawn(
    way: str, bad: float
) -> None:
    """Stock raises, which on a GPU ends its context."""
    info = {"plain": {}, "greedy": {"is_all_greedy": True}, "top-p": TOP_P, "one greedy": TOP_K}
    spoilt = logits()
    spoilt[3], spoilt[5, 7] = bad, bad
    sound = Step(batch(**info[way]), logits(), ours=True)
    mine = Step(batch(**info[way]), spoilt, ours=True)
    masked = bad == -math.inf  # one token that is masked does no harm
    lost = [3] if masked else [3, 5]
    if masked and way == "greedy":
        lost = []  # as in stock: the first token
    assert mine.output.fp8rl_lost.rows_B.nonzero().flatten().tolist() == lost  # type: ignore[attr-defined]
    assert not sound.output.fp8rl_lost.rows_B.any()  # type: ignore[attr-defined]
    assert mine.tokens.min() >= 0 and mine.tokens.max() < VOCAB
    for row in set(range(ROWS)) - {3, 5}:
        assert mine.tokens[row] == sound.tokens[row]
        assert mine.logprobs is not None and sound.logprobs is not None
        assert mine.logprobs[row] == sound.logprobs[row]


class Request:
    """What the scheduler's result processor has of one."""

    def __init__(self, *, finished: bool = False, chunks: int = 0) -> None:
        self.inflight_middle_chunks, self.to_finish = chunks, None
        self.finished, self.is_retracted = (lambda: finished), False


def test_lost_requests_are_to_finish_with_an_error_before_their_tokens_are_taken_up() -> None:
    step = Step(batch(), logits() * torch.tensor([1.0, math.nan] * (ROWS // 2))[:, None], ours=True)
    requests = [Request(finished=row == 3, chunks=row == 5) for row in range(ROWS)]
    result = SimpleNamespace(logits_output=step.output)
    seen: list[Any] = []

    def original(*args: Any) -> str:
        seen.append([row for row, each in enumerate(requests) if each.to_finish is not None])
        return "taken up"

    arguments = "processor", SimpleNamespace(reqs=requests), result
    assert lost_rows.fail_lost(original, *arguments) == "taken up"
    assert seen == [[1, 7, 9, 11]]
    assert requests[1].to_finish.to_json()["status_code"] == 500  # type: ignore[attr-defined]
    result.logits_output = LogitsProcessorOutput(next_token_logits=None)
    assert lost_rows.fail_lost(original, *arguments) == "taken up"


def test_nan_is_sanitized_as_in_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SANITIZE_NAN_LOGITS", "true")
    spoilt = logits()
    spoilt[3, 7], spoilt[4, 8], spoilt[5] = math.nan, math.inf, -math.inf
    mine = Step(batch(), spoilt, ours=True)
    assert not mine.left_to_stock and mine.tokens[4].item() == 8
    assert_same(mine, Step(batch(), spoilt, ours=False))


def test_custom_processors_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_42(x: torch.Tensor, info: Any) -> None:
        x[:, :42] = x[:, 43:] = -math.inf

    monkeypatch.setattr(stock, "apply_custom_logit_processor", only_42)
    info = batch(has_custom_logit_processor=True)
    mine = Step(info, logits(), ours=True)
    assert not mine.left_to_stock and mine.tokens.tolist() == [42] * ROWS
    assert_same(mine, Step(info, logits(), ours=False))


def test_tokens_are_synchronised_across_ranks_where_stock_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    reduce = SimpleNamespace(MIN="min")
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tokens, op, group: seen.append((tokens, op, group))
    )
    monkeypatch.setattr(stock.dist, "ReduceOp", reduce)
    Step(batch(), logits(), ours=True)
    assert not seen
    step = Step(batch(grammars=[object()]), logits(), ours=True)
    assert not step.left_to_stock
    assert seen == [(step.tokens, "min", None)]


@pytest.mark.parametrize(
    ("info", "call"),
    [
        ({"is_all_greedy": True}, {}),
        (TOP_P, {}),
        (TOP_K, {}),
        (MIN_P, {}),
        ({"sampling_seed": torch.arange(ROWS)}, {}),
        ({}, {"top": second(3, 0)}),
        ({}, {"ids": second([5, 6], None)}),
        ({}, {"change": lambda made: setattr(made, "enable_deterministic", True)}),
    ],
    ids=["greedy", "top-p", "one-greedy", "min-p", "seeds", "top-logprobs", "ids", "deterministic"],
)
def test_what_is_left_to_stock(info: Any, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def simple(logprobs: torch.Tensor, seed: Any, positions: Any) -> torch.Tensor:
        return logprobs.argmax(-1, keepdim=True)  # stock's is compiled: seconds

    monkeypatch.setattr(stock, "multinomial_with_seed", simple)
    mine = Step(batch(**info), logits(), ours=True, **call)
    assert mine.left_to_stock
    theirs = Step(batch(**info), logits(), ours=False, **call)
    assert_same(mine, theirs)
    for name in ("next_token_top_logprobs_idx", "next_token_token_ids_logprobs_idx"):
        assert str(getattr(mine.output, name)) == str(getattr(theirs.output, name))


def left(made: Any = None, info: Any = None, x: torch.Tensor | None = None, **more: Any) -> bool:
    """Whether stock is called; what it would do is not looked at."""
    called: list[Any] = []
    output = LogitsProcessorOutput(next_token_logits=logits() if x is None else x)
    rest = info or batch(), True, [0] * ROWS, [None] * ROWS, torch.arange(ROWS)
    arguments = made or stock.Sampler(), output, *rest

    def original(*args: Any, **kwargs: Any) -> torch.Tensor:
        assert args == arguments and kwargs == more
        called.append(kwargs)
        return torch.zeros(ROWS, dtype=torch.int32)

    sampler.fast_sample(original, *arguments, **more)
    return bool(called)


def test_who_else_is_left_alone(monkeypatch: pytest.MonkeyPatch, publish: Publish) -> None:
    class Other(stock.Sampler):
        """A sampling backend that someone registered."""

    on_policy, ascend = stock.Sampler(), stock.Sampler()
    on_policy.rl_on_policy_target = "fsdp"
    ascend.use_ascend_backend = True
    assert not left()
    assert all(map(left, (Other(), on_policy, ascend)))
    assert left(info=batch(return_sampling_masks=second(True, False)))
    assert left(logprob_logits=logits())
    for x in (logits().bfloat16(), logits().T.contiguous().T, logits()[:0]):
        assert left(x=x)
    with monkeypatch.context() as patch:
        patch.setattr(compat, "RETURN_ORIGINAL_LOGPROB", True)
        assert left()
    for quantization in (None, "fp8"):
        publish(quantization=quantization, sampling_backend="pytorch")
        assert left()


def test_a_new_field_of_sampling_is_left_to_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may shape the distribution. The fields of the tested versions are known."""
    assert sampler._knows_all_fields()
    newer = make_dataclass("Newer", ["temperatures", "dry_multiplier"])
    monkeypatch.setattr(compat, "SamplingBatchInfo", newer)
    sampler._knows_all_fields.cache_clear()
    assert left()
    assert "dry_multiplier" in caplog.text
    sampler._knows_all_fields.cache_clear()
