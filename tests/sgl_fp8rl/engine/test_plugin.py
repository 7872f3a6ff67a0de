"""What the plugin does to a process before an engine starts, and the hooks around memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sgl_fp8rl import compat
from sgl_fp8rl.engine import plugin
from sgl_fp8rl.options import current_options

PLAIN = {
    "tokenizer_worker_num": 1,
    "dp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_eplb": False,
    "enable_lora": None,
    "hicache_storage_backend": None,
}


def test_a_plain_layout_is_served() -> None:
    plugin.refuse_layout(SimpleNamespace(**PLAIN))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokenizer_worker_num", 2),
        ("dp_size", 2),
        ("pp_size", 2),
        ("nnodes", 2),
        ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "decode"),
        ("enable_eplb", True),
        ("enable_lora", True),
        ("hicache_storage_backend", "file"),
    ],
)
def test_a_layout_that_updates_cannot_reach_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} {value}"):
        plugin.refuse_layout(SimpleNamespace(**{**PLAIN, field: value}))


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(ValueError, match="fp8rl_bucket_byte, which is not an option"):
        plugin.parse_engine_kwargs(fp8rl_bucket_byte=1)


def test_a_wrong_variable_is_reported_at_registration(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    current_options()  # read while it was right
    monkeypatch.setenv("FP8RL_BUCKET_BYTES", "much")
    monkeypatch.setattr(compat, "check_symbols", list)
    plugin.register()
    assert "sgl-fp8rl is not available: FP8RL_BUCKET_BYTES" in caplog.text


def test_released_weights_are_quarantined_until_an_update() -> None:
    import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

    from sgl_fp8rl.engine.scheduler import attach, note_resumed, quarantine_released
    from sgl_fp8rl.protocol.manifest import ManifestError
    from sgl_fp8rl.protocol.states import State
    from sgl_fp8rl.weight_update.session import EngineWeights

    model = nn.Linear(2, 2)
    weights = EngineWeights(model, torch.bfloat16)
    weights.state = State.SERVING
    attach(model, weights)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    updater = SimpleNamespace(tp_worker=runner, offload_tags=set())

    def release(updater: Any, tags: set[str]) -> str:
        updater.offload_tags |= tags
        return "released"

    def resume(updater: Any, tags: set[str]) -> str:
        updater.offload_tags -= tags
        return "resumed"

    assert quarantine_released(release, updater, {"kv_cache"}) == "released"
    assert weights.state is State.SERVING
    quarantine_released(release, updater, {"weights"})
    assert weights.state is State.QUARANTINED

    with pytest.raises(ManifestError, match="resume_memory_occupation"):
        weights.check_version(0)
    assert note_resumed(resume, updater, {"weights"}) == "resumed"
    assert weights.state is State.QUARANTINED
    assert not weights.released
    weights.check_version(0)


def test_a_backend_that_keeps_its_own_copy_of_the_scales_is_refused() -> None:
    import sglang  # noqa: F401

    from sgl_fp8rl.engine.linear import _storage_of

    layer = nn.Linear(2, 2)
    before = _storage_of(layer)
    assert _storage_of(layer) == before
    layer.padded_scale = torch.ones(2)
    assert _storage_of(layer) != before
