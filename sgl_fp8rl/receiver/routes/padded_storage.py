"""Padded parameters: SGLang's loaders know nothing of the padding, and no update brings it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from sgl_fp8rl.formats import stored_format
from sgl_fp8rl.formats.padding import Padding, padding_of
from sgl_fp8rl.ops.regions import whole
from sgl_fp8rl.receiver.routes.routes import Constant, Route, RouteError


@contextmanager
def unpadded(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Show parameters as if they had no padding, to a loader that writes nothing."""
    padded = [(p, p.data, padding) for p, padding in _padded(parameters).values()]
    try:
        for parameter, data, padding in padded:
            shape = (*data.shape[:-2], *padding.unpadded)
            parameter.data = data.view(-1)[: math.prod(shape)].view(shape)
        yield
    finally:
        for parameter, data, _ in padded:
            parameter.data = data


def placed(route: Route, parameters: Mapping[str, torch.Tensor]) -> list[Route]:
    """The routes into padded storage of a route that was recorded without, one for each part.

    Raises:
        RouteError: the source has fewer than two dimensions.
    """
    padding = padding_of(parameters[route.parameter])
    if padding is None:
        return [route]
    if len(route.src) < 2:
        raise RouteError(
            f"{route.source} is no matrix, but {route.parameter} is; leave its layer BF16 with "
            f"--fp8rl-ignored-layers"
        )
    return [replace(route, src=src, dst=dst) for src, dst in padding.place(route.src, route.dst)]


def gaps(parameters: Mapping[str, torch.Tensor]) -> Iterator[Constant]:
    """What padding holds: the codes and companions of zeros."""
    for name, (parameter, padding) in _padded(parameters).items():
        format_ = stored_format(parameter)
        lead = whole(tuple(parameter.shape[:-2]))
        for suffix, zeros in format_.encode(torch.zeros(1, 1)).items():
            held = padding.in_blocks(format_.block) if suffix else padding
            value = float(zeros)
            yield from ((name + suffix, (*lead, *gap), value) for gap in held.gaps())


def _padded(
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, tuple[torch.Tensor, Padding]]:
    found = ((name, p, padding_of(p)) for name, p in parameters.items())
    return {name: (p, padding) for name, p, padding in found if padding is not None}
