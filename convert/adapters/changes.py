"""What an adapter does to rows of one tree tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from qwen_jax.checkpoint.transforms import Piece
from qwen_jax.errors import CheckpointError

# Bytes of float32 rows that are worked on at a time.
_BLOCK_BYTES = 16 << 20


class Change(Protocol):
    """A change of one matrix: of a tree tensor, or of one expert of a fused one."""

    def onto(self, block: np.ndarray, start: int) -> None:
        """Applies the part that falls into a run of rows.

        Args:
            block: float32 rows of the matrix, changed in place.
            start: number of the first one.
        """
        ...

    def same(self, other: object) -> bool:
        """Whether another change does the same, value for value."""
        ...


@dataclass(frozen=True, eq=False)
class Replacement:
    """Rows that take the place of the model's.

    Attributes:
        piece: which rows of `stored` are which rows of the matrix.
        stored: [O, ...], any float dtype.
    """

    piece: Piece
    stored: np.ndarray

    def onto(self, block: np.ndarray, start: int) -> None:
        """Applies the part that falls into a run of rows."""
        run, rows = _overlap(self.piece, len(self.stored), start, len(block))
        block[run] = self.stored[rows]

    def same(self, other: object) -> bool:
        """Whether another change does the same, value for value."""
        return isinstance(other, Replacement) and np.array_equal(self.stored, other.stored)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Single rows of an embedding that take the place of the model's.

    Attributes:
        ids: [n], numbers of the rows, all different.
        stored: [n, D], any float dtype.
    """

    ids: np.ndarray
    stored: np.ndarray

    def onto(self, block: np.ndarray, start: int) -> None:
        """Applies the part that falls into a run of rows."""
        inside = (self.ids >= start) & (self.ids < start + len(block))
        block[self.ids[inside] - start] = self.stored[inside]

    def same(self, other: object) -> bool:
        """Whether another change does the same, value for value."""
        return (
            isinstance(other, TokenRows)
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(self.stored, other.stored)
        )


@dataclass(frozen=True, eq=False)
class LowRank:
    """An update `scale * left @ right`.

    Attributes:
        piece: which rows of `left` are which rows of the matrix.
        left: [O, r], any float dtype.
        right: [r, I], any float dtype.
        scale: factor of the product.
    """

    piece: Piece
    left: np.ndarray
    right: np.ndarray
    scale: float

    def onto(self, block: np.ndarray, start: int) -> None:
        """Applies the part that falls into a run of rows."""
        run, rows = _overlap(self.piece, len(self.left), start, len(block))
        left, right = (array.astype(np.float32) for array in (self.left[rows], self.right))
        block[run] += (np.float32(self.scale) * left) @ right

    def same(self, other: object) -> bool:
        """Whether another change does the same, value for value."""
        return (
            isinstance(other, LowRank)
            and self.scale == other.scale
            and np.array_equal(self.left, other.left)
            and np.array_equal(self.right, other.right)
        )


def changed(path: str, rows: np.ndarray, start: int, changes: Sequence[Change]) -> np.ndarray:
    """Applies changes to a run of rows of a matrix, in float32, and rounds once.

    Args:
        path: tree path, for messages.
        rows: [n, ...], the run; left as it is.
        start: number of its first row.
        changes: applied in this order.

    Returns:
        New array of the same shape and dtype.

    Raises:
        CheckpointError: a value does not fit the dtype, or the adapter holds one that is not
            finite.
    """
    result = np.empty_like(rows)
    largest = np.float32(ml_dtypes.finfo(rows.dtype).max)
    step = max(1, _BLOCK_BYTES // max(1, 4 * rows[:1].size))
    for low in range(0, len(rows), step):
        before = rows[low : low + step]
        block = before.astype(np.float32)
        # What overflows is found below, and is an error.
        with np.errstate(over="ignore", invalid="ignore"):
            for change in changes:
                change.onto(block, start + low)
            fits = block.max(initial=0) <= largest and block.min(initial=0) >= -largest
        if not fits and np.isfinite(before).all():
            raise CheckpointError(
                f"the adapter makes values of {path} that are not finite numbers in {rows.dtype}; "
                "it is damaged, or was trained for another model"
            )
        result[low : low + step] = block
    return result


def _overlap(piece: Piece, stored: int, start: int, count: int) -> tuple[slice, np.ndarray]:
    """Finds the part of a piece in a run of rows.

    Args:
        piece: the piece.
        stored: number of stored rows.
        start: first row of the run.
        count: rows in the run.

    Returns:
        Where the part lies in the run, and the numbers of its stored rows.
    """
    low = max(start, piece.tree_start)
    high = max(low, min(start + count, piece.tree_start + piece.blocks * piece.rows))
    block, row = np.divmod(np.arange(low, high) - piece.tree_start, piece.rows)
    rows = block * (stored // piece.blocks) + piece.stored_start + row
    return slice(low - start, high - start), rows
