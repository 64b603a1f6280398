"""How the work of the Triton kernel is cut for a shape and a device."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from .._compat import Target
from ..tuning import decide, varied

LOAD_BYTES = 16
MOST_NUMBERS = 2048
ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        rows: rows a program, a power of two.
        num_warps: warps a program.
    """

    rows: int
    num_warps: int


def config_for(target: Target, x: Any) -> Config:
    """For these rows on this device."""
    rows, width = x.size // x.shape[-1], x.shape[-1]
    key, config = f"rows={rows} width={width} {x.dtype}", heuristic(target, x)

    def others() -> list[Config]:
        near = [n for n in (config.rows // 2, config.rows * 2) if 1 <= n <= rows]
        warps = [n for n in (config.num_warps // 2, config.num_warps * 2) if 1 <= n <= 16]
        return varied(config, rows=near, num_warps=warps)

    return decide("rms_norm", target, key, config, others)


def heuristic(target: Target, x: Any) -> Config:
    """Many narrow rows share a program, few rows get one each."""
    rows, width = x.size // x.shape[-1], x.shape[-1]
    block = pl.next_power_of_2(width)
    shared = min(MOST_NUMBERS // block, rows // (ROUNDS * target.cores))
    taken = 1 << max(0, shared.bit_length() - 1)
    # A thread holds what it loads at once, so that arrays of other dtypes, loaded and stored
    # likewise, need not be exchanged between threads.
    warps = taken * block * x.dtype.itemsize // (32 * LOAD_BYTES)
    return Config(taken, max(1, min(16, warps)))
