"""Trainers that ``attach`` refuses, before anything is sampled."""

from typing import Any

import pytest
import torch

from tests.integrations.trl.conftest import FakeEngine, Make
from trainer_bridge.adapters import trl as adapter


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
    ):
        trainer = make()
        spoil(trainer)
        with pytest.raises(ValueError, match=message):
            adapter.attach(trainer, engine)


def int8() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False)
