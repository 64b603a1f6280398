"""Causal attention of whole sequences as a Triton kernel.

A program attends for a tile of the queries that share a key/value head. Those with the most keys
are started first, so that the short ones fill the gaps at the end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from .._compat import triton_call
from ..attention.cut import Cut
from ..attention.rows import flat_rows, load_rows, store_rows
from ..attention.tiles import Sight, attend_tiles


def attend_causally(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    first: Int[Array, " T"] | None,
    *,
    window: int | None,
    cut: Cut,
) -> Float[Array, "B T N H"]:
    """Attention of each token over those of its row from `first` to itself.

    Args:
        q: queries.
        k: keys.
        v: values.
        first: first token that each token sees; T or more for padding. Zero for all if None.
        window: sliding window, if any.
        cut: how the work is cut.

    Returns:
        The attended values; zero at padding.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    tiles = cut.tiles(length * group)

    def kernel(q_ref, key_ref, value_ref, *refs) -> None:
        number, owner = tiles - 1 - pl.program_id(0), pl.program_id(1)
        sequence, head = owner // kv_heads, owner % kv_heads
        row = number * cut.rows + jnp.arange(cut.rows, dtype=jnp.int32)
        token = row // group
        exists = token < length
        sight = _sight(refs[0] if first is not None else None, token, exists, window)

        def load(number: Array, wanted: Bool[Array, " S"] | None) -> tuple[Array, Array]:
            place = (sequence * length + number * cut.tile) * kv_heads + head
            place += kv_heads * jnp.arange(cut.tile, dtype=jnp.int32)
            return load_rows(key_ref, place, wanted), load_rows(value_ref, place, wanted)

        place = ((sequence * length + token) * kv_heads + head) * group + row % group
        rows = load_rows(q_ref, place, sight.any)
        state = attend_tiles(rows, sight, load, cut, patient=True)
        store_rows(refs[-1], place, exists, state.result(sight.any))

    call = triton_call(
        kernel,
        name="flash_attention",
        grid=(tiles, batch * kv_heads),
        out_shape=jax.ShapeDtypeStruct((batch * length * heads, width), q.dtype),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    flat = (flat_rows(x) for x in (q, k, v))
    return call(*flat, *(() if first is None else (first,))).reshape(q.shape)


def _sight(
    first_ref: Any, token: Int[Array, " R"], exists: Bool[Array, " R"], window: int | None
) -> Sight:
    first = jnp.zeros_like(token)
    if first_ref is not None:
        first = plt.load(first_ref.at[token], mask=exists, other=jnp.iinfo(jnp.int32).max)
    if window is not None:
        first = jnp.maximum(first, token - window + 1)
    return Sight(first, jnp.where(exists, token, -1))
