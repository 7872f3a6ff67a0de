"""TRL's own GRPOTrainer on a real engine: versions, logprobs, ranks, adapters."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.engine import expected, models
from tests.engine.harness import FORKED, ROOT, START_TIMEOUT_S, Server, end_group, tail
from tests.integrations.trl import tiny
from tests.integrations.trl.conftest import Make
from tests.integrations.trl.tiny import (
    LORA,
    is_merged,
    merged_by_hand,
    same,
    steps_of,
    weights_of,
)
from trainer_bridge import Rollout, UpdateResult
from trainer_bridge.adapters import trl as adapter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(START_TIMEOUT_S + 120)]

FAST_LR = 1e-2
"""One step of this moves the policy by far more than FP8 does."""
MEAN_DIFFERENCE = 0.05
"""Of |trainer's logprob - engine's|, a batch: FP8 0.029 at most; with weights a step old, 0.4."""
ADAPTED_DIFFERENCE = 0.1
"""The same where adapters are as large as the weights: merged 0.052 at most, not merged 0.39."""
RANKS_TIMEOUT_S = 400


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(log, FORKED, checkpoint) as running:
        yield running


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> tuple[list[UpdateResult], list[Rollout]]:
    """The updates and rollouts of the adapter, as they happen."""
    updates: list[UpdateResult] = []
    rollouts: list[Rollout] = []

    def keeping(kept: list[Any], call: Any) -> Any:
        def called(*args: Any, **keywords: Any) -> Any:
            kept.append(call(*args, **keywords))
            return kept[-1]

        return called

    monkeypatch.setattr(adapter, "update", keeping(updates, adapter.update))
    monkeypatch.setattr(adapter, "rollout", keeping(rollouts, adapter.rollout))
    return updates, rollouts


def differences(steps: list[dict[str, float]]) -> list[float]:
    """TRL's own measure: the mean of |its logprob - the engine's|, a step."""
    return [row["sampling/sampling_logp_difference/mean"] for row in steps]


def test_each_batch_comes_from_its_steps_weights(
    server: Server, make: Make, calls: tuple[list[UpdateResult], list[Rollout]]
) -> None:
    trainer = make(learning_rate=FAST_LR, max_steps=4)
    adapter.attach(trainer, server.address)
    trainer.train()
    updates, rollouts = calls
    assert [u.version for u in updates] == [0, 1, 2, 3]
    assert [r.policy_versions for r in rollouts] == [[0], [1], [2], [3]]
    assert {run for r in rollouts for row in r.runs for run in row} == {u.run for u in updates}
    assert [row["fp8rl/policy_version"] for row in steps_of(trainer)] == [0, 1, 2, 3]
    assert max(differences(steps_of(trainer))) < MEAN_DIFFERENCE
    assert all(row["fp8rl/ess"] > 0.9 for row in steps_of(trainer))


def test_stale_weights_are_seen(server: Server, make: Make) -> None:
    """The control of the test above."""
    trainer = make(learning_rate=FAST_LR, max_steps=4)
    adapter.attach(trainer, server.address)
    sync, synced = trainer.vllm_generation.sync_weights, []

    def once() -> None:
        if not synced:
            synced.append(sync())

    trainer.vllm_generation.sync_weights = once
    trainer.train()
    first, *later = differences(steps_of(trainer))
    assert first < MEAN_DIFFERENCE
    assert max(later) > MEAN_DIFFERENCE


def test_a_resumed_trainer_goes_on_at_its_step(
    server: Server, make: Make, calls: tuple[list[UpdateResult], list[Rollout]]
) -> None:
    first = make(max_steps=2, save_strategy="steps", save_steps=2)
    adapter.attach(first, server.address)
    first.train()
    resumed = make(max_steps=3)
    adapter.attach(resumed, server.address)
    resumed.train(resume_from_checkpoint=str(Path(first.args.output_dir, "checkpoint-2")))
    updates, rollouts = calls
    assert [u.version for u in updates] == [0, 1, 2]
    assert [r.policy_versions for r in rollouts] == [[0], [1], [2]]
    assert updates[1].run != updates[2].run
    assert differences(steps_of(resumed))[-1] < MEAN_DIFFERENCE


def test_an_engine_holds_the_merged_weights(server: Server, make: Make, tmp_path: Path) -> None:
    trainer = make(peft_config=LORA, max_steps=2, learning_rate=FAST_LR)
    adapter.attach(trainer, server.address)
    base = {name: t for name, t in weights_of(trainer).items() if ".lora_" not in name}
    trainer.train()
    trainer.vllm_generation.sync_weights()
    after = weights_of(trainer)
    assert same({name: after[name] for name in base}, base) and not is_merged(trainer)
    merged = tmp_path / "merged"
    merged.mkdir()
    save_file(merged_by_hand(trainer), merged / models.WEIGHTS)
    (wanted,) = expected.digests(merged, 1)
    (held,) = server.control({"op": "digest"})["ranks"]
    assert {name: held[name]["sha256"] for name in wanted} == wanted
    assert max(differences(steps_of(trainer))) < ADAPTED_DIFFERENCE


def test_adapters_that_are_not_merged_are_seen(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests with adapters."""
    trainer, update = make(peft_config=LORA, max_steps=1), adapter.update

    def without(model: Any, *args: Any, **keywords: Any) -> UpdateResult:
        with model.disable_adapter():
            return update(model, *args, **keywords)

    monkeypatch.setattr(adapter, "update", without)
    adapter.attach(trainer, server.address)
    trainer.train()
    assert differences(steps_of(trainer))[0] > ADAPTED_DIFFERENCE


def train_on_two_ranks(
    server: Server, checkpoint: Path, folder: Path, environment: dict[str, str], **options: Any
) -> dict[str, Any]:
    """What rank 0 logged (``tiny.main``)."""
    folder.mkdir()
    log = folder / "log"
    line = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.integrations.trl.tiny"),
        *(str(checkpoint), server.address, str(folder), json.dumps(options)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            env=os.environ | {"ACCELERATE_USE_CPU": "true"} | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = process.wait(RANKS_TIMEOUT_S)
        finally:
            end_group(process.pid)
            process.wait()
    assert status == 0, tail(log)
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.timeout(RANKS_TIMEOUT_S + START_TIMEOUT_S + 60)
@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "sharding",
    [pytest.param({}, marks=pytest.mark.full, id="ddp"), pytest.param(tiny.FSDP2, id="fsdp2")],
)
def test_ranks_learn(
    sharding: dict[str, str], lora: bool, server: Server, checkpoint: Path, tmp_path: Path
) -> None:
    options = {"max_steps": 3 if lora else 12, "learning_rate": FAST_LR, "lora": lora}
    result = train_on_two_ranks(server, checkpoint, tmp_path / "ranks", sharding, **options)
    assert result["sharded"] == bool(sharding) and result["kept"]
    assert (result["wrapper"] == "DistributedDataParallel") is not result["sharded"]
    steps = result["steps"]
    assert [row["fp8rl/policy_version"] for row in steps] == list(range(options["max_steps"]))
    if lora:
        assert max(differences(steps)) < ADAPTED_DIFFERENCE
        return
    # of all steps: where the policy is sharp, few tokens have made 0.07 of one
    assert fmean(differences(steps)) < MEAN_DIFFERENCE
    rewards = [row["reward"] for row in steps]
    # 0.49 and 0.48, 1.00 and 1.00 in each of seven runs
    assert max(rewards[:2]) < 0.6
    assert min(rewards[-2:]) > 0.8
