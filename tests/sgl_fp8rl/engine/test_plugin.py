"""What the plugin does to a process before an engine starts."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sgl_fp8rl.engine import compat, plugin
from sgl_fp8rl.engine.control import attached
from sgl_fp8rl.engine.startup import activate
from sgl_fp8rl.options import current_options
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests.sgl_fp8rl.engine import copies
from tests.sgl_fp8rl.resolving import Start

MODEL = {"model_path": "dummy", "quantization": "fp8rl"}
"""SGLang resolves no argument of a model of that name."""


def test_options_of_ours_and_of_sglang_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "512")  # put back at the end
    server_args = plugin.parse_engine_kwargs(**MODEL, tp_size=2, fp8rl_bucket_bytes=1024)
    assert (server_args.quantization, server_args.tp_size) == ("fp8rl", 2)
    assert current_options().bucket_bytes == 1024
    with pytest.raises(ValueError, match=r"fp8rl_bucket_byte\b"):
        plugin.parse_engine_kwargs(fp8rl_bucket_byte=1)


def test_arguments_of_a_framework_are_checked_in_the_scheduler() -> None:
    """It made them itself, so no parser of ours ran; SGLang loads the model in ``__init__``."""
    started: list[Any] = []

    def original(*args: Any, **keywords: Any) -> None:
        started.append((args, keywords))

    stock = compat.ServerArgs(**MODEL | {"quantization": "fp8"}, dp_size=2)
    activate.check_scheduler_args(original, "scheduler", stock, 1, rank=0)
    assert started == [(("scheduler", stock, 1), {"rank": 0})]
    with pytest.raises(ValueError, match="--dp-size 2"):
        activate.check_scheduler_args(original, "scheduler", compat.ServerArgs(**MODEL, dp_size=2))
    assert len(started) == 1


def test_a_model_that_updates_would_not_reach_does_not_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps copies of its weights may be made as graphs are captured."""
    model = nn.Sequential(nn.Linear(2, 2))
    attached.attach(model, EngineWeights(model, torch.bfloat16))
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    scheduler = SimpleNamespace(tp_worker=runner)
    monkeypatch.setattr(activate.compat, "check_live", lambda *_: None)  # a part of a scheduler
    server_args = start.published(start.made())
    activate.check_scheduler_args(lambda *_: None, scheduler, server_args)

    def captures(*_: Any) -> None:
        copies.keep_copies(model, monkeypatch)

    with pytest.raises(ValueError, match=f"cannot update this engine: {copies.WORDS}"):
        activate.check_scheduler_args(captures, scheduler, server_args)


def test_a_wrong_variable_ends_an_engine_of_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    stock = MODEL | {"quantization": "fp8"}
    assert plugin.parse_engine_kwargs(**stock).quantization == "fp8"
    with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
        plugin.parse_engine_kwargs(**MODEL)
    framework = compat.ServerArgs(**MODEL)
    with pytest.raises(ValueError, match="FP8RL_BUCKET_BYTES"):
        plugin.see_engine(lambda *_, role: role, framework, role="scheduler")


PROCESS = """
import gc, importlib, json, os, sys, time
importlib.import_module({module!r})
from sglang.srt.plugins import load_plugins

def report(**more):
    functions = [f for f in gc.get_objects() if type(f) is type(report)]
    wrappers = [f for f in functions if "hook" in f.__code__.co_freevars and f.__closure__]
    cells = [f.__closure__[f.__code__.co_freevars.index("hook")] for f in wrappers]
    ours = sum(cell.cell_contents.__module__.startswith("sgl_fp8rl.engine") for cell in cells)
    packages = ("sgl_fp8rl", "server_args", "trainer_bridge")
    mine = [name for name in sys.modules if name.partition(".")[0] in packages]
    print(json.dumps(dict(hooks=ours, modules=len(mine), **more)))

known, start = set(sys.modules), time.process_time()
load_plugins()
cpu_s = time.process_time() - start
theirs = [name for name in set(sys.modules) - known if name.startswith(("sglang", "triton"))]
report(cpu_s=cpu_s, imported=theirs)
"""


def reports(module: str, code: str = "") -> list[dict[str, Any]]:
    """What a process of SGLang has of ours once it has loaded the plugin, and after ``code``."""
    program = PROCESS.format(module=module) + code
    # on any machine, as where SGLang runs on its own platform
    environ = os.environ | {"SGLANG_PLUGINS": "fp8rl"}
    command = [sys.executable, "-c", program]
    child = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert child.returncode == 0, child.stderr
    found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    print(module, found)  # what it costs
    return found


@pytest.mark.parametrize("module", ["sglang.launch_server", "sglang.srt.managers.scheduler"])
def test_a_process_without_an_engine_of_ours_has_three_hooks(module: str) -> None:
    """And a process that gets one has all, whoever made its arguments."""
    code = """
from types import SimpleNamespace
from sglang.srt import runtime_context
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.managers.scheduler import Scheduler
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine import plugin
from sgl_fp8rl.engine.compat import wrapping

assert "fp8rl" in QUANTIZATION_METHODS and Engine.server_args_class is plugin.parse_engine_kwargs
runtime_context._CONTEXT = SimpleNamespace(set_server_args=lambda _: None)
runtime_context._configure_context = lambda *_, **__: None  # SGLang 0.5.23

for quantization in ("fp8", "fp8rl", "fp8"):
    record = SimpleNamespace(quantization=quantization)
    runtime_context.publish(record, role="scheduler")
    report()
assert wrapping._wrapped >= {*compat.HOOK_TARGETS.values(), *compat.stock_updates()}
assert QUANTIZATION_METHODS["fp8rl"].__name__ == "FP8RLConfig"
"""
    loaded, stock, ours, again = reports(module, code)
    assert loaded["imported"] == []
    assert loaded["hooks"] <= stock["hooks"] == 3
    assert max(loaded["modules"], stock["modules"]) < 25
    assert ours["hooks"] == again["hooks"] > 40
