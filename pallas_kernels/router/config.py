"""How the work of the first launch is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .._compat import Target
from ..tuning import decide, varied

# Up to so many rows CUDA cores are as fast as tensor cores, which take eight at least.
FEW_ROWS = 4
# More rows than these have tiles of their own; XLA multiplies them where weights are float32.
SOME_ROWS = 64
# With more rows than these, tiles of experts are large.
MANY_ROWS = 1024
# Columns that tensor cores add up by themselves; see `some_rows`.
PIECE = 64
# Most parts that columns are cut into, since the second launch reads a sum of each; and most pieces
# that a program has under way.
MOST_PARTS, MOST_PIECES = 16, 4
# What may be tried of few rows: warps that share the columns, and warps.
SHARES = ((1, 4), (2, 4), (4, 4), (4, 8), (8, 8))


@dataclasses.dataclass(frozen=True)
class FewRows:
    """How the work is cut on CUDA cores.

    Attributes:
        rows: rows a program, a power of two.
        experts: experts a warp, a power of two; at most 32 pairs of row and expert.
        parts: warps that share the columns, a power of two.
        num_warps: warps a program; those that do not share columns have other experts.
    """

    rows: int = 1
    experts: int = 1
    parts: int = 8
    num_warps: int = 8


@dataclasses.dataclass(frozen=True)
class SomeRows:
    """How the work is cut on tensor cores.

    Attributes:
        rows: rows a program, a power of two, at least 8.
        experts: experts a program, a power of two, at least 16.
        parts: programs that share the columns; the second launch adds what they make.
        num_warps: warps a program. They share the rows, eight for each, if there are more than
            experts; else the experts, 16 for each. More would do the same work twice.
        num_stages: see `_compat.triton_call`; an iteration has `PIECE` columns.
    """

    rows: int = 32
    experts: int = 16
    parts: int = 8
    num_warps: int = 4
    num_stages: int = 5


Config = FewRows | SomeRows
KINDS = (FewRows, SomeRows)


def config_for(target: Target, x: Any, weight: Any) -> Config:
    """For these rows and this weight on this device."""
    (rows, width), experts = x.shape, weight.shape[0]
    key = f"rows={rows} width={width} experts={experts} {x.dtype} {weight.dtype}"
    config = heuristic(target.cores, x, weight)

    def others() -> list[Config]:
        if rows > SOME_ROWS:
            return _others_of_many_rows(config)
        found = _others_on_cuda_cores(_few_rows(rows))
        if splits(weight):
            found += _others_on_tensor_cores(_some_rows(target.cores, rows, experts, width), width)
        return found

    return decide("router", target, key, config, others, KINDS)


def heuristic(cores: int, x: Any, weight: Any) -> Config:
    """A configuration for a call's sizes on a device of so many cores.

    Args:
        cores: multiprocessors.
        x: tokens, at most `SOME_ROWS` unless weights are split.
        weight: of the experts.
    """
    rows, experts = x.shape[0], weight.shape[0]
    if rows <= FEW_ROWS or not splits(weight):
        return _few_rows(rows)
    if rows > SOME_ROWS:
        return _many_rows(cores, rows, experts, x.shape[1])
    return _some_rows(cores, rows, experts, x.shape[1])


def splits(weight: Any) -> bool:
    """Whether tensor cores take the weight as it is."""
    return weight.dtype == jnp.bfloat16


def _few_rows(rows: int) -> FewRows:
    """Many warps, of few columns each, while rows are few; many products a number read, later."""
    if rows <= 2:
        return FewRows(rows)
    if rows <= 16:
        return FewRows(min(8, pl.next_power_of_2(rows)), 2, 4, 4)
    return FewRows(8, 2 if rows <= 32 else 4, 1, 4)


def _others_on_cuda_cores(config: FewRows) -> list[Config]:
    sizes = {"rows": (config.rows // 2, config.rows * 2), "experts": (1, 2, 4)}
    shares = [FewRows(config.rows, config.experts, parts, w) for parts, w in SHARES]
    near = [config, *varied(config, **sizes), *shares]
    return [each for each in near if 1 <= each.rows * each.experts <= 32]


def _some_rows(cores: int, rows: int, experts: int, width: int) -> SomeRows:
    """A program or two for each multiprocessor, as far as the columns can be cut.

    Warps have eight rows each, whose code is the shortest: of two programs up to 16 rows. x is read
    once for each tile of experts, so that these are the larger where all multiprocessors are at
    work even so; but four warps share 32 rows beside the smaller alone.
    """
    block = 8 if rows <= 16 else pl.next_power_of_2(rows)
    enough = 2 * MOST_PARTS * pl.cdiv(experts, 32) > cores
    tile = 32 if enough and block != 32 else 16
    return _cut(block, tile, max(1, min(MOST_PARTS, cores // pl.cdiv(experts, tile))), width)


def _many_rows(cores: int, rows: int, experts: int, width: int) -> SomeRows:
    """Two programs for each multiprocessor while tiles of experts are small, then one.

    On an H200, of 2,048 columns and 256 experts: 65 rows take 4.4 us (XLA in float32 10.2), 512
    rows 9.3 (21.4), 2,048 rows 21.4 (54), and 8,192 rows 72 (180).
    """
    large = rows > MANY_ROWS
    tile = min(128 if large else 32, max(16, pl.next_power_of_2(experts)))
    programs = pl.cdiv(rows, SOME_ROWS) * pl.cdiv(experts, tile)
    most = cores // programs if large else min(8, 2 * cores // programs)
    pieces = pl.cdiv(width, PIECE)
    each = pl.cdiv(pieces, max(1, most))
    return SomeRows(SOME_ROWS, tile, pl.cdiv(pieces, each), 8, 2 if large else 4)


def _cut(rows: int, experts: int, parts: int, width: int) -> SomeRows:
    """With at most so many parts, and the warps and stages that go with these sizes."""
    pieces = pl.cdiv(width, PIECE)
    each = pl.cdiv(pieces, parts)
    warps = rows // 8 if rows > experts else experts // 16
    return SomeRows(rows, experts, pl.cdiv(pieces, each), warps, 1 + min(MOST_PIECES, each))


def _others_on_tensor_cores(config: SomeRows, width: int) -> list[Config]:
    """Other tiles of experts, and more or fewer parts."""
    return [
        _cut(config.rows, tile, max(1, parts), width)
        for tile in (16, 32)
        for parts in (config.parts // 2, config.parts, config.parts * 2)
    ]


def _others_of_many_rows(config: Config) -> list[Config]:
    """Other tiles of experts, fewer or more parts, and more or fewer stages."""
    assert isinstance(config, SomeRows)
    parts = [each for each in (config.parts // 2, config.parts * 2) if each]
    found = varied(config, experts=(32, 64, 128), parts=parts, num_stages=(2, 3, 4))
    return list(dict.fromkeys(found))
