"""Arrays of which no number is read or written, only where.

The interpreter moves reads past the end back, and leaves such writes out. A device has other rows
there.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


class Rows:
    """An array of some shape. What is indexed is itself and the places."""

    def __init__(self, *shape: int):
        self.shape, self.at = shape, self

    def __getitem__(self, index: Any) -> tuple[Rows, list[np.ndarray]]:
        return self, [np.asarray(each) for each in index]


def touched(at: tuple[Rows, list[np.ndarray]], mask: Any) -> np.ndarray:
    """Which numbers are; none past the end."""
    ref, index = at
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), index[0].shape)
    for each, size in zip(index, ref.shape, strict=True):
        assert np.all((each >= 0) & (each < size), where=mask)
    return np.ravel_multi_index(index, ref.shape, mode="clip")[mask]


def load(ref: Rows, *at: Any, mask: Any = None) -> Any:
    """In place of `operands.load`."""
    touched(ref[at], mask)
    return jnp.zeros(np.shape(at[0]))


def access(at: tuple[Rows, list[np.ndarray]], *_: Any, mask: Any = None, other: Any = 0) -> Any:
    """In place of Pallas's load and store."""
    touched(at, mask)
    assert mask is None or other == 0
    return jnp.zeros(at[1][0].shape)
