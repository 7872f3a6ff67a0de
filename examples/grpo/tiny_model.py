"""A small Qwen3 on FSDP2 ranks, and its training on the task's demonstrations.

Shapes: B sequences, T tokens of the longest response.
"""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from trainer_bridge import response_logprobs

from . import arithmetic

SIZES = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "small": {  # eight of the layers of Qwen3-0.6B
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}

PRETRAIN_BATCH = 128  # demonstrations a step, over all ranks
PRETRAIN_LR = 2e-3  # of the tiny size
WARMUP_STEPS = 30
FINAL_LR_FRACTION = 0.1


def build_model(
    seed: int,
    size: str = "tiny",
    end: int | None = arithmetic.END_TOKEN,
    other: Mapping[str, int] | None = None,
) -> Qwen3ForCausalLM:
    """A random Qwen3 in FP32. Every FP8 matrix has sides that are multiples of 128.

    Args:
        end: the token that ends a response.
        other: sizes that differ from these, by their names in ``Qwen3Config``.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=arithmetic.VOCAB_SIZE,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        **{**SIZES[size], **(other or {})},
    )
    return Qwen3ForCausalLM(config)


def learning_rate(of_tiny: float, model: PreTrainedModel) -> float:
    """A learning rate that was found on the tiny size, for a model of any width.

    Adam moves every weight by the same step, so a layer's output moves with its width.
    """
    return float(of_tiny * SIZES["tiny"]["hidden_size"] / model.config.hidden_size)


def shard(model: Qwen3ForCausalLM) -> None:
    """Shard over all ranks, in place, on the device where the model lies.

    All is FP32, which every CPU computes fast. The BF16 arm's mismatch is then what BF16 costs
    (weights, activations and logits of the engine); the FP8 arm's is that of FP8 on top.
    """
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def mask_of(responses: list[list[int]]) -> torch.Tensor:
    """Bool [B, T]: True where there is a token."""
    return pad_sequence([torch.ones(len(r), dtype=torch.bool) for r in responses], batch_first=True)


def global_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """This rank's share of the mean over the tokens of all ranks, for a loss under FSDP.

    FSDP averages the gradients of the ranks, so each rank's sum is multiplied by their number.
    """
    count = mask_BT.sum().float()
    dist.all_reduce(count)
    return (values_BT * mask_BT).sum() / count * dist.get_world_size()


def take_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> float:
    """Clip the gradient's norm to 1, step, forget the gradient; returns the norm."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()


def warm_up_and_decay(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises for WARMUP_STEPS and then falls to FINAL_LR_FRACTION of itself."""
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, 1, WARMUP_STEPS),
            torch.optim.lr_scheduler.LinearLR(optimizer, 1, FINAL_LR_FRACTION, steps),
        ],
        milestones=[WARMUP_STEPS],
    )


def pretrain(model: PreTrainedModel, seed: int, steps: int) -> Iterator[tuple[int, float]]:
    """Train on the teacher's demonstrations; yields (steps done, loss in nats a token)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = random.Random(f"{seed} demonstrations of rank {rank} of {world}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate(PRETRAIN_LR, model), betas=(0.9, 0.95)
    )
    schedule = warm_up_and_decay(optimizer, steps)
    for step in range(steps):
        problems = [arithmetic.make_problem(rng) for _ in range(PRETRAIN_BATCH // world)]
        prompts = arithmetic.prompts_of(problems)
        responses = [arithmetic.encode(arithmetic.demonstrate(p, rng)) for p in problems]
        logprobs_BT = response_logprobs(model, prompts, responses)
        loss = global_mean(-logprobs_BT, mask_of(responses).to(model.device))
        loss.backward()
        take_step(model, optimizer)
        schedule.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        yield step + 1, mean.item()


def save_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Write the sharded model as a BF16 checkpoint; every rank must call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)  # complete on rank 0, empty elsewhere
    if dist.get_rank() == 0:
        copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
        copy.load_state_dict(state)
        disable_progress_bar()
        copy.save_pretrained(folder)
    dist.barrier()
