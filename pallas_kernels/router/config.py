"""How the work of the kernel of few rows is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from .._compat import Target
from ..tuning import decide, varied

# More rows than these are multiplied by XLA.
FEW_ROWS = 64
# What may be tried: warps that share the columns, and warps.
SHARES = ((1, 4), (2, 4), (4, 4), (4, 8), (8, 8))


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

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


def config_for(target: Target, x: Any, weight: Any) -> Config:
    """For these rows and this weight on this device."""
    (rows, width), experts = x.shape, weight.shape[0]
    key = f"rows={rows} width={width} experts={experts} {x.dtype} {weight.dtype}"
    config = heuristic(rows)

    def others() -> list[Config]:
        sizes = {"rows": (config.rows // 2, config.rows * 2), "experts": (1, 2, 4)}
        shares = [Config(config.rows, config.experts, parts, w) for parts, w in SHARES]
        near = [*varied(config, **sizes), *shares]
        return [each for each in near if 1 <= each.rows * each.experts <= 32]

    return decide("router", target, key, config, others)


def heuristic(rows: int) -> Config:
    """Many warps, of few columns each, while rows are few; many products a number read, later.

    Args:
        rows: M.
    """
    if rows <= 2:
        return Config(rows)
    if rows <= 16:
        return Config(min(8, pl.next_power_of_2(rows)), 2, 4, 4)
    return Config(8, 2 if rows <= 32 else 4, 1, 4)
