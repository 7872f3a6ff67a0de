"""LoRA: what is sent is merged, and the trainer's weights are not touched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tests.engine import models
from tests.integrations.trl.conftest import FakeEngine, Make
from tests.integrations.trl.tiny import LORA, is_merged, same, weights_of
from trainer_bridge.adapters import trl as adapter
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.sources.parameters import named_tensors


def test_merging_and_unmerging_alone_would_change_weights(make: Make) -> None:
    trainer = make(peft_config=LORA)
    before = weights_of(trainer)
    trainer.model.merge_adapter()
    trainer.model.unmerge_adapter()
    assert not same(weights_of(trainer), before)


def test_modules_that_are_trained_whole_are_sent(
    make: Make, engine: FakeEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    trainer, sent = make(peft_config=config), {}
    update = adapter.update

    def keep(model: Any, *args: Any, **keywords: Any) -> Any:
        sent.update({name: t.detach().clone() for name, t in named_tensors(model)})
        return update(model, *args, **keywords)

    monkeypatch.setattr(adapter, "update", keep)
    adapter.attach(trainer, engine)
    embedding = trainer.model.get_base_model().model.embed_tokens.modules_to_save["default"]
    with torch.no_grad():
        embedding.weight.fill_(2.0)
    trainer.vllm_generation.sync_weights()
    assert sent.keys() == dict(models.named_tensors(checkpoint)).keys()
    assert sent["model.embed_tokens.weight"].eq(2.0).all()


def test_a_failed_update_leaves_the_adapter_unmerged(make: Make) -> None:
    trainer = make(peft_config=LORA)
    adapter.attach(trainer, "http://127.0.0.1:1")  # nothing listens there
    before = weights_of(trainer)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1"):
        trainer.train()
    assert same(weights_of(trainer), before) and not is_merged(trainer)
