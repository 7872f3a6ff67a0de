"""MLA on the CPU platform: against transformers in BF16, and what only its models do.

``test_families.py`` and ``test_updates.py`` have what they share with others.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engine import expected, models
from tests.engine.harness import EngineProcess
from tests.engine.hf_oracle import mean_difference, prompt_logprobs, scale_mla
from tests.engine.test_families import check_logprobs, score
from tests.engine.test_updates import ROLLOUT, sha256
from trainer_bridge.engines.engine_client import EngineError

pytestmark = pytest.mark.engine

BF16_ERROR = 0.07
"""Mean |logprob - transformers' in FP32|: 0.045 measured of V2, 0.035 of V3. The floor of noise:
transformers in BF16 is at 0.045 and 0.052."""


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_mla_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = models.make_checkpoint(family, tmp_path / "checkpoint")
    with EngineProcess(tmp_path / "engine.log", checkpoint, quantization=None) as engine:
        tokens, served = score(engine)
    apart, control = (
        mean_difference(served, prompt_logprobs(checkpoint, tokens, fp8=False, prepare=prepare))
        for prepare in (None, partial(scale_mla, factor=1.0))
    )
    print(f"{family}: {apart:.3f}, without YaRN's factor {control:.3f}")
    assert apart < BF16_ERROR
    assert control > 2 * BF16_ERROR  # 0.21 and 0.20 measured


def held_by(engine: EngineProcess) -> list[dict[str, str]]:
    return sha256(engine.control({"op": "digest"})["ranks"])


@pytest.mark.guarantee("quarantine", fault="NaN in what MLA absorbs")
def test_a_fault_between_updates(tmp_path: Path) -> None:
    first = models.make_checkpoint("deepseek_v2", tmp_path / "first")
    second = models.perturb(first, tmp_path / "second", seed=1)
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    no_number = torch.full_like(dict(models.named_tensors(first))[name], torch.nan)
    broken = models.with_tensors(second, tmp_path / "broken", {name: no_number})
    with EngineProcess(tmp_path / "engine.log", first) as engine:
        for version in (0, 1):
            with pytest.raises(EngineError, match=r"kv_b_proj.*NaN"):
                engine.update(broken, version)
            with pytest.raises(EngineError, match="quarantined") as refusal:
                engine.generate(ROLLOUT)
            assert refusal.value.status == 503
            engine.update(second, version)
            assert held_by(engine) == expected.digests(second, 1)


def test_a_shared_expert_that_sglang_fuses(tmp_path: Path) -> None:
    """On a GPU DeepSeek-V3's is one more routed expert, behind the others."""
    first = models.make_checkpoint("deepseek_v3", tmp_path / "first")
    second = models.perturb(first, tmp_path / "second", seed=1)
    log, fuses = tmp_path / "engine.log", {"enforce_shared_experts_fusion": True}
    with EngineProcess(log, first, **fuses) as engine:
        engine.update(second, 0)
        held, answer = held_by(engine), score(engine)
    last = models.MLA["n_routed_experts"]
    (tmp_path / "routed").mkdir()
    save_file(
        {
            name.replace("shared_experts", f"experts.{last}"): tensor
            for name, tensor in models.named_tensors(second)
        },
        tmp_path / "routed" / models.WEIGHTS,
    )
    assert held == expected.digests(tmp_path / "routed", 1)
    check_logprobs(second, *answer)


def test_an_fp8_kv_cache_is_refused(tmp_path: Path) -> None:
    checkpoint, log = models.make_checkpoint("deepseek_v2", tmp_path / "first"), tmp_path / "log"
    with (
        pytest.raises(RuntimeError, match="cannot quantize the KV cache of MLA"),
        EngineProcess(log, checkpoint, kv_cache_dtype="fp8_e4m3"),
    ):
        pass
