"""TRL's own GRPOTrainer and ``rollout`` on a fake engine: what is asked, trained on and logged."""

import functools
import math
import operator
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from examples.trl.tiny_model import END
from tests.engine.harness import ROOT
from tests.integrations.trl import tiny
from tests.integrations.trl.conftest import FakeEngine, Make
from tests.integrations.trl.tiny import steps_of
from trainer_bridge.adapters import trl as adapter
from trainer_bridge.adapters.rollouts import LOGGED
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.metrics import alarms

COUNTED = ("policy_version", "failed_completions", "update_seconds", "alarms")


def trained(
    make: Make, engine: FakeEngine, reward: Any, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """A trainer after its steps, and the batch of the last one in the order of its requests."""
    monkeypatch.setattr(tiny, "even", reward)
    trainer = make(**{"max_steps": 1} | options)
    adapter.attach(trainer, engine)
    batches = []
    score = trainer._generate_and_score_completions

    def keep(inputs: Any) -> Any:
        batches.append(score(inputs))
        return dict(batches[-1])

    trainer._generate_and_score_completions = keep
    trainer.train()
    return trainer, batches[-1]


def test_a_batch_is_what_the_engine_sampled(
    make: Make, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, batch = trained(make, engine, tiny.even, monkeypatch, max_steps=2)
    assert len(engine.prompts) == 16
    assert [p == q for p, q in zip(engine.prompts, engine.prompts[1:], strict=False)] == [
        *[True] * 7,  # a group of 8, then another prompt
        False,
        *[True] * 7,
    ]
    wanted = [[prompt[0], i, END] for i, prompt in enumerate(engine.prompts)]
    # TRL shuffles the rows after sampling
    assert sorted(batch["completion_ids"].tolist()) == sorted(wanted)
    assert batch["sampling_per_token_logps"].tolist() == [[-6.0, -7.0, -8.0]] * 16
    assert engine.sampling["max_new_tokens"] == 16
    assert engine.sampling["stop_token_ids"] == [END] and engine.sampling["no_stop_trim"]
    assert (engine.sampling["top_p"], engine.sampling["temperature"]) == (1.0, 1.0)
    for step, row in enumerate(steps_of(trainer)):
        assert row["fp8rl/policy_version"] == step
        assert row["fp8rl/update_seconds"] == 0.5
        # -6, -7, -8 beside a policy of 512 words that are almost equally likely
        assert row["fp8rl/mismatch_kl_k3"] > 0.1 and row["fp8rl/ess"] < 0.9
        assert row["sampling/importance_sampling_ratio/max"] == 2.0
        assert row["fp8rl/alarms"] == 0  # of too few tokens to judge


def test_a_reporter_has_what_is_logged(train: Make, tmp_path: Path) -> None:
    """TensorBoard's event files, read back: every number of training and of evaluation."""
    trainer = train(max_steps=2, report_to="tensorboard", per_device_eval_batch_size=8)
    trainer.evaluate(trainer.train_dataset.select(range(1)))
    (folder,) = {file.parent for file in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder)).Reload()
    found = {
        (tag, event.step): event.value
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
        if "/fp8rl/" in tag
    }
    *steps, evaluation = (row for row in trainer.state.log_history if "train_loss" not in row)
    logged = [(f"train/{name}", row["step"], row[name]) for row in steps for name in row]
    logged += [
        (name.replace("_", "/", 1), evaluation["step"], evaluation[name]) for name in evaluation
    ]
    wanted = {(tag, step): value for tag, step, value in logged if "/fp8rl/" in tag}
    assert found == pytest.approx(wanted)
    assert {tag for tag, step in found if step == 1} == {
        f"train/fp8rl/{name}" for name in (*COUNTED, *LOGGED)
    }
    assert found["train/fp8rl/policy_version", 2] == 1.0
    assert found["eval/fp8rl/policy_version", 2] == 2.0


def test_alarms_are_logged_and_warn_once(
    train: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same logprobs, of enough tokens."""
    monkeypatch.setattr(alarms, "_announced", set())
    sequences = alarms.MIN_TOKENS // 3 + 1
    trainer = train(max_steps=2, per_device_train_batch_size=8 * -(-sequences // 8))
    assert [row["fp8rl/alarms"] > 0 for row in steps_of(trainer)] == [True, True]
    (warning,) = (m for m in caplog.messages if m.startswith("mismatch_kl_k3"))
    assert "rollout and trainer are not the same policy" in warning


def test_versions_grow_where_steps_begin_again(train: Make, engine: FakeEngine) -> None:
    trainer = train()
    for version in range(3):
        assert engine.version == version
        # transformers loads the best checkpoint at the end, without another step
        assert trainer._last_loaded_step != trainer.state.global_step
        trainer.train()


def test_an_evaluation_samples_from_the_weights_of_its_step(
    train: Make, engine: FakeEngine
) -> None:
    trainer = train(max_steps=2, num_generations_eval=4, per_device_eval_batch_size=4)
    metrics = trainer.evaluate(trainer.train_dataset.select(range(1)))
    assert engine.version == 2 and len(engine.prompts) == 4
    assert metrics["eval_reward"] > 0
    assert trainer.state.log_history[-1]["eval_fp8rl/policy_version"] == 2


def test_the_subclass_has_one_more_argument(make: Make, engine: FakeEngine) -> None:
    stock = make(max_steps=1)
    trainer = adapter.GRPOTrainer(
        model=stock.model,
        reward_funcs=tiny.even,
        args=stock.args,
        train_dataset=stock.train_dataset,
        processing_class=stock.processing_class,
        engine=engine,
    )
    trainer.train()
    assert engine.version == 0
    assert steps_of(trainer)[0]["fp8rl/policy_version"] == 0


def of_two_ranks(rank: int, monkeypatch: pytest.MonkeyPatch, sent: Any) -> Any:
    """The adapter on one of two ranks, to which rank 0 sends ``sent``."""

    def receive(box: list[Any]) -> None:
        box[0] = sent

    monkeypatch.setattr(adapter, "gather_object", lambda prompts: [*prompts, *prompts])
    monkeypatch.setattr(adapter, "broadcast_object_list", receive)
    accelerator = SimpleNamespace(is_main_process=False, process_index=rank, num_processes=2)
    return adapter.EngineGeneration(SimpleNamespace(accelerator=accelerator), None)


def test_each_rank_takes_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [[1], [2], [3], [4]], [[-1.0], [-2.0], [-3.0], [-4.0]], []
    for rank, tokens in enumerate([[[1], [2]], [[3], [4]]]):
        generation = of_two_ranks(rank, monkeypatch, sent)
        prompts, completions, logprobs, _ = generation.generate([[5], [5]], None, 2)
        assert prompts == [[5], [5]] and completions == tokens
        assert logprobs == [[[-float(token)] for token in row] for row in tokens]


def test_a_failure_of_rank_0_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = of_two_ranks(1, monkeypatch, EngineError("the engine has gone"))
    with pytest.raises(EngineError, match="has gone"):
        generation.generate([[5], [5]], None, 2)


def failed(index: int, reply: dict[str, Any]) -> Any:
    return EngineError("request 3 is too long", 400) if index == 3 else reply


def spoil(*path: Any, value: Any) -> Any:
    """An edit of one part of reply 3."""

    def edit(index: int, reply: dict[str, Any]) -> Any:
        if index == 3:
            *parents, last = path
            functools.reduce(operator.getitem, parents, reply)[last] = value
        return reply

    return edit


aborted = spoil("meta_info", "finish_reason", value={"type": "abort"})
empty = spoil("output_ids", value=[])
mixed = spoil("meta_info", "policy_version", 2, value=1)
nan = spoil("meta_info", "output_token_logprobs", 1, 0, value=math.nan)


@pytest.mark.parametrize("edit", [failed, aborted, empty, mixed, nan])
def test_a_completion_that_failed_is_left_out_of_baseline_and_loss(
    edit: Any, make: Make, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its group have equal rewards, and so no advantage."""

    def equal(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [1.0 if len(ids) == 3 else -5.0 for ids in completion_ids]

    engine.edit = edit
    trainer, batch = trained(make, engine, equal, monkeypatch)
    (row,) = steps_of(trainer)
    assert row["fp8rl/failed_completions"] == 1
    assert row["reward"] == 1.0 and batch["advantages"].tolist() == [0.0] * 16
    assert batch["completion_mask"].sum(1).tolist() == [3, 3, 3, 0] + [3] * 12
    assert batch["num_items_in_batch"] == 45
    assert row["fp8rl/policy_version"] == 0 and row["fp8rl/ess"] < 0.9


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_what_stands_for_a_failed_completion_does_not_move_the_policy(
    loss_type: str, make: Make, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reward function makes of it."""

    def weights(of_failed: float) -> dict[str, Any]:
        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            return [ids[1] % 2 if len(ids) == 3 else of_failed for ids in completion_ids]

        engine.run, engine.version = "", -1
        trainer, _ = trained(make, engine, reward, monkeypatch, loss_type=loss_type, beta=0.1)
        return tiny.weights_of(trainer)

    engine.edit = failed
    assert tiny.same(weights(1.0), weights(-100.0))


def test_a_group_whose_prompt_is_refused_is_left_out(
    make: Make, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is longer than the context."""
    engine.edit = lambda i, reply: EngineError("too long", 400) if i < 8 else reply
    trainer, batch = trained(make, engine, tiny.even, monkeypatch)
    assert steps_of(trainer)[0]["fp8rl/failed_completions"] == 8
    assert batch["advantages"][:8].tolist() == [0.0] * 8
    assert batch["completion_mask"].sum(1).tolist() == [0] * 8 + [3] * 8
    assert all(bool(weight.isfinite().all()) for weight in tiny.weights_of(trainer).values())


def test_where_all_fail_training_ends(make: Make, engine: FakeEngine) -> None:
    trainer = make()
    adapter.attach(trainer, engine)
    engine.edit = lambda index, reply: EngineError(f"request {index} is too long", 400)
    with pytest.raises(EngineError, match="request 0 is too long"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (failed, "too long"),
        (aborted, "1 of 16 requests were aborted"),
        (empty, "1 of 16 requests were aborted or have no tokens"),
        (mixed, "reply 3 has version 1 of run .*, not the expected version 0"),
    ],
)
def test_a_rollout_func_has_all_completions_or_an_error(
    edit: Any, message: str, make: Make, engine: FakeEngine
) -> None:
    """Which of its requests a row of the batch comes from is not known."""
    trainer = make()
    adapter.attach(trainer, engine)

    def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = trainer.processing_class(prompts)["input_ids"]
        _, completions, logprobs, _ = trainer.vllm_generation.generate(ids, None, 8)
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[each[0] for each in row] for row in logprobs],
        }

    trainer.rollout_func = sample
    engine.edit = edit
    with pytest.raises((RuntimeError, ValueError), match=message):
        trainer.train()
    assert trainer.state.global_step == 0


def test_harmless_generation_kwargs_are_sent(train: Make, engine: FakeEngine) -> None:
    train(generation_kwargs={"max_new_tokens": 5, "ignore_eos": True})
    assert engine.sampling["max_new_tokens"] == 5 and engine.sampling["ignore_eos"]


def test_without_correction_only_the_version_is_logged(train: Make) -> None:
    (row,) = steps_of(train(vllm_importance_sampling_correction=False))
    assert row["fp8rl/policy_version"] == 0 and "fp8rl/ess" not in row


def test_a_batch_of_truncated_completions_is_accepted(train: Make, engine: FakeEngine) -> None:
    def cut(index: int, reply: dict[str, Any]) -> Any:
        meta = reply["meta_info"]
        meta["finish_reason"] = {"type": "length"}
        for name in ("output_token_logprobs", "policy_version", "policy_run"):
            meta[name] = meta[name][:2]
        return reply | {"output_ids": reply["output_ids"][:2]}

    engine.edit = cut
    assert "fp8rl/ess" not in steps_of(train(mask_truncated_completions=True))[0]


def test_without_trl_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['trl'] = None\nimport trainer_bridge.adapters.trl"
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    last = child.stderr.strip().splitlines()[-1]
    assert child.returncode != 0
    assert last.startswith("ImportError: trainer_bridge.adapters.trl")
    assert "run pip install 'trl>=1.16'" in last


# -- refused before anything is sampled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_structured_outputs_regex": "a+"}, "regex"),
        ({"generation_kwargs": {"frequency_penalty": 0.5}}, "frequency_penalty"),
        ({"generation_kwargs": {"n": 2}}, "num_generations"),
        ({"generation_kwargs": {"temperature": 0.6}}, "temperature of the GRPOConfig"),
        ({"generation_kwargs": {"beam_width": 2}}, "beam_width"),
        ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, "vespo"),
    ],
)
def test_options_without_usable_logprobs_are_refused(
    options: dict[str, Any], message: str, make: Make
) -> None:
    trainer = make(**options)
    with pytest.raises(ValueError, match=message):
        adapter.attach(trainer, "http://127.0.0.1:1")
    assert not trainer.use_vllm and not hasattr(trainer, "vllm_generation")


def test_trainers_that_cannot_work_are_refused(make: Make, engine: FakeEngine) -> None:
    with pytest.raises(ValueError, match="not a trl"):
        adapter.attach(object(), engine)
    trainer = make()
    adapter.attach(trainer, engine)
    with pytest.raises(ValueError, match="attach once"):
        adapter.attach(trainer, engine)
    for spoil, message in (
        (lambda t: setattr(t, "_is_vlm", True), "vision"),
        (lambda t: setattr(t._dist, "fsdp_version", 1), "FSDP1"),
        (lambda t: setattr(t._dist, "zero_stage", 3), "ZeRO-3"),
        (lambda t: t.model.register_parameter("codes", int8()), "quantized"),
        (lambda t: delattr(t, "_metrics"), r"no _metrics; .*'trl=="),
    ):
        trainer = make()
        spoil(trainer)
        with pytest.raises(ValueError, match=message):
            adapter.attach(trainer, engine)


def int8() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
