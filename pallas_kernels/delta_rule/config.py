"""How the work of the Triton kernels is cut for a shape and a device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from .._compat import Target
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
class Precision:
    """Into how many parts of bfloat16 the operands of products are split; see `parts.split`.

    Attributes:
        state: of keys and of all that the state comes from. It remembers every rounding.
        reading: of queries and attention, which only the read-outs come from.
    """

    state: int
    reading: int


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
    batch, heads, _, width = delta_state.shape
    # Wider tiles repeat less of the convolution, narrower ones fill more multiprocessors.
    crowded = batch * heads * width // 64 >= 4 * target.cores
    return DecodeConfig(min(width, 64 if crowded else 32), 4)


def precision(dtype: Any) -> Precision:
    """For read-outs of this dtype."""
    return Precision(2, 1) if dtype == jnp.bfloat16 else Precision(3, 3)


def pass_config(target: Target, dtype: Any, delta_state: Any) -> PassConfig:
    """For read-outs of this dtype and a state of these shapes on this device."""
    _, _, key_width, width = delta_state.shape
    parts = precision(dtype)
    columns = parts.state * (key_width + CHUNK) + parts.reading * (key_width + CHUNK)
    chunk = CHUNK * (2 * columns + 4 * min(width, 64))
    return PassConfig(min(width, 64), 4, 2 if 2 * chunk <= target.shared_memory else 1)
