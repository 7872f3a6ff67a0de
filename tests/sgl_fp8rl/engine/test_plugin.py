"""What the plugin does to a process before an engine starts."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from torch import nn

from sgl_fp8rl import compat
from sgl_fp8rl.engine import attached, plugin
from sgl_fp8rl.options import current_options
from sgl_fp8rl.weight_update.engine_weights import EngineWeights
from tests.sgl_fp8rl.engine import copies
from tests.sgl_fp8rl.resolving import Start

MODEL = {"model_path": "dummy", "quantization": "fp8rl"}
"""SGLang resolves no argument of a model of that name."""


def test_options_of_ours_and_of_sglang_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "512")  # put back at the end
    server_args = plugin.parse_engine_kwargs(**MODEL, tp_size=2, fp8rl_bucket_bytes=1024)
    assert (server_args.quantization, server_args.tp_size) == ("fp8rl", 2)
    assert current_options().bucket_bytes == 1024


def test_arguments_of_a_framework_are_checked_in_the_scheduler() -> None:
    """It made them itself, so no parser of ours ran; SGLang loads the model in ``__init__``."""
    started: list[Any] = []

    def original(scheduler: Any, *args: Any, **keywords: Any) -> None:
        started.append((scheduler, args, keywords))

    stock = compat.ServerArgs(**MODEL | {"quantization": "fp8"}, dp_size=2)
    plugin.check_scheduler_args(original, "scheduler", stock, 1, rank=0)
    assert started == [("scheduler", (stock, 1), {"rank": 0})]
    refused = compat.ServerArgs(**MODEL, dp_size=2)
    with pytest.raises(ValueError, match="--dp-size 2"):
        plugin.check_scheduler_args(original, "scheduler", refused, 1, rank=0)
    cache = compat.ServerArgs(**MODEL, kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match="fp8_e5m2"):
        plugin.check_scheduler_args(original, "scheduler", cache)
    assert len(started) == 1


def test_a_model_that_updates_would_not_reach_does_not_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps copies of its weights may be made as graphs are captured."""
    model = nn.Sequential(nn.Linear(2, 2))
    attached.attach(model, EngineWeights(model, torch.bfloat16))
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    scheduler = SimpleNamespace(tp_worker=runner)
    server_args = start.published(start.made())
    plugin.check_scheduler_args(lambda *_: None, scheduler, server_args)

    def captures(*_: Any) -> None:
        copies.keep_copies(model, monkeypatch)

    with pytest.raises(ValueError, match=f"cannot update this engine: {copies.WORDS}"):
        plugin.check_scheduler_args(captures, scheduler, server_args)


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(ValueError, match=r"fp8rl_bucket_byte\b"):
        plugin.parse_engine_kwargs(fp8rl_bucket_byte=1)


def test_a_wrong_variable_is_reported_at_registration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current_options()  # read while it was right
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    monkeypatch.setattr(compat, "check_symbols", list)
    plugin.register()
    assert "FP8RL_BUCKET_BYTES" in caplog.text
    assert plugin.NAME not in compat.QUANTIZATION_METHODS
