"""How the work of the Triton kernels is cut for a shape and a device."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._compat import Target
from ..tuning import tuned
from .rule import CHUNK

SCRATCH_BYTES = 72 * 1024


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


def decode_config(target: Target, delta_state: Any) -> DecodeConfig:
    """For these shapes on this device."""
    if (entry := tuned("delta_rule decode", target, _key(delta_state))) is not None:
        return DecodeConfig(**entry)
    batch, heads, _, width = delta_state.shape
    # Wider tiles repeat less of the convolution, narrower ones fill more multiprocessors.
    crowded = batch * heads * width // 64 >= 4 * target.cores
    return DecodeConfig(min(width, 64 if crowded else 32), 4)


def pass_config(target: Target, delta_state: Any) -> PassConfig:
    """For these shapes on this device."""
    if (entry := tuned("delta_rule pass", target, _key(delta_state))) is not None:
        return PassConfig(**entry)
    batch, heads, key_width, width = delta_state.shape
    tile = 32 if batch * heads * width // 32 > target.cores // 2 else 16
    # Queries, keys twice, two matrices of the chunk, values; and the operands of the products.
    ahead = 4 * CHUNK * (3 * key_width + 2 * CHUNK + 32) + SCRATCH_BYTES
    if ahead <= target.shared_memory:
        return PassConfig(min(width, tile), 4, 2)
    return PassConfig(min(width, 16), 4, 1)


def _key(delta_state: Any) -> str:
    """What entries of `tuning_data` are found by."""
    batch, heads, key_width, width = delta_state.shape
    return f"batch={batch} heads={heads} widths={key_width}x{width}"
