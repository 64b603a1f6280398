"""How the work of the Triton kernels is cut for a shape and a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from .._compat import Target
from ..tuning import decide, varied
from .rule import CHUNK


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """For one token a sequence.

    Attributes:
        tile: value columns a program.
        num_warps: warps a program.
    """

    tile: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """For the pass over the chunks.

    Attributes:
        tile: value columns a program.
        num_warps: warps a program.
        num_stages: 2 to load a chunk while the one before is worked on, 1 not to.
    """

    tile: int
    num_warps: int
    num_stages: int


def decode_config(target: Target, batch: int, delta_state: Any) -> DecodeConfig:
    """For so many sequences with a state of these shapes on this device."""
    _, heads, key_width, width = delta_state.shape
    key = f"batch={batch} heads={heads} widths={key_width}x{width} {delta_state.dtype}"
    # Wider tiles repeat less of the convolution, narrower ones fill more multiprocessors.
    crowded = batch * heads * width // 64 >= 4 * target.cores
    config = DecodeConfig(min(width, 64 if crowded else 32), 4)
    tiles = [tile for tile in (16, 32, 64) if tile <= width]
    return decide(
        "delta_rule decode",
        target,
        key,
        config,
        lambda: varied(config, tile=tiles, num_warps=(2, 8)),
    )


def part_count(dtype: Any) -> int:
    """Into how many parts operands of products are split, for read-outs of this dtype.

    One part would be too few even for bfloat16: the state remembers every rounding, and a few
    read-outs are dozens of times larger than most.
    """
    return 2 if dtype == jnp.bfloat16 else 3


def pass_config(target: Target, qkv: Any, delta_state: Any) -> PassConfig:
    """For tokens [B, T, C] of this dtype and a state of these shapes on this device."""
    _, heads, key_width, width = delta_state.shape
    key = f"batch={qkv.shape[0]} heads={heads} widths={key_width}x{width} {qkv.dtype}"
    config = _pass_heuristic(target, qkv, key_width, width)
    tiles = [tile for tile in (32, 64) if tile <= width]
    return decide(
        "delta_rule pass",
        target,
        key,
        config,
        lambda: varied(config, tile=tiles, num_warps=(4, 8), num_stages=(1, 2)),
    )


def _pass_heuristic(target: Target, qkv: Any, key_width: int, width: int) -> PassConfig:
    if not target.spares_registers:
        return PassConfig(min(width, 32), 8, 1)
    tile = min(width, 64)
    # Queries, keys, two matrices of the chunk; and values.
    chunk = CHUNK * (2 * part_count(qkv.dtype) * 2 * (key_width + CHUNK) + 4 * tile)
    return PassConfig(tile, 4, 2 if 2 * chunk <= target.shared_memory else 1)
