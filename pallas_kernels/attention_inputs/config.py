"""How the work of the Triton kernel is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._compat import Target
from ..tuning import decide

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


def config_for(target: Target, q: Any, k: Any, pool: Any) -> Config:
    """For these queries and keys, and a pool of this dtype or none, on this device."""
    batch, length, heads, _ = q.shape
    kv_heads, width = k.shape[2:]
    tokens = batch * length
    kept = "no pool" if pool is None else pool.dtype
    key = f"tokens={tokens} heads={heads}/{kv_heads} width={width} {q.dtype} {kept}"
    config = heuristic(tokens, width)

    def others() -> list[Config]:
        tiles = {config.tile // 2, config.tile, config.tile * 2} - {0}
        warps = {config.num_warps // 2, config.num_warps, config.num_warps * 2} - {0}
        return [Config(tile, count) for tile in sorted(tiles) for count in sorted(warps)]

    return decide("attention_inputs", target, key, config, others)


def heuristic(tokens: int, width: int) -> Config:
    """A configuration for so many tokens and heads so wide.

    Few tokens get a program each, of one warp: nothing has to wait for another.
    """
    tile = 1 if tokens <= FEW_TOKENS else TILE_VALUES // width
    return Config(tile, max(1, tile * width // VALUES_PER_WARP))
