"""How the work of the Triton kernel is cut."""

from __future__ import annotations

import dataclasses

FEW_TOKENS = 128
TILE_VALUES = 2048
VALUES_PER_WARP = 512


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        tile: tokens a program, a power of two.
        num_warps: warps a program.
    """

    tile: int
    num_warps: int


def heuristic(tokens: int, width: int) -> Config:
    """A configuration for so many tokens and heads so wide.

    Few tokens get a program each, of one warp: nothing has to wait for another.
    """
    tile = 1 if tokens <= FEW_TOKENS else TILE_VALUES // width
    return Config(tile, max(1, tile * width // VALUES_PER_WARP))
