"""What KV scales cost an update: updates with and without them in turn."""

from collections.abc import Iterator

import torch

from benchmarks import measuring
from benchmarks.engines import models, serving, weights
from benchmarks.engines.keywords import Keywords

UPDATES = 40
BLOCK = 10
"""Updates of one kind that are timed in a row: from one kind to the other the engine opens the
weights' memory anew, which no training loop does at each step."""
WARM_UP = 3  # of a block; from the second update on weights are mapped
WITH, WITHOUT = "update, with KV scales", "update, without KV scales"


def measure(
    keywords: Keywords, shape: models.Shape, folder: str
) -> dict[str, dict[str, list[float]]]:
    """Values by case. Weights are read from mapped memory.

    Raises:
        RuntimeError: an update did not read the weights in place, or its scales are not in force.
    """
    import trainer_bridge

    engine = serving.start(folder, keywords)
    module = weights.bf16_module(shape, serving.DEVICE)
    scales = torch.ones(shape.layers, 2, shape.kv_heads, device=serving.DEVICE)
    times: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    for version, (name, is_timed) in enumerate(turns()):
        weights.renew(module.parameters())
        scales.uniform_(0.5, 2.0)
        sent = scales if name == WITH else None
        ms, result = measuring.timed(
            lambda version=version, sent=sent: trainer_bridge.update(  # type: ignore[misc]
                module, engine, version=version, kv_scales=sent
            )
        )
        if is_timed and result.mapped_bytes < 0.99 * result.bytes:
            raise RuntimeError(f"update {version} read {result.mapped_bytes} bytes in place")
        if is_timed:
            times[name].append(ms)
        if sent is not None:
            held = torch.tensor(engine.fp8rl_control({"op": "kv"})["scales"])
            if not torch.equal(held, sent.amax(-1, keepdim=True).expand_as(sent).cpu()):
                raise RuntimeError(f"the scales of update {version} are not in force")
    engine.shutdown()
    return {name: {"update_wall_ms": found} for name, found in times.items()}


def turns() -> Iterator[tuple[str, bool]]:
    """Blocks with scales and without in turn, and whether an update is timed."""
    for _ in range(UPDATES // BLOCK):
        for name in (WITH, WITHOUT):
            for number in range(WARM_UP + BLOCK):
                yield name, number >= WARM_UP
