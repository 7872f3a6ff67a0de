"""examples/verl, its command in the docs, and what ``main_ppo`` prepares."""

import os
import shlex
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

pytest.importorskip("verl")

import datasets
from hydra import compose, initialize_config_dir
from transformers import AutoTokenizer
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score

from sgl_fp8rl.verl.rollout_config import check, hand_over, is_ours
from sgl_fp8rl.verl.trainer import Trainer
from tests.integrations.verl import main_ppo
from tests.integrations.verl.main_ppo import EXAMPLE

PAGE = (main_ppo.ROOT / "docs" / "frameworks.md").read_text()
COMMAND = "python -m verl.trainer.main_ppo --config-path=$PWD/examples/verl --config-name=fp8rl"
FILES = {part: f"gsm8k-{part}.parquet" for part in ("train", "test")}


def configuration(overrides: list[str]) -> Any:
    with initialize_config_dir(str(EXAMPLE), version_base=None):
        return compose("fp8rl", overrides=overrides)


def documented(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of the command in the docs, in the repository's folder."""
    monkeypatch.setenv("PWD", "/clone")
    command = PAGE[PAGE.index(COMMAND) + len(COMMAND) :].partition("\n\n")[0]
    return shlex.split(os.path.expandvars(command.replace("\\\n", " ")))


def accept(whole: Any) -> Any:
    """What verl's ``main`` does with a configuration, and our server with its rollout."""
    validate_config(whole, need_reference_policy(whole), need_critic(whole))
    rollout = whole.actor_rollout_ref.rollout
    assert whole.trainer.n_gpus_per_node % rollout.tensor_model_parallel_size == 0
    config = omega_conf_to_dataclass(rollout)
    assert is_ours(config)
    check(config)
    hand_over(config)
    return config


def test_the_documented_command_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = documented(monkeypatch)
    assert overrides == [
        "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B",
        f"data.train_files=/clone/{FILES['train']}",
        f"data.val_files=/clone/{FILES['test']}",
    ]
    whole = configuration(overrides)
    assert get_trainer_cls(whole.trainer.v1.trainer_mode) is Trainer  # it logs fp8rl/*
    sglang = accept(whole).engine_kwargs["sglang"]
    assert sglang == {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8rl"}


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null", "ppo_micro_batch_size"),
        ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=null", "log_prob_micro"),
        ("actor_rollout_ref.rollout.quantisation=fp8rl", "quantisation"),
        ("data.train_batch_size=16", "must be >= actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.rollout.top_p=0.9", "top_p=0.9"),
    ],
)
def test_what_verl_or_our_server_refuses_is_seen(override: str, error: str) -> None:
    """verl has no default of the first two."""
    with pytest.raises(Exception, match=error):
        accept(configuration([override]))


def test_the_documented_snippet_writes_what_verl_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gsm8k has two columns; the last words of an answer are the solution."""
    answers = ["2 + 2 = <<2+2=4>>4\n#### 4", "1,000 + 1\n#### 1,001"]
    rows = [{"question": "how many?", "answer": answer} for answer in answers]

    def load(name: str, subset: str, split: str) -> Any:
        assert (name, subset) == ("openai/gsm8k", "main") and split in FILES
        return datasets.Dataset.from_list(rows)

    snippet = dedent(PAGE.partition("python - <<'END'\n")[2].partition("    END\n")[0])
    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", load)
        patched.chdir(tmp_path)
        exec(snippet, {})
    main_ppo.tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    for name in FILES.values():
        prompts = RLHFDataset(str(tmp_path / name), tokenizer, configuration([]).data)
        assert len(prompts) == len(rows)
        for i, answer in enumerate(answers):
            row = prompts[i]
            assert "how many?" in row["raw_prompt"][0]["content"]
            truth = row["reward_model"]["ground_truth"]
            assert default_compute_score(row["data_source"], answer, truth) == 1.0
            assert default_compute_score(row["data_source"], "#### 5", truth) == 0.0
