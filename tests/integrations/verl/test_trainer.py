"""verl's whole trainer on this CPU: ``verl.trainer.main_ppo`` with the example's configuration.
Names of metrics are verl's.

``verl_cpu`` says what differs from a run on GPUs. A run that fails shows its log's end.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from tests.integrations.verl import gloo, main_ppo

STEPS = 3
LEARNING_RATE = 1e-2
MOVED = 0.05
"""Nats of the policy's entropy, in three steps; 0.16 was measured."""
FP8_KL = 0.01
"""Nats; 0.0003 to 0.0006 were measured."""
END_S = 60.0
"""Ray's processes end after the one that started them."""
# of two runs: a test's own and that of its fixture
pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * (main_ppo.LIMIT_S + 2 * END_S))]

LORA = [
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=1024",
    "actor_rollout_ref.model.lora.merge=True",
    "actor_rollout_ref.actor.ppo_epochs=2",
]
"""So large a factor that a pass moves the policy far; the second pass over a batch logs how far."""
BEHIND = 20
"""Times the mismatch; 240 to 550 were measured."""
K3 = "rollout_corr/k3_kl"
ENTROPY = "rollout_corr/training_log_ppl"
Steps = list[dict[str, Any]]
"""The metrics of each step."""


def run(arm: str, ranks: int, steps: int, *more: str) -> tuple[str | None, Steps]:
    """The failure, if there is one, and what verl logged; no process is left."""
    with run_folder() as folder:
        rate = f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}"
        failure = main_ppo.run(arm, ranks, steps, folder, rate, *more)
        deadline = time.monotonic() + END_S
        while left := processes_of(folder):
            assert time.monotonic() < deadline, f"processes {left} are left; {failure}"
            time.sleep(0.2)
        logged = folder / main_ppo.METRICS
        lines = logged.read_text().splitlines() if logged.exists() else []
        return failure, [json.loads(line)["data"] for line in lines]


@contextmanager
def run_folder() -> Iterator[Path]:
    """On a short path, as Ray's sockets need it; at the end, what the run left behind is ended."""
    folder = Path(tempfile.mkdtemp(prefix="verl", dir="/tmp"))
    try:
        yield folder
    finally:
        for process in processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> list[int]:
    """Those that inherited the environment of the folder's run."""
    mark = f"VERL_FILE_LOGGER_PATH={folder}/".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def trained(arm: str, ranks: int, steps: int, *more: str, after: int = 0, behind: int = 0) -> Steps:
    """Each step's tokens are of the policy of that step, or a few behind, and teach the next one.

    Args:
        after: steps of the run whose checkpoint this one starts from.
        behind: by how many policies tokens may be older.
    """
    last = after + steps
    failure, logged = run(arm, ranks, steps, f"trainer.total_training_steps={last}", *more)
    assert failure is None, failure
    assert [step["training/global_step"] for step in logged] == list(range(after + 1, last + 1))
    oldest = "training/off_policy/trajectory_staleness_worst/max"
    assert all(step[oldest] <= behind and step["actor/grad_norm"] > 0 for step in logged)
    return logged


def assert_engine_follows(steps: Steps) -> None:
    """The policy changes, and rollouts stay as near to it as FP8 lets them."""
    first, *_, last = (step[ENTROPY] for step in steps)
    assert abs(last - first) > MOVED
    assert all(0 < step[K3] < FP8_KL for step in steps)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def fp8(checkpoints: Path) -> Steps:
    """It leaves a checkpoint of its last step."""
    kept = f"trainer.default_local_dir={checkpoints}"
    return trained("fp8", 1, STEPS, kept, f"trainer.save_freq={STEPS}")


def test_rollouts_follow_the_trainer(fp8: Steps) -> None:
    assert_engine_follows(fp8)


def test_two_ranks_feed_two_ranks() -> None:
    """FSDP2 and TP 2; between its turns, verl keeps the parameters on the CPU."""
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    assert_engine_follows(trained("fp8", 2, STEPS, offload))


def test_a_resumed_run_goes_on(fp8: Steps, checkpoints: Path) -> None:
    """Its first rollout is of the checkpoint's policy, as the version of the last step."""
    kept = f"trainer.default_local_dir={checkpoints}"
    resumed = trained("fp8", 1, STEPS, kept, "trainer.resume_mode=auto", after=STEPS)
    assert all(0 < step[K3] < FP8_KL for step in resumed)
    assert abs(resumed[0][ENTROPY] - fp8[0][ENTROPY]) > MOVED


@pytest.fixture(scope="module")
def bf16_lora() -> Steps:
    """An adapter is trained, which adds nothing in the first step."""
    return trained("bf16", 1, STEPS, *LORA)


def test_rollouts_are_fp8(fp8: Steps, bf16_lora: Steps) -> None:
    """BF16 rollouts of the same policy are nearer to the trainer: the control."""
    assert 0 < 2 * bf16_lora[0][K3] < fp8[0][K3]


def test_rollouts_follow_an_adapter(bf16_lora: Steps) -> None:
    """The entropy does not tell: adapters are not of the head. An engine that stayed behind would
    be a pass or more away from the trainer."""
    assert all(0 < BEHIND * step[K3] < step["actor/ppo_kl"] for step in bf16_lora)


def test_each_step_logs_our_metrics_and_alarms(fp8: Steps) -> None:
    """The example asks for it."""
    for step in fp8:
        assert step["fp8rl/mismatch_kl_k3"] == pytest.approx(step[K3], rel=0.01)
        assert step["fp8rl/alarms"] == 0


def test_a_checkpoint_engine_feeds_a_replica_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's asynchronous trainer, whose rollouts are a policy behind: tokens of its third step are
    of the second policy or a newer one, so updates after the first arrived."""
    # else a line that verl 0.9.1 logs without hybrid replicas is an error of its own
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")
    separate = (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={gloo.BACKEND}",
        f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={gloo.__name__}",
        "actor_rollout_ref.rollout.free_cache_engine=True",
        "ray_kwargs.ray_init.num_gpus=2",
    )
    steps = trained("fp8", 1, 3, *separate, behind=1)
    assert len({step["rollout_corr/training_log_ppl"] for step in steps}) == 3


def test_a_refusal_of_the_server_ends_the_run() -> None:
    failure, steps = run("fp8", 1, 1, "actor_rollout_ref.rollout.top_p=0.9")
    assert failure is not None and "top_p=0.9" in failure
    assert steps == []
