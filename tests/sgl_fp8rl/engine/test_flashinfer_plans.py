"""A step's plan is written once the GPU has copied the last; ``tests/gpu`` has the race itself."""

import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention.flashinfer_plans import wait_for_copy
from sgl_fp8rl.engine.startup import kv_setup


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order; events have the number of their wrapper."""
    seen: list[str] = []

    class Event:
        made = 0

        def __init__(self) -> None:
            self.number = Event.made
            Event.made += 1

        def synchronize(self) -> None:
            seen.append(f"wait {self.number}")

        def record(self) -> None:
            seen.append(f"record {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return seen


def test_waits_before_and_records_after(calls: list[str]) -> None:
    def plan(updater: Any, wrapper: Any, *args: Any, **keywords: Any) -> None:
        calls.append(f"plan {updater} {wrapper.name} {args} {keywords}")

    one, other = SimpleNamespace(name="one"), SimpleNamespace(name="other")
    for wrapper in (one, other, one):
        wait_for_copy(plan, "updater", wrapper, 1, spec_info=None)
    planned = {w.name: f"plan updater {w.name} (1,) {{'spec_info': None}}" for w in (one, other)}
    assert calls == [
        *("wait 0", planned["one"], "record 0"),
        *("wait 1", planned["other"], "record 1"),
        *("wait 0", planned["one"], "record 0"),
    ]
    calls.clear()  # a plan that fails is not recorded
    with pytest.raises(AttributeError):
        wait_for_copy(plan, "updater", SimpleNamespace())
    assert calls == ["wait 2"]


@pytest.mark.parametrize("target", compat.FLASHINFER_PLANS)
def test_sglang_has_what_is_wrapped(target: str) -> None:
    """By its name, and with the wrapper as its first argument."""
    method = pkgutil.resolve_name(target)
    assert list(inspect.signature(method).parameters)[:2] == ["self", "wrapper"]


@pytest.mark.parametrize(
    ("quantization", "decode", "wrapped"),
    [
        ("fp8rl", "flashinfer", True),
        ("fp8rl", "fa3", False),
        ("fp8rl", "torch_native", False),
        ("fp8", "flashinfer", False),
        (None, "flashinfer", False),
    ],
)
def test_flashinfer_is_wrapped_where_it_decodes_for_us(
    quantization: str | None, decode: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    monkeypatch.setattr(kv_setup, "wrap_plans", lambda: done.append("wrap"))
    monkeypatch.setattr(kv_setup, "log_start", lambda model: None)
    runner = SimpleNamespace(
        model=torch.nn.Module(),
        model_config=SimpleNamespace(quantization=quantization),
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str=decode,
    )
    kv_setup.check_kv_cache(lambda _: done.append("stock"), runner)
    assert done == ["stock", *(["wrap"] if wrapped else [])]
