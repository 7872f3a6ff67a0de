"""examples/verl, and the runs that ``benchmarks.verl_trainer`` makes of it."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from benchmarks import verl_trainer
from sgl_fp8rl.integrations.verl.rollout_config import check, is_ours

EXAMPLE = verl_trainer.ROOT / "examples" / "verl"


def configuration(overrides: list[str]) -> Any:
    with initialize_config_dir(str(EXAMPLE), version_base=None):
        return compose("fp8rl", overrides=overrides)


def of(arm: str) -> Any:
    """The configuration of a run."""
    return configuration(verl_trainer.overrides(arm, 2, 20, 0, Path("folder")))


def test_the_example_is_a_configuration_with_our_key() -> None:
    rollout = omega_conf_to_dataclass(configuration([]).actor_rollout_ref.rollout)
    assert is_ours(rollout)
    check(rollout)


def test_arms_differ_in_their_keys_only() -> None:
    keys = {"fp8rl": ("fp8rl", "fp8_e4m3"), "bf16": (None, None), "stock-fp8": ("fp8", None)}
    rest = []
    for arm in verl_trainer.ARMS:
        whole = of(arm)
        rollout = whole.actor_rollout_ref.rollout
        OmegaConf.set_struct(whole, False)
        found = (
            rollout.pop("quantization"),
            rollout.engine_kwargs.sglang.pop("kv_cache_dtype", None),
        )
        assert found == keys[arm]
        rest.append(OmegaConf.to_container(whole))
    assert rest[0] == rest[1] == rest[2]


def test_verl_reads_the_policy_and_the_prompts(tmp_path: Path) -> None:
    verl_trainer.prepare(tmp_path, 0, 4, {})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    config = configuration([]).data
    prompts = RLHFDataset(str(tmp_path / "prompts.parquet"), tokenizer, config)
    assert len(prompts) == 4
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen3")
    assert builder.build_initial_tokens(prompts[2]["raw_prompt"]) == [16, 17, 18, 19]
    words = tokenizer.decode([1, 2, 509, 508, 510, 511], skip_special_tokens=True)
    assert verl_trainer.even(words) == pytest.approx(2 / 3)
