"""Exports of a Megatron trainer on CPUs, by the model of the example."""

from collections.abc import Iterator
from pathlib import Path

import torch

from examples.megatron import cpu_model
from examples.megatron.cpu_model import Layout


def stream(checkpoint: Path, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """What mbridge exports of a model of this layout, loaded from an HF checkpoint.

    Every rank of the job walks it; each tensor comes whole on each of them.
    """
    bridge, model = cpu_model.load(checkpoint, layout)
    with torch.no_grad():
        yield from bridge.export_weights([model])
