"""Rollouts that are cut, joined and dealt to micro-batches, and the losses of their parts."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_bridge import ranks
from trainer_bridge import Rollout, correct, group_advantages, policy_loss, response_logprobs
from trainer_bridge.correction import correct_logprobs
from trainer_bridge.engines.engine_client import EngineError

VOCAB = 11
EQUAL = {"atol": 1e-12, "rtol": 0.0}  # float64 sums in another order; healthy below 1e-15
KINDS: list[dict[str, Any]] = [
    {"reduce": "tokens"},
    {"reduce": "sequences"},
    {"reduce": "constant", "max_tokens": 7},
    {"reduce": "tokens", "ratio": "sequence", "clip": (1e-2, 2e-2)},
]


def drawn(lengths: list[tuple[int, int]], seed: int = 0, **more: Any) -> Rollout:
    """A rollout whose prompts and responses have these lengths, two to a prompt; row 1 failed."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(VOCAB, (count,), generator=generator).tolist()

    tokens = [ids(response) for _, response in lengths]
    reasons = ["error" if row == 1 else "stop" for row in range(len(lengths))]
    values: dict[str, Any] = {
        "prompt_tokens": [ids(prompt) for prompt, _ in lengths],
        "tokens": tokens,
        "logprobs": [(-3 * torch.rand(len(r), generator=generator)).tolist() for r in tokens],
        "versions": [[4] * len(row) for row in tokens],
        "finish_reasons": reasons,
        "temperature": 0.7,
        "runs": [["run"] * len(row) for row in tokens],
        "errors": {1: EngineError("failed")} if len(lengths) > 1 else {},
        "groups": [row // 2 for row in range(len(lengths))],
        "texts": [f"text {row}" for row in range(len(lengths))],
        "routed_experts": [torch.full((len(row), 1, 1), 3) for row in tokens],
    }
    return Rollout(**values | more)


LENGTHS = [(3, 5), (2, 4), (4, 1), (1, 6), (2, 2), (5, 3)]


class Bigrams(torch.nn.Module):
    """Logits of the next token by the last one, float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor, use_cache: bool) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.table[tokens])


@pytest.mark.parametrize(
    "rows",
    [slice(1, 4), slice(None, None, -1), [2, 0], torch.tensor([5, -6]), [], [True, False] * 3],
    ids=str,
)
def test_rows_have_all_that_belongs_to_them(rows: Any) -> None:
    whole, kept = drawn(LENGTHS), list(range(6))[rows] if isinstance(rows, slice) else None
    if kept is None:
        given = torch.as_tensor(rows)
        kept = torch.arange(6)[given if given.dtype == torch.bool else given.long()].tolist()
    part = whole[rows]
    assert len(part) == len(kept)
    for name in ("prompt_tokens", "tokens", "logprobs", "versions", "runs", "groups", "texts"):
        assert getattr(part, name) == [getattr(whole, name)[row] for row in kept]
    assert [int(row.numel()) for row in part.routed_experts or []] == [LENGTHS[r][1] for r in kept]
    assert set(part.errors) == {new for new, row in enumerate(kept) if row == 1}
    assert part.tokens_BT.shape == (len(kept), max((LENGTHS[row][1] for row in kept), default=0))


@pytest.mark.parametrize("rows", [1, [6], [-7], [True], [0.5], "ab", [[0]], None], ids=str)
def test_other_rows_are_refused(rows: Any) -> None:
    whole = drawn(LENGTHS)
    for each in (whole, correct(whole, whole.logprobs_BT)):
        with pytest.raises(ValueError, match=r"\[\.\.\.\] has 6 sequences and got .*; pass"):
            each[rows]


def test_joined_rows_are_those_of_each_and_groups_stay_apart() -> None:
    first, second = drawn(LENGTHS[:3], kv_clipped=0.1), drawn(LENGTHS[3:], 1, kv_clipped=0.3)
    both = Rollout.join([first, second[[]], second])
    assert both.tokens == first.tokens + second.tokens
    assert both.groups == [0, 0, 1, 2, 2, 3] and set(both.errors) == {1, 4}
    assert both.kv_clipped == 0.3
    assert both[3:].logprobs == second.logprobs and Rollout.join([second]) == second
    for odd in ([], [first, drawn(LENGTHS, temperature=1.0)], [first, drawn(LENGTHS, texts=None)]):
        with pytest.raises(ValueError, match=r"join: \d rollouts are of \d kinds"):
            Rollout.join(odd)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12),
    st.integers(1, 60),
)
@settings(max_examples=200, deadline=None)
def test_each_row_is_in_one_micro_batch_that_fits(
    lengths: list[tuple[int, int]], tokens: int
) -> None:
    batch = drawn(lengths)
    found = batch.micro_batches(tokens, group="local")
    assert sorted(row for rows in found for row in rows) == list(range(len(lengths)))
    longest = [max(sum(lengths[row]) for row in rows) for rows in found]
    assert longest == sorted(longest, reverse=True)
    assert all(
        len(rows) == 1 or len(rows) * most <= tokens
        for rows, most in zip(found, longest, strict=True)
    )
    # the next row would not have fitted
    for rows, most, after in zip(found, longest, found[1:], strict=False):
        assert (len(rows) + 1) * most > tokens and after


def gradient_of(batch: Rollout, rewards: torch.Tensor, kind: dict[str, Any], tokens: int) -> Any:
    """Of the loss of this process's rows, by micro-batches, and that loss."""
    model = Bigrams()
    advantages_B1 = group_advantages(batch, rewards, "dr_grpo").double()
    with torch.no_grad():
        old_BT = response_logprobs(model, batch).double() - 0.01
    correction = correct(batch, old_BT.clamp(max=0.0))
    loss = 0.0
    for rows in batch.micro_batches(tokens):
        now_BT = response_logprobs(model, batch[rows])
        each = policy_loss(now_BT.double(), advantages_B1[rows], correction[rows], **kind)
        each.backward()
        loss += each.item()
    assert model.table.grad is not None
    return model.table.grad, loss


def rewards_of(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(3)).double()


def by_hand(batch: Rollout, rewards: torch.Tensor, kind: dict[str, Any]) -> float:
    """The loss, token by token."""
    model, total, counted = Bigrams(), 0.0, []
    for row, tokens in enumerate(batch.tokens):
        if row == 1:
            continue
        group = [r for r in range(len(batch)) if batch.groups[r] == batch.groups[row] and r != 1]
        advantage = float(rewards[row] - rewards[group].mean())
        ids = [batch.prompt_tokens[row][-1], *tokens]
        steps = (model.table.detach().float() / batch.temperature).log_softmax(-1)
        now = [float(steps[a, b]) for a, b in pairwise(ids)]
        old = [min(float(torch.tensor(x) - 0.01), 0.0) for x in now]
        weights = [min(math.exp(o - r), 2.0) for o, r in zip(old, batch.logprobs[row], strict=True)]
        x = [n - o for n, o in zip(now, old, strict=True)]
        if kind.get("ratio") == "sequence":
            x = [math.fsum(x) / len(x)] * len(x)
        low, high = kind.get("clip", (0.2, 0.2))
        losses = []
        for value, weight in zip(x, weights, strict=True):
            ratio = math.exp(value)
            most = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
            losses.append(weight * (min(most, -3 * advantage) if advantage < 0 else most))
        counted.append(len(tokens))
        total += math.fsum(losses) / (len(tokens) if kind["reduce"] == "sequences" else 1)
    parts = {
        "tokens": sum(counted),
        "sequences": len(counted),
        "constant": len(counted) * kind.get("max_tokens", 0),
    }
    return total / parts[kind["reduce"]]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_loss_is_that_of_each_token_by_hand_in_any_micro_batches(kind: dict[str, Any]) -> None:
    batch, rewards = drawn(LENGTHS), rewards_of(6)
    whole, loss = gradient_of(batch, rewards, kind, tokens=1000)
    assert loss == pytest.approx(by_hand(batch, rewards, kind), abs=1e-6)  # weights are float32
    for tokens in (1, 12, 20):
        found, same = gradient_of(batch, rewards, kind, tokens)
        torch.testing.assert_close(found, whole, **EQUAL)
        assert same == pytest.approx(loss, abs=1e-12)
    wrong = gradient_of(batch, rewards.flip(0), kind, 12)[0]  # the control
    assert not torch.allclose(wrong, whole, atol=1e-6)


CUTS = {2: [0, 4, 6], 4: [0, 2, 2, 4, 6]}
"""Where the ranks' rows begin; one of four has none."""


def of_rank(rank: int, folder: Path) -> None:
    world = dist.get_world_size()
    batch, rewards = drawn(LENGTHS), rewards_of(6)
    mine = slice(*CUTS[world][rank : rank + 2])
    for index, kind in enumerate(KINDS):
        gradient, _ = gradient_of(batch[mine], rewards[mine], kind, tokens=12)
        dist.all_reduce(gradient)  # as FSDP and DDP average them
        if rank == 0:
            torch.save(gradient / world, folder / f"gradient {index}")


@pytest.mark.parametrize("world", CUTS)
def test_ranks_with_unequal_rows_have_the_gradient_of_the_whole(tmp_path: Path, world: int) -> None:
    ranks.run(of_rank, tmp_path, world, 60.0)
    for index, kind in enumerate(KINDS):
        whole, _ = gradient_of(drawn(LENGTHS), rewards_of(6), kind, tokens=1000)
        torch.testing.assert_close(torch.load(tmp_path / f"gradient {index}"), whole, **EQUAL)


def test_advantages_by_hand() -> None:
    batch = drawn(LENGTHS, groups=[0, 0, 0, 0, 1, 1])  # row 1 failed
    rewards = [1.0, math.nan, 0.0, 0.5, 2.0, 2.0]
    third = {"grpo": 0.5 / 0.5, "dr_grpo": 0.5, "rloo": 0.75}
    for kind, first in third.items():
        found = group_advantages(batch, rewards, kind)[:, 0].tolist()
        assert found == pytest.approx([first, 0.0, -first, 0.0, 0.0, 0.0], abs=1e-5)
    alone = group_advantages(batch, rewards, train_on_B=[True, *[False] * 5])
    assert not alone.any()


@pytest.mark.parametrize(
    ("rewards", "more", "fault"),
    [
        ([1.0] * 5, {}, "rewards_B is .*; pass a float64 for each of 6 sequences"),
        ([math.nan] * 6, {}, "NaN or infinite"),
        ([1.0] * 6, {"kind": "ppo"}, "kind is 'ppo'"),
        ([1.0] * 6, {"train_on_B": [True]}, "train_on_B is .*; pass a bool for each of 6"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused(
    rewards: list[float], more: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=f"group_advantages: .*({fault})"):
        group_advantages(drawn(LENGTHS), rewards, **more)


@pytest.mark.parametrize(
    "more",
    [{"train_on_B": [True]}, {"train_on_B": None, "lengths_B": [6] * 5}, {"lengths_B": [1] * 6}],
    ids=str,
)
def test_rows_that_do_not_fit_are_refused(more: dict[str, Any]) -> None:
    batch = drawn(LENGTHS)
    given = batch.logprobs_BT, batch.logprobs_BT, batch.mask_BT
    with pytest.raises(ValueError, match=r"correct: (train_on_B|lengths_B) (is|ends before)"):
        correct_logprobs(*given, **more)


def refusing_rank(rank: int, folder: Path) -> None:
    """One rank has no rows, the other one passes what cannot be used: both raise."""
    batch = drawn(LENGTHS)[:0] if rank else drawn(LENGTHS)
    with pytest.raises(ValueError, match=r"train_on_B is|other ranks refused"):
        correct(batch, batch.logprobs_BT, train_on_B=[] if rank else [True])
    found = correct(batch, batch.logprobs_BT, train_on_B=[True] * len(batch))
    assert found.tokens == sum(response for _, response in LENGTHS) and found.ranks == 2
    assert len(found) == len(batch)


def test_what_one_rank_refuses_all_refuse(tmp_path: Path) -> None:
    ranks.run(refusing_rank, tmp_path, 2, 30.0)


def test_a_rollout_brings_its_own_responses() -> None:
    batch = drawn(LENGTHS)
    for more in ({"responses": [[1]]}, {"temperature": 1.0}):
        with pytest.raises(ValueError, match="pass it alone"):
            response_logprobs(Bigrams(), batch, **more)
    with pytest.raises(ValueError, match=r"under torch.no_grad\(\)"):
        response_logprobs(Bigrams(), batch, micro_batch_tokens=9)
    with torch.no_grad():
        found = response_logprobs(Bigrams(), batch, micro_batch_tokens=9, group="local")
        assert torch.equal(found, response_logprobs(Bigrams(), batch))


@pytest.mark.parametrize(
    "kind",
    [{"reduce": "mean"}, {"ratio": "turn"}, {"reduce": "constant"}, {"max_tokens": 4}],
    ids=str,
)
def test_another_reduction_is_refused(kind: dict[str, Any]) -> None:
    batch = drawn(LENGTHS)
    with pytest.raises(ValueError, match=r"policy_loss: (reduce|ratio) is"):
        policy_loss(batch.logprobs_BT, torch.ones(6, 1), correct(batch, batch.logprobs_BT), **kind)
