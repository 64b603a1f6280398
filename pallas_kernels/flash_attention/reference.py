"""The definition in plain jax.numpy: tile after tile of queries."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compat import Target

QUERY_TILE = 512


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    window: int | None,
) -> Float[Array, "B T N H"]:
    """See `api.flash_attention`."""
    _, length, _, _ = q.shape
    tiles = [
        _attend_tile(q[:, start : start + QUERY_TILE], k, v, start, window)
        for start in range(0, length, QUERY_TILE)
    ]
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=1)


def refusals(target: Target, q: Any, k: Any, v: Any, *, window: int | None) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    reasons = []
    if q.shape[2] % k.shape[2]:
        reasons.append(f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads evenly")
    if window is not None and window < 1:
        reasons.append(f"window is {window}; accepted is a number from 1 on, or None")
    return reasons


def _attend_tile(
    q: Float[Array, "B t N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    start: int,
    window: int | None,
) -> Float[Array, "B t N H"]:
    """Attention of one tile of queries, whose first has position `start`.

    Keys behind the tile's last query are never touched.
    """
    batch, rows, query_heads, width = q.shape
    kv_heads = k.shape[2]
    seen = start + rows
    grouped = q.reshape(batch, rows, kv_heads, query_heads // kv_heads, width)
    scores = jnp.einsum(
        "btkgh,bskh->bkgts", grouped, k[:, :seen], preferred_element_type=jnp.float32
    )
    query_at = start + jnp.arange(rows)[:, None]
    key_at = jnp.arange(seen)[None, :]
    visible = key_at <= query_at
    if window is not None:
        visible &= key_at > query_at - window
    scores = jnp.where(visible[None, None, None], scores * jnp.float32(width**-0.5), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum(
        "bkgts,bskh->btkgh", weights, v[:, :seen], preferred_element_type=jnp.float32
    )
    return mixed.reshape(batch, rows, query_heads, width).astype(q.dtype)
