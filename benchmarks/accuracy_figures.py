"""How far logits lie apart, and what is right: the figures of `benchmarks/accuracy.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BAR = 1e-3
"""Largest mean KL divergence, in nats."""
CLEAR = 0.1
"""A token is clear where the best two logits are further apart than this share of the logits'
standard deviation."""

Row = dict[str, Any]
PAIRS = (("kernels", "reference"), ("kernels", "float32"), ("reference", "float32"))


def pair(one: str, other: str) -> str:
    """What the figures of `one` with `other` as the base are called."""
    return f"{one} against {other}"


@jax.jit
def _compare(a: Float[Array, "*rows V"], b: Float[Array, "*rows V"]) -> tuple[Array, ...]:
    """By row: norms of a - b and b, KL(b || a), equal tokens, b's margin; and b's deviation."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    p, q = jax.nn.log_softmax(b), jax.nn.log_softmax(a)
    # The last two terms cancel in the sum, and keep rounding from making it negative.
    kl = jnp.sum(jnp.exp(p) * (p - q) - jnp.exp(p) + jnp.exp(q), axis=-1)
    best = jax.lax.top_k(b, 2)[0]
    far, norm = (jnp.linalg.norm(x, axis=-1) for x in (a - b, b))
    return far, norm, kl, a.argmax(-1) == b.argmax(-1), best[:, 0] - best[:, 1], b.std()


def distance(found: Sequence[Array], base: Sequence[Array]) -> Row:
    """How far logits lie from those they are compared with.

    Args:
        found: float32 logits [..., V], in as many parts as wanted.
        base: the same shapes.

    Returns:
        Figures over all rows. Margins are in standard deviations of the base's logits; a figure
        that no row has is None.
    """
    parts = [_compare(a, b) for a, b in zip(found, base, strict=True)]
    columns = zip(*(part[:5] for part in parts), strict=True)
    far, norm, kl, same, margin = (
        np.concatenate([np.asarray(part, np.float64) for part in column]) for column in columns
    )
    margin, same = margin / float(parts[0][5]), same.astype(bool)
    clear = margin > CLEAR
    return {
        "rows": len(kl),
        "relative_error": float(np.sqrt((far**2).sum() / (norm**2).sum())),
        "row_error_median": float(np.median(far / norm)),
        "row_error_max": float((far / norm).max()),
        "mean_kl": float(kl.mean()),
        "median_kl": float(np.median(kl)),
        "max_kl": float(kl.max()),
        "same_tokens": float(same.mean()),
        "clear_rows": int(clear.sum()),
        "same_tokens_where_clear": float(same[clear].mean()) if clear.any() else None,
        "largest_margin_of_a_change": None if same.all() else float(margin[~same].max()),
    }


def distances(logits: Mapping[str, Sequence[Array]]) -> Row:
    """The three pairs of paths, and whether the kernels are as near as the bar asks.

    From float32 they must never be further than that. From the reference, which rounds as they do,
    but elsewhere, they may be as far as it is from float32 itself: where that is more, it is the
    bar, and "bar_is" says so.

    Args:
        logits: of "kernels", "reference" and "float32", as `distance` takes them.
    """
    row: Row = {pair(a, b): distance(logits[a], logits[b]) for a, b in PAIRS}
    return row | verdict(row)


def verdict(row: Mapping[str, Row]) -> Row:
    """The bar from the reference, where it comes from, and whether all is met; NaN does not."""
    found, exact, own = (row[pair(*names)]["mean_kl"] for names in PAIRS)
    bar = max(BAR, own)
    return {
        "bar": bar,
        "bar_is": "fixed" if bar == BAR else pair(*PAIRS[2]),
        "right": found <= bar and exact <= BAR,
    }


def unchanged(found: Sequence[Array], base: Sequence[Array]) -> Row:
    """`distance` of two runs of the same path; right if tokens that are clear are equal too."""
    row = distance(found, base)
    same = row["same_tokens_where_clear"] in (None, 1.0)
    return row | {"bar": BAR, "right": row["mean_kl"] <= BAR and same}


def bit_equal(runs: Sequence[Mapping[str, np.ndarray]]) -> Row:
    """Which arrays are equal in all runs."""
    first, *others = runs
    equal = {
        name: all(np.array_equal(array, other[name]) for other in others)
        for name, array in first.items()
    }
    return {"runs": len(runs), "equal": equal, "right": all(equal.values())}
