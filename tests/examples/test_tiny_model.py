"""Masks of padded batches, FSDP's averaging undone, and the same weights from the same seed."""

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from examples.grpo import arithmetic, tiny_model
from tests.trainer_bridge import ranks

STEPS = 6
COLLECTIVE_TIMEOUT_S = 30.0


@pytest.mark.parametrize("size", tiny_model.SIZES)
def test_dimensions_suit_block_fp8(size: str) -> None:
    with torch.device("meta"):
        model = tiny_model.build_model(seed=0, size=size)
    for name, weight in model.named_parameters():
        if "_proj" in name:
            assert all(size % 128 == 0 for size in weight.shape), name


@pytest.mark.usefixtures("one_rank")
def test_pretraining_learns_and_repeats_by_seed(tmp_path: Path) -> None:
    def train(seed: int) -> tuple[Qwen3ForCausalLM, list[float]]:
        model = tiny_model.build_model(seed)
        tiny_model.shard(model)
        return model, [loss for _, loss in tiny_model.pretrain(model, seed, STEPS)]

    (model, losses), (_, again), (_, other) = train(0), train(0), train(1)
    assert losses == again
    assert losses != other
    assert losses[-1] < losses[0] - 0.5  # 5.06 to 3.05 was measured

    tiny_model.save_checkpoint(model, tmp_path)
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert saved.dtype == torch.bfloat16
    assert saved.config.eos_token_id == arithmetic.END_TOKEN
    for name, weight in saved.named_parameters():
        master = model.get_parameter(name).full_tensor()
        assert master.dtype == torch.float32
        assert torch.equal(weight, master.to(torch.bfloat16)), name


def _two_ranks(rank: int, folder: Path) -> None:
    """The gradient of unevenly shared tokens is that of their common mean."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    fully_shard(layer)
    x_BT = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 99.0, 99.0]])][rank]
    mask_BT = torch.tensor([[True, True, True], [True, False, False]])[[rank]]
    loss = tiny_model.global_mean(layer(x_BT[..., None])[..., 0], mask_BT)
    loss.backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    # A mean of the ranks' means would be 6.
    assert gradient.full_tensor().item() == (1 + 2 + 3 + 10) / 4


@pytest.mark.timeout(ranks.JOIN_S + 30)
def test_global_mean_weighs_tokens_the_same_on_uneven_ranks(tmp_path: Path) -> None:
    ranks.run(_two_ranks, tmp_path, 2, COLLECTIVE_TIMEOUT_S)
