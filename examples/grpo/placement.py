"""Where the demo runs: on a GPU that trainer and engine share, or on a CPU if there is none."""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = {"cpu": 2, "cuda": 1}  # FSDP2 ranks, unless torchrun starts more
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # Python objects go by gloo
ENGINE: dict[str, dict[str, Any]] = {
    "cpu": {"max_total_tokens": 8192, "sleep_on_idle": True},  # leave the core to the trainer
    # The cache holds a step's rollout and the evaluation; most of the GPU is the trainer's.
    "cuda": {"max_total_tokens": 32768, "mem_fraction_static": 0.2},
}
RESERVED = {"model_path", "quantization", "skip_tokenizer_init", "random_seed"}


def device_type() -> str:
    """``cuda`` where torch finds a GPU, else ``cpu``; the engine decides the same way."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: torch.device) -> str:
    """What the results say they were measured on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def refusal(device_type: str, world: int) -> str | None:
    """Why ``world`` ranks cannot run here, in a sentence, or None if they can."""
    if device_type == "cpu" or world <= torch.cuda.device_count():
        return None
    return (
        f"{world} ranks need {world} GPUs, since NCCL takes one rank a GPU, but torch finds "
        f"{torch.cuda.device_count()}; start fewer ranks, or set CUDA_VISIBLE_DEVICES= to run on "
        f"the CPU"
    )


def join(rank: int, world: int, init_method: str) -> torch.device:
    """Enter the trainer's process group; returns this rank's device. Rank 0's is the engine's."""
    device = torch.device("cpu")
    if device_type() == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[device.type], init_method=init_method, rank=rank, world_size=world
    )
    return device


def engine_args(text: str) -> dict[str, Any]:
    """Read ``--engine-args``.

    Raises:
        argparse.ArgumentTypeError: no JSON object, or one that names what the demo sets itself.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no object such as {{"page_size": 1}}')
    if taken := sorted(RESERVED & value.keys()):
        raise argparse.ArgumentTypeError(f"{', '.join(taken)}: the demo sets this itself")
    return value


def engine_keywords(device_type: str, extra: dict[str, Any]) -> dict[str, Any]:
    """Keywords of ``sglang.Engine`` for a device; ``extra`` has the last word."""
    keywords = dict(ENGINE[device_type])
    if device_type == "cuda" and find_spec("flashinfer"):
        keywords["attention_backend"] = "flashinfer"
    return keywords | extra


@contextmanager
def engine_of(
    checkpoint: Path, ignored_layers: str, seed: int, keywords: dict[str, Any]
) -> Iterator[Any]:
    """A running engine on rank 0, None elsewhere."""
    if dist.get_rank() != 0:
        yield None
        return
    with running_engine(checkpoint, ignored_layers, seed, keywords) as engine:
        yield engine


@contextmanager
def running_engine(
    checkpoint: Path, ignored_layers: str, seed: int, keywords: dict[str, Any]
) -> Iterator[Any]:
    """A running engine."""
    import sglang

    os.environ["FP8RL_IGNORED_LAYERS"] = ignored_layers
    engine = sglang.Engine(
        model_path=str(checkpoint),
        quantization="fp8rl",
        skip_tokenizer_init=True,
        random_seed=seed,
        **{"log_level": "error", **keywords},
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
