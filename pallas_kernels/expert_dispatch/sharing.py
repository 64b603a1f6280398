"""Which slots share an expert."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def rows_of_experts(
    ids: Int[Array, "M A"], experts: int, most: int
) -> tuple[Int[Array, " S"], Int[Array, "S R"]]:
    """For each slot that is the first of a row: its expert, and the slots of the row.

    Args:
        ids: experts.
        experts: E; slots with other ids are in no row.
        most: slots of a row; an expert with more has several.

    Returns:
        Experts, -1 where a slot is not the first; slots, S where a row has no more.
    """
    flat = ids.reshape(-1)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    filled = (flat >= 0) & (flat < experts)
    alike = (flat[:, None] == flat[None, :]) & filled[None, :]
    rank = jnp.sum(alike & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)
    behind = jnp.where(alike, rank[None, :] - rank[:, None], -1)
    taken = behind[:, None, :] == jnp.arange(most, dtype=jnp.int32)[None, :, None]
    slots = jnp.min(jnp.where(taken, index[None, None, :], flat.size), axis=2)
    return jnp.where(filled & (rank % most == 0), flat, -1), slots
