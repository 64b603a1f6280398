"""Rows of matrices in global memory, inside a Triton kernel.

Letters of this file: r rows, c columns.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Int, Shaped


def flat_rows(x: Shaped[Array, "*r H"]) -> Shaped[Array, "R H"]:
    """An array as kernels index it: the matrix of all its rows."""
    return x.reshape(-1, x.shape[-1])


def load_rows(
    ref: Any,
    row: Int[Array, " r"],
    wanted: Bool[Array, " r"] | None,
    column: Int[Array, "*r c"] | None = None,
    wanted_columns: Bool[Array, " c"] | None = None,
    otherwise: int = 0,
) -> Shaped[Array, "r c"]:
    """Chosen rows of a matrix, and chosen columns of these.

    Args:
        ref: the matrix.
        row: numbers of the rows.
        wanted: rows to read; all if None.
        column: numbers of the columns, the same in all rows or not; all if None.
        wanted_columns: columns to read of the wanted rows; all if None.
        otherwise: what stands where nothing is read.
    """
    if column is None:
        column = jnp.arange(ref.shape[1], dtype=jnp.int32)
    at, mask = _grid(row, column, wanted)
    if mask is not None and wanted_columns is not None:
        mask &= wanted_columns[None, :]
    other = None if mask is None else otherwise
    return plt.load(ref.at[at], mask=mask, other=other)


def store_rows(
    ref: Any, row: Int[Array, " r"], wanted: Bool[Array, " r"], values: Shaped[Array, "r H"]
) -> None:
    """Writes the wanted rows of a matrix, in its dtype."""
    at, mask = _grid(row, jnp.arange(ref.shape[1], dtype=jnp.int32), wanted)
    plt.store(ref.at[at], values.astype(ref.dtype), mask=mask)


def _grid(
    row: Int[Array, " r"], column: Int[Array, "*r c"], wanted: Bool[Array, " r"] | None
) -> tuple[tuple[Array, Array], Array | None]:
    """Row and column of each element, and whether it is wanted; each [r, c]."""
    size = (row.shape[0], column.shape[-1])
    at = jnp.broadcast_to(row[:, None], size), jnp.broadcast_to(column, size)
    return at, None if wanted is None else jnp.broadcast_to(wanted[:, None], size)
