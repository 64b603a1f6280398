"""Which row of the states belongs to which sequence."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def in_pool(
    slots: Int[Array, " B"] | None, lengths: Int[Array, " B"], rows: int
) -> tuple[Int[Array, " B"] | None, Int[Array, " B"]]:
    """`slots` within 0 to rows - 1, and `lengths` with zero where they were not.

    Args:
        slots: row of each sequence; None if row b belongs to sequence b.
        lengths: real tokens of each sequence.
        rows: how many rows there are.
    """
    if slots is None:
        return None, lengths
    inside = (slots >= 0) & (slots < rows)
    return jnp.clip(slots, 0, rows - 1), jnp.where(inside, lengths, 0)


def take_rows(
    pool: Shaped[Array, "P *rest"], slots: Int[Array, " B"] | None
) -> Shaped[Array, "B *rest"]:
    """The row of each sequence; `slots` as from `in_pool`."""
    return pool if slots is None else pool[slots]


def put_rows(
    pool: Shaped[Array, "P *rest"],
    slots: Int[Array, " B"] | None,
    lengths: Int[Array, " B"],
    rows: Shaped[Array, "B *rest"],
) -> Shaped[Array, "P *rest"]:
    """The pool with new rows of the sequences that have tokens; both as from `in_pool`."""
    if slots is None:
        return rows
    return pool.at[jnp.where(lengths > 0, slots, pool.shape[0])].set(rows, mode="drop")
