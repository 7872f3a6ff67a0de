"""Triton's tiles for experts: for each shape those of both products, by the tokens of a batch.

The user's own (``sgl-fp8rl tune``) go before those that come with the package, and these before
SGLang's. What a layer takes is read once, at start (``startup_experts``), so that a captured
CUDA graph and an eager call with as many tokens run the same kernels.
"""

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from sgl_fp8rl import compat
from sgl_fp8rl.gemm.candidates import Config
from sgl_fp8rl.gemm.tune_cache import Files, Machine
from sgl_fp8rl.ops.reference import BLOCK

BLOCK_SHAPE = [BLOCK, BLOCK]
SHIPPED = Path(__file__).parent / "tiles"
SIZES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
OPTIONS = {*SIZES, "num_warps", "num_stages", "num_ctas", "USE_TMA"}
"""What tiles are made of; ``USE_TMA`` says that weights are loaded through a TMA descriptor."""


class ExpertShape(NamedTuple):
    """Experts as this rank holds them."""

    experts: int
    hidden: int
    intermediate: int
    """Channels of each half of gate_up."""
    top_k: int
    """Experts of a token."""

    @classmethod
    def of(cls, w2_shape: Sequence[int], top_k: int) -> "ExpertShape":
        """By the weight of the second product, ``[E, H, I]``."""
        E, H, I = w2_shape  # noqa: E741
        return cls(E, H, I, top_k)


@dataclass(frozen=True)
class Pair:
    """The tiles of both products for batches of about ``m`` tokens."""

    m: int
    up: Config
    """Of gate_up."""
    down: Config
    us: float | None = None
    """Microseconds of both products and of the sort of routes before them; None: not known."""
    stock_us: float | None = None
    """The same with the tiles that SGLang takes."""

    def __post_init__(self) -> None:
        for config in (self.up, self.down):
            if not set(SIZES) <= set(config) <= OPTIONS:
                raise ValueError(f"{dict(config)} are no tiles of this version")
            if not all(isinstance(value, int) and value >= 0 for value in config.values()):
                raise ValueError(f"{dict(config)} are no tiles: each is a whole number")
            if min(config[name] for name in SIZES) < 1 or BLOCK % config["BLOCK_SIZE_K"]:
                raise ValueError(f"{dict(config)} does not cut blocks of {BLOCK} channels")
        if self.up["BLOCK_SIZE_M"] != self.down["BLOCK_SIZE_M"]:
            raise ValueError("its two products do not share BLOCK_SIZE_M, by which rows are sorted")


Table = dict[ExpertShape, list[Pair]]
"""Pairs by ascending ``m``."""


def _shape(sizes: Sequence[int]) -> ExpertShape:
    return ExpertShape(*sizes)


FILES = Files("experts", _shape, Pair)


@dataclass(frozen=True)
class Tiles:
    """The tiles of one shape; of all pairs the one with the nearest ``m``, as SGLang picks."""

    bounds: tuple[int, ...]
    """Ascending; the pair of the same index is taken up to and with this many tokens."""
    pairs: tuple[tuple[Config, Config], ...]
    """One more than there are bounds."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> "Tiles":
        """Those of a table, at least one."""
        bounds = ((first.m + second.m) // 2 for first, second in pairwise(pairs))
        return cls(tuple(bounds), tuple((pair.up, pair.down) for pair in pairs))

    def at(self, M: int) -> tuple[Config, Config]:
        """Those of gate_up and of down for M tokens."""
        return self.pairs[bisect_left(self.bounds, M)]


def stock(shape: ExpertShape, M: int) -> tuple[Config, Config]:
    """The tiles that SGLang takes for the two products of M tokens; of one ``BLOCK_SIZE_M``."""
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
    """The same tiles with no more channels than have one scale.

    SGLang's kernel takes the first of two scales for both, and one of the files that come with
    0.5.17 and 0.5.23 has such tiles (512 experts of 256 channels on an H100).
    """
    return config if config["BLOCK_SIZE_K"] <= BLOCK else {**config, "BLOCK_SIZE_K": BLOCK}


def tiles(measured: Tiles | None, shape: ExpertShape, M: int) -> tuple[Config, Config]:
    """The tiles for the two products of M tokens: those measured, else what SGLang takes."""
    return measured.at(M) if measured else stock(shape, M)


def find(shapes: Sequence[ExpertShape], machine: Machine, folder: str) -> dict[ExpertShape, Tiles]:
    """What is known of ``shapes``: the user's own, else what comes with the package.

    Nothing where the user named a folder of such tiles to SGLang, and for deterministic runs, whose
    tiles must not change with M.

    Args:
        folder: the tune cache.
    """
    deterministic = compat.get_exec().deterministic.enable_deterministic_inference
    if deterministic or os.environ.get("SGLANG_MOE_CONFIG_DIR"):
        return {}
    shipped, _ = FILES.shipped(machine, SHIPPED / f"{machine.slug}.json")
    table = shipped | FILES.own(machine, folder)
    return {shape: Tiles.of(table[shape]) for shape in shapes if table.get(shape)}
