"""The definition in plain jax.numpy: tile after tile of queries."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._compat import Target

QUERY_TILE = 512


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cu_seqlens: Int[Array, " C1"] | None = None,
    *,
    window: int | None,
) -> Float[Array, "B T N H"]:
    """See `api.flash_attention`."""
    length = q.shape[1]
    first = jnp.zeros((length,), jnp.int32)
    if cu_seqlens is not None:
        first = first_visible(cu_seqlens, length)
        # Padding sees itself, as zeros.
        padding = (first == length)[None, :, None, None]
        q, k, v = (jnp.where(padding, 0, x) for x in (q, k, v))
        first = jnp.minimum(first, jnp.arange(length, dtype=jnp.int32))
    tiles = [
        _attend_tile(q[:, start : start + QUERY_TILE], k, v, first, start, window)
        for start in range(0, length, QUERY_TILE)
    ]
    return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=1)


def first_visible(cu_seqlens: Int[Array, " C1"], length: int) -> Int[Array, " T"]:
    """The first token of each token's sequence; `length` for padding."""
    token = jnp.arange(length, dtype=cu_seqlens.dtype)[:, None]
    starts = cu_seqlens[None, :]
    first = jnp.max(jnp.where(starts <= token, starts, -1), axis=1)
    return jnp.where((first >= 0) & (first < cu_seqlens[-1]), first, length).astype(jnp.int32)


def refusals(
    target: Target, q: Any, k: Any, v: Any, cu_seqlens: Any = None, *, window: int | None
) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    reasons = []
    if q.shape[2] % k.shape[2]:
        reasons.append(f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads evenly")
    if window is not None and not (isinstance(window, int) and 1 <= window < 2**31):
        reasons.append(f"window is {window}; accepted is a whole number from 1 on, or None")
    if cu_seqlens is not None and q.shape[0] != 1:
        reasons.append(f"there are {q.shape[0]} rows; with cu_seqlens, all sequences are in one")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2):
        reasons.append(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; it has a number more than there are "
            "sequences, 2 at least"
        )
    return reasons


def _attend_tile(
    q: Float[Array, "B t N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    first: Int[Array, " T"],
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
    visible = (key_at <= query_at) & (key_at >= first[start:seen, None])
    if window is not None:
        visible &= key_at > query_at - window
    scores = jnp.where(visible[None, None, None], scores * jnp.float32(width**-0.5), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    mixed = jnp.einsum(
        "bkgts,bskh->btkgh", weights, v[:, :seen], preferred_element_type=jnp.float32
    )
    return mixed.reshape(batch, rows, query_heads, width).astype(q.dtype)
