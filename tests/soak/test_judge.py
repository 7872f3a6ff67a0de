"""The judge passes what a policy samples, and finds what another has a part in."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.policies import Tensors, write_checkpoint
from tests.logprob_oracle import Reference, Sampled
from tests.soak.judge import Judge, ViolationError
from tests.soak.settings import SETTINGS, draw

SETTING = SETTINGS["cpu"]
OLD, NEW = 1, 2
"""Versions; policies 0 and 1."""
SEQUENCES, PROMPT, TOKENS = 6, 8, 16


@pytest.fixture(scope="module")
def policies() -> list[Tensors]:
    return [draw(SETTING.shape, seed, "cpu") for seed in range(2)]


@pytest.fixture(scope="module")
def config(policies: list[Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "0"
    return write_checkpoint(SETTING.shape, policies[0], folder)


@pytest.fixture(scope="module")
def references(config: Path, policies: list[Tensors]) -> list[Reference]:
    return [Reference(config, policy) for policy in policies]


@pytest.fixture
def judge(references: list[Reference]) -> Judge:
    made = Judge(references, SETTING.token_bound, SETTING.segment_bound)
    made.policies.update({OLD: 0, NEW: 1})
    return made


def sample(policy_at: Callable[[int], Reference], versions: list[int]) -> list[Sampled]:
    """Sequences, the token at each place sampled by the policy for it, with these versions."""
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(SETTING.shape.vocabulary, (SEQUENCES, PROMPT), generator=random)
    logprobs = []
    for n in range(TOKENS):
        logprobs_BV = policy_at(n).next_logprobs(rows)
        chosen_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=random)
        logprobs.append(logprobs_BV.gather(1, chosen_B1))
        rows = torch.cat([rows, chosen_B1], 1)
    logprobs_BT = torch.cat(logprobs, 1)
    return [
        Sampled(row[:PROMPT].tolist(), row[PROMPT:].tolist(), given.tolist(), versions)
        for row, given in zip(rows, logprobs_BT, strict=True)
    ]


def test_one_version(judge: Judge, references: list[Reference]) -> None:
    judge.check(sample(lambda n: references[1], [NEW] * TOKENS))
    found = judge.summary()
    assert found["largest"] < 0.5
    assert found["control told apart"] > 0.8
    assert judge.tokens == SEQUENCES * TOKENS and judge.mixed_sequences == 0


def test_a_version_that_took_over(judge: Judge, references: list[Reference]) -> None:
    half = TOKENS // 2
    versions = [OLD] * half + [NEW] * (TOKENS - half)
    judge.check(sample(lambda n: references[n >= half], versions))
    assert judge.mixed_sequences == SEQUENCES
    assert judge.summary()["largest"] < 0.5
    with pytest.raises(ViolationError):
        judge.check(sample(lambda n: references[n >= half + 4], versions))


def test_one_token_of_another_policy(judge: Judge, references: list[Reference]) -> None:
    """Of each sequence; most of them show it."""
    found = 0
    for sampled in sample(lambda n: references[n != 5], [NEW] * TOKENS):
        try:
            judge.check([sampled])
        except ViolationError:
            found += 1
    assert found > SEQUENCES / 2


@pytest.mark.parametrize(
    "stale",
    [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_one_stale_tensor(judge: Judge, config: Path, policies: list[Tensors], stale: str) -> None:
    mixed = Reference(config, {**policies[1], stale: policies[0][stale]})
    with pytest.raises(ViolationError, match="their logprobs are not its policy's"):
        judge.check(sample(lambda n: mixed, [NEW] * TOKENS))
    assert judge.mixed_tokens > 0


@pytest.mark.parametrize("versions", [[7] * TOKENS, [NEW] * (TOKENS - 1) + [OLD]])
def test_wrong_versions(judge: Judge, references: list[Reference], versions: list[int]) -> None:
    (sampled, *_) = sample(lambda n: references[1], [NEW] * TOKENS)
    with pytest.raises(ViolationError, match="versions are"):
        judge.check([replace(sampled, versions=versions)])
