"""After updates, an engine holds what a fresh one of the same weights holds, byte for byte.

One engine is updated five times: from BF16, from codes and scales, and from streams. What it holds
is compared with ``expected.py`` and with fresh engines; all in one process with its trainer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import expected, models
from tests.engine.conftest import UPDATES, Policies
from tests.engine.harness import EngineProcess
from trainer_bridge import Rollout, rollout
from trainer_bridge.engines.engine_client import EngineError

pytestmark = pytest.mark.engine

UE8M0 = {"fp8rl_format": "block-fp8-ue8m0"}
full = pytest.mark.full
CASES = [  # family, ranks of tensor and of expert parallelism, options
    pytest.param(("qwen3", 1, 1, {}), id="qwen3-tp1"),
    pytest.param(("qwen3", 2, 1, {}), id="qwen3-tp2", marks=full),
    pytest.param(("qwen3_moe", 1, 1, {}), id="qwen3_moe-tp1", marks=full),
    pytest.param(("qwen3_moe", 2, 1, {}), id="qwen3_moe-tp2"),
    pytest.param(("qwen3_moe", 2, 2, {}), id="qwen3_moe-ep2"),
    pytest.param(("smollm2", 1, 1, {}), id="smollm2-tp1", marks=full),
    pytest.param(("qwen2_cut", 1, 1, {}), id="qwen2_cut-tp1", marks=full),
    pytest.param(("qwen2_cut", 2, 1, {}), id="qwen2_cut-tp2"),
    pytest.param(("qwen3_moe_ragged", 1, 1, {}), id="qwen3_moe_ragged-tp1", marks=full),
    pytest.param(("qwen3_moe_cut", 2, 1, {}), id="qwen3_moe_cut-tp2"),
    pytest.param(("deepseek_v2", 1, 1, {}), id="deepseek_v2-tp1"),
    pytest.param(("deepseek_v2", 2, 1, {}), id="deepseek_v2-tp2", marks=full),
    pytest.param(("deepseek_v3", 1, 1, {}), id="deepseek_v3-tp1", marks=full),
    pytest.param(("deepseek_v3", 2, 1, {}), id="deepseek_v3-tp2"),
    pytest.param(("qwen3_moe", 1, 1, UE8M0), id="qwen3_moe-tp1-ue8m0"),
    pytest.param(("qwen2_cut", 2, 1, UE8M0), id="qwen2_cut-tp2-ue8m0"),
    pytest.param(("qwen3_moe_cut", 2, 1, UE8M0), id="qwen3_moe_cut-tp2-ue8m0", marks=full),
]
DERIVED = ".cos_sin_cache"  # the only buffers: they depend on no weight
# One prompt at a time: SGLang's kernels round otherwise with other batches.
ROLLOUT: dict[str, Any] = {
    "input_ids": torch.randint(
        models.VOCAB, (24,), generator=torch.Generator().manual_seed(2)
    ).tolist(),
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
}
# SGLang takes no prefix from its cache where the prompt's logprobs are asked for.
SCORE = {**ROLLOUT, "logprob_start_len": 0}
PROMPTS = [[1, 2, 3], [4] * 2000, [5]]
"""The second is longer than the model's context."""
FORMS = ["bf16", "fp8", "stream", "stream", "bf16"]
"""What the trainer sends at each update."""
Digest = list[dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Snapshot:
    """What an engine holds and answers at one version."""

    digest: Digest
    logprobs: list[float]
    """Of the prompt but its first token, and of the output of two requests."""
    versions: list[int]
    cached_tokens: list[int]
    """Of the prompt, found in the prefix cache by the first request, and by the same again."""

    @classmethod
    def of(cls, engine: EngineProcess) -> "Snapshot":
        digest = engine.control({"op": "digest"})["ranks"]
        sampled, again = (engine.generate(ROLLOUT)[0]["meta_info"] for _ in range(2))
        score = engine.generate(SCORE)[0]["meta_info"]
        scored = [
            *sampled["output_token_logprobs"],
            *score["input_token_logprobs"][1:],
            *score["output_token_logprobs"],
        ]
        logprobs = [entry[0] for entry in scored]
        cached = [sampled["cached_tokens"], again["cached_tokens"]]
        return cls(digest, logprobs, sampled["policy_version"], cached)


@dataclass(frozen=True)
class Run:
    """One engine that was updated to each policy in turn."""

    checkpoints: list[Path]
    tp_size: int
    ep_size: int
    options: dict[str, str]
    formats: dict[str, list[str]]
    """Format -> the HF tensors that the engine says it keeps so."""
    snapshots: list[Snapshot]
    """At the start, and after each update."""
    rollout: Rollout
    """After the last update, of ``PROMPTS``."""

    @property
    def format(self) -> str:
        """What layers are kept in."""
        return self.options.get("fp8rl_format", "block-fp8")

    def expected(self, version: int) -> list[dict[str, str]]:
        """The digests of a version, by the oracle."""
        return expected.digests(
            *(self.checkpoints[version], self.tp_size, self.ep_size),
            power_of_two=self.format == "block-fp8-ue8m0",
        )


@pytest.fixture(scope="module", params=CASES)
def run(
    request: pytest.FixtureRequest, policies: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    family, tp_size, ep_size, options = request.param
    checkpoints = policies(family)
    log = tmp_path_factory.mktemp("updated") / "engine.log"
    with EngineProcess(log, checkpoints[0], tp_size, ep_size=ep_size, **options) as engine:
        formats = engine.control({"op": "layout"})["formats"]
        snapshots = [Snapshot.of(engine)]
        for version in range(1, UPDATES + 1):
            form = FORMS[version - 1]
            if options is UE8M0 and form == "fp8":
                form = "ue8m0"
            engine.update(checkpoints[version], version, form)
            snapshots.append(Snapshot.of(engine))
        sampled = rollout(engine, PROMPTS, {"n": 2, "max_new_tokens": 4, "ignore_eos": True})
    return Run(checkpoints, tp_size, ep_size, options, formats, snapshots, sampled)


def sha256(digest: Digest) -> list[dict[str, str]]:
    """Of each parameter, by name and rank."""
    return [
        {name: held["sha256"] for name, held in rank.items() if not name.endswith(DERIVED)}
        for rank in digest
    ]


def addresses(digest: Digest) -> list[dict[str, int]]:
    return [{name: held["address"] for name, held in rank.items()} for rank in digest]


def same_bytes(digest: Digest, wanted: list[dict[str, str]]) -> Iterator[str]:
    """The parameters, on any rank, that hold what is wanted."""
    for held, rank in zip(sha256(digest), wanted, strict=True):
        assert held.keys() == rank.keys()
        yield from (name for name, value in held.items() if value == rank[name])


@pytest.mark.guarantee("all-or-none", fault="five updates, every byte compared with an oracle")
def test_codes_and_scales_are_those_of_the_oracle(run: Run) -> None:
    for version, snapshot in enumerate(run.snapshots):
        assert sha256(snapshot.digest) == run.expected(version), f"after update {version}"


def test_the_comparison_tells_one_policy_from_the_next(run: Run) -> None:
    wanted = run.expected(UPDATES - 1)
    same = same_bytes(run.snapshots[UPDATES].digest, wanted)
    # a few scales that are powers of two may be the same ones
    rounded = "_scale_inv" if run.options is UE8M0 else None
    assert [name for name in same if rounded is None or not name.endswith(rounded)] == []
    for before, after in zip(run.snapshots, run.snapshots[1:], strict=False):
        assert before.logprobs != after.logprobs


def test_the_trainer_is_told_of_every_rank(run: Run) -> None:
    assert run.formats == {run.format: sorted(models.fp8_names(run.checkpoints[0]))}


@pytest.mark.guarantee("in-place", fault="five updates, every address compared")
def test_nothing_moved(run: Run) -> None:
    for snapshot in run.snapshots[1:]:
        assert addresses(snapshot.digest) == addresses(run.snapshots[0].digest)


@pytest.mark.guarantee("one-version", fault="requests after each of five updates")
def test_tokens_carry_their_version(run: Run) -> None:
    tokens = ROLLOUT["sampling_params"]["max_new_tokens"]
    for version, snapshot in enumerate(run.snapshots):
        # -1 is the checkpoint that the engine started with.
        assert snapshot.versions == [version or -1] * tokens


@pytest.mark.guarantee(
    "one-version", fault="a prompt whose prefix was cached under the version before"
)
def test_no_prefix_of_the_policy_before_is_used(run: Run) -> None:
    """Each version is asked the same prompt."""
    first, again = zip(*(snapshot.cached_tokens for snapshot in run.snapshots), strict=True)
    assert first == (0,) * (UPDATES + 1)
    assert min(again) > 0, "control: within a version a prefix is used"


def test_a_rollout_loses_only_the_requests_that_fail(run: Run) -> None:
    assert run.rollout.finish_reasons == ["length"] * 2 + ["error"] * 2 + ["length"] * 2
    assert run.rollout.policy_versions == [UPDATES]
    assert [error.status for error in run.rollout.errors.values()] == [400, 400]


@pytest.mark.parametrize(
    "version",
    [UPDATES, *(pytest.param(v, marks=pytest.mark.full) for v in range(1, UPDATES))],
)
def test_a_fresh_engine_is_the_same(run: Run, version: int, tmp_path: Path) -> None:
    checkpoint, log = run.checkpoints[version], tmp_path / "engine.log"
    options: dict[str, Any] = run.options
    with EngineProcess(log, checkpoint, run.tp_size, ep_size=run.ep_size, **options) as engine:
        fresh = Snapshot.of(engine)
    assert sha256(fresh.digest) == sha256(run.snapshots[version].digest)
    assert fresh.logprobs == run.snapshots[version].logprobs


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_cut"])
def test_dummy_start(family: str, policies: Policies, tmp_path: Path) -> None:
    start, *later = policies(family)
    with EngineProcess(tmp_path / "engine.log", start, 2, load_format="dummy") as engine:
        with pytest.raises(EngineError, match="started with dummy weights") as refusal:
            engine.generate(ROLLOUT)
        assert refusal.value.status == 503
        assert engine.control({"op": "layout"})["state"] == "quarantined"

        forms = ("stream", "bf16", "fp8")
        for version, (checkpoint, stream) in enumerate(zip(later, forms, strict=False)):
            engine.update(checkpoint, version, stream, announce=start)
            snapshot = Snapshot.of(engine)
            assert sha256(snapshot.digest) == expected.digests(checkpoint, 2)
            assert set(snapshot.versions) == {version}
