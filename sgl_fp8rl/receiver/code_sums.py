"""Sums of the codes and scales that the ranks hold, by HF tensor: a trainer compares them with its
own.

Routes are read backwards, as for an export.
"""

from collections import defaultdict
from functools import partial
from typing import Any

import torch

from sgl_fp8rl.formats import BLOCKS, QUANTIZED
from sgl_fp8rl.ops.regions import Region, view
from sgl_fp8rl.protocol.code_sums import Sums, code_sum, scale_sum, total
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.routes.routes import RouteTable
from sgl_fp8rl.receiver.update_steps import Gather, gather_results

Boxes = dict[str, dict[Region, list[int]]]
"""By HF tensor and box of it: the sums of what a rank holds there."""


def read(weights: EngineWeights, gather: Gather) -> dict[str, Any]:
    """The sums of the committed weights, over all ranks."""
    if weights.table is None or weights.state is not State.SERVING:
        return {"error": "no complete set of weights is committed; update the engine first"}
    boxes: dict[str, dict[Region, list[int]]] = defaultdict(dict)
    for rank in gather_results(partial(_boxes, weights.table), "summing codes", gather):
        for name, found in rank.items():
            boxes[name].update(found)  # several ranks may hold the same box
    sums: Sums = {
        name: [total(list(parts)) for parts in zip(*found.values(), strict=True)]
        for name, found in boxes.items()
    }
    return {"sums": sums}


def _boxes(table: RouteTable) -> Boxes:
    (suffix,) = QUANTIZED.suffixes
    found: list[tuple[str, Region]] = []
    summed: list[torch.Tensor] = []
    for name, routes in table.routes.items():
        for route in routes:
            # ``fp8_forward`` refuses ragged tensors
            if table.format_of(route) in BLOCKS and table.why_ragged(name) is None:
                scales = table.parameters[route.parameter + suffix]
                box = _first_held(QUANTIZED.companion_region(suffix, route.dst), route.src)
                summed.append(code_sum(view(table.parameters[route.parameter], route.dst)))
                summed.append(scale_sum(view(scales, box)))
                found.append((name, route.src))
    boxes: Boxes = defaultdict(dict)
    values = torch.stack(summed).view(-1, 2).tolist() if summed else []  # one wait for all
    for (name, region), pair in zip(found, values, strict=True):
        boxes[name][region] = pair
    return dict(boxes)


def _first_held(scales: Region, source: Region) -> Region:
    """The box without blocks that begin on another rank: each scale is summed once."""
    *lead, rows, cols = scales
    (row, col), (height, width) = (side[0] for side in source[-2:]), QUANTIZED.block
    return *lead, (rows[0] + bool(row % height), rows[1]), (cols[0] + bool(col % width), cols[1])
