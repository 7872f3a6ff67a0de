"""Triton tiles for experts: both GEMMs of each shape, by the number of tokens.

The user's own tiles (``sgl-fp8rl tune``) take precedence over those that ship with the package, and
these over SGLang's. They are read once, at start (``startup_experts``), so that a captured CUDA
graph and an eager call with the same number of tokens run the same kernels.
"""

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.candidates import Config
from sgl_fp8rl.engine.gemm.tune_cache import Files, Machine
from sgl_fp8rl.ops.reference import BLOCK

BLOCK_SHAPE = [BLOCK, BLOCK]
SHIPPED = Path(__file__).parent / "tiles"
SIZES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
OPTIONS = {*SIZES, "num_warps", "num_stages", "num_ctas", "USE_TMA"}
"""Keys of a tile; ``USE_TMA``: weights are loaded through a TMA descriptor."""


class ExpertShape(NamedTuple):
    """The shape of the experts on this rank."""

    experts: int
    hidden: int
    intermediate: int
    """Channels of each half of gate_up."""
    top_k: int
    """Experts of a token."""

    @classmethod
    def of(cls, w2_shape: Sequence[int], top_k: int) -> "ExpertShape":
        """From the shape of the second GEMM's weight, ``[E, H, I]``."""
        E, H, I = w2_shape  # noqa: E741
        return cls(E, H, I, top_k)


@dataclass(frozen=True)
class Pair:
    """The tiles of both GEMMs for batches of about ``m`` tokens."""

    m: int
    up: Config
    """Of gate_up."""
    down: Config
    us: float | None = None
    """Microseconds of both GEMMs and of the sort before them; None if unknown."""
    stock_us: float | None = None
    """The same with the tiles that SGLang takes."""

    def __post_init__(self) -> None:
        for config in (self.up, self.down):
            if not set(SIZES) <= set(config) <= OPTIONS:
                raise ValueError(f"{dict(config)} are not tiles of this version")
            if not all(isinstance(value, int) and value >= 0 for value in config.values()):
                raise ValueError(f"{dict(config)} are not tiles: values must be integers")
            if min(config[name] for name in SIZES) < 1 or BLOCK % config["BLOCK_SIZE_K"]:
                raise ValueError(f"{dict(config)} does not divide blocks of {BLOCK} channels")
        if self.up["BLOCK_SIZE_M"] != self.down["BLOCK_SIZE_M"]:
            raise ValueError("its two GEMMs do not share BLOCK_SIZE_M, by which rows are sorted")


Table = dict[ExpertShape, list[Pair]]
"""Pairs by ascending ``m``."""


def _shape(sizes: Sequence[int]) -> ExpertShape:
    return ExpertShape(*sizes)


FILES = Files("experts", _shape, Pair)


@dataclass(frozen=True)
class Tiles:
    """The tiles of one shape: the pair with the nearest ``m``, as SGLang selects."""

    bounds: tuple[int, ...]
    """Ascending; the pair at the same index is used up to this number of tokens, inclusive."""
    pairs: tuple[tuple[Config, Config], ...]
    """One more than the bounds."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Tiles":
        """From the pairs of a table, at least one."""
        bounds = ((first.m + second.m) // 2 for first, second in pairwise(pairs))
        return cls(tuple(bounds), tuple((pair.up, pair.down) for pair in pairs))

    def at(self, M: int) -> tuple[Config, Config]:
        """The tiles of gate_up and of down for M tokens."""
        return self.pairs[bisect_left(self.bounds, M)]


def stock(shape: ExpertShape, M: int) -> tuple[Config, Config]:
    """SGLang's tiles for the two GEMMs of M tokens; they share ``BLOCK_SIZE_M``."""
    E, H, I, T = shape  # noqa: E741
    up, (down, _) = compat.try_get_optimal_moe_config(
        (E, 2 * I, H),
        (E, H, I),
        T,
        "fp8_w8a8",
        M,
        block_shape=BLOCK_SHAPE,
        return_down_config=True,
    )
    return _in_one_block(up), _in_one_block(down or up)


def _in_one_block(config: Config) -> Config:
    """The same tiles, limited to the channels that share one scale.

    SGLang's kernel applies the first of two scales to both halves of a larger tile, and a file of
    0.5.17 and 0.5.23 has such tiles (512 experts of 256 channels on an H100).
    """
    return config if config["BLOCK_SIZE_K"] <= BLOCK else {**config, "BLOCK_SIZE_K": BLOCK}


def tiles(measured: Tiles | None, shape: ExpertShape, M: int) -> tuple[Config, Config]:
    """The tiles for the two GEMMs of M tokens: measured ones, else SGLang's."""
    return measured.at(M) if measured else stock(shape, M)


def find(shapes: Sequence[ExpertShape], machine: Machine, folder: str) -> dict[ExpertShape, Tiles]:
    """The tiles of ``shapes`` from the user's table, else from the one that ships with the package.

    Empty if the user gave SGLang a folder of tiles, and for deterministic runs, whose tiles must
    not change with M.

    Args:
        folder: the tune cache.
    """
    deterministic = compat.get_exec().deterministic.enable_deterministic_inference
    if deterministic or os.environ.get("SGLANG_MOE_CONFIG_DIR"):
        return {}
    shipped, _ = FILES.shipped(machine, SHIPPED / f"{machine.slug}.json")
    table = shipped | FILES.own(machine, folder)
    return {shape: Tiles.of(table[shape]) for shape in shapes if table.get(shape)}
