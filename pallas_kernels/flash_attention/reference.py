"""Causal self-attention of whole sequences, without a cache."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

QUERY_TILE = 512


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Causal softmax attention with grouped queries, scores in float32.

    Query head n reads key/value head n // (N / K). Padding on the right needs no mask: no real
    token sees it.

    Args:
        q: queries, already rotated; scaled by H^-0.5 here.
        k: keys, already rotated.
        v: values.
        window: if given, a query sees its own position and the window - 1 before it.

    Returns:
        The attended values in q's dtype.
    """
    _, length, _, _ = q.shape
    tiles = [
        _attend_tile(q[:, start : start + QUERY_TILE], k, v, start, window)
        for start in range(0, length, QUERY_TILE)
    ]
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=1)


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
