"""The keywords that every arm gives to ``sglang.Engine``."""

import inspect
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_tail, rollout, update
from benchmarks.engines import models
from benchmarks.engines.keywords import is_stock


def keywords() -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Name and keywords of each engine, and whether its job runs SGLang without the plugin."""
    for job in update.BENCHMARK.jobs:
        yield job.name, job.stock, update.COMMON | job.spec.engine
    for job in (*rollout.DENSE.jobs, *rollout.MOE.jobs, *rollout.ON_TWO_GPUS.jobs):
        yield job.name, job.stock, job.spec.keywords(batches=(64, 32))
    for job in long_tail.BENCHMARK.jobs:
        yield job.name, job.stock, job.spec.keywords(largest=1024)


@pytest.mark.filterwarnings("ignore")
def test_sglang_and_we_know_all_keywords() -> None:
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs

    from server_args import Fp8RLServerArgs
    from sgl_fp8rl.engine.attention import backends

    known = set(inspect.signature(ServerArgs).parameters)
    for name, stock, given in keywords():
        ours = {key.removeprefix("fp8rl_"): v for key, v in given.items() if "fp8rl_" in key}
        Fp8RLServerArgs(**ours)
        assert {key for key in given if "fp8rl_" not in key} <= known, name
        assert stock is is_stock(given) is ("fp8rl" not in json.dumps(given)), name
        if "kv_cache_dtype" in given and not stock:  # the plugin serves it
            chosen = given | backends.choose(given, (9, 0))
            prefill = given.get("prefill_attention_backend", "fa3")
            found = [chosen[argument] for argument in backends.ARGUMENTS]
            assert found == [prefill, prefill, "trtllm_mha", 64], name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", models.MODELS)
def test_sglang_takes_every_stock_arm_on_hopper_as_it_is_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    from sgl_fp8rl.engine import compat
    from sgl_fp8rl.engine.compat.settings import resolved
    from tests.sgl_fp8rl import resolving

    models.save_config(models.MODELS[model], tmp_path)
    older = version("sglang") == "0.5.17"
    refused = set()
    with resolving.start(tmp_path / "others") as start:
        start.on(resolving.HOPPER)
        for job in rollout.jobs(model):
            if not job.stock:
                continue
            try:
                job.spec.assert_served()
            except RuntimeError as error:
                assert str(error).endswith("and 0.5.17 is installed; leave it out")
                refused.add(job.spec.name.rpartition("-")[2])
                continue
            given = job.spec.keywords(batches=(64, 32))
            with monkeypatch.context() as patch:
                for name, value in job.environ.items():
                    patch.setenv(name, value)
                settings = resolved(compat.ServerArgs(model_path=str(tmp_path), **given))
            found = {name: getattr(settings, name) for name in given}
            assert found == given, job.name
    newer = {"qwen3-8b": {"trtllm"}, "qwen3-30b-a3b": {"trtllm", "megamoe"}}
    assert refused == (newer[model] if older else set())
