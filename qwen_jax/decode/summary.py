"""What one pass over the logits tells: enough for a greedy step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Summary(NamedTuple):
    """Of each row of logits.

    Attributes:
        largest: the largest logit.
        best: its id; the lowest of equals.
        log_sum: log of the sum of exp(logit - largest).
        finite: no logit at all was NaN or infinite.
    """

    largest: Float[Array, " B"]
    best: Int[Array, " B"]
    log_sum: Float[Array, " B"]
    finite: Bool[Array, " B"]


def summarise(logits: Float[Array, "B V"], vocab_size: Int[Array, ""]) -> Summary:
    """One reduction, so that a GPU reads the logits once and launches no more than two kernels.

    Args:
        logits: float32.
        vocab_size: ids from here on count for `finite` alone.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    possible = jnp.where(ids < vocab_size, logits, -jnp.inf)
    ones = jnp.where(ids < vocab_size, jnp.ones_like(logits), jnp.zeros_like(logits))
    of_each = (possible, ids, ones, jnp.isfinite(logits))
    of_none = (
        jnp.float32(-jnp.inf),
        jnp.int32(logits.shape[1]),
        jnp.float32(0),
        jnp.bool_(True),
    )
    largest, best, total, finite = jax.lax.reduce(of_each, of_none, _joined, (1,))
    return Summary(largest, best, jnp.log(total), finite)


def _joined(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    """The summary of two parts: largest logit, its id, sum of exponentials below it, finite."""
    a_leads = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    largest, best = jnp.where(a_leads, a[0], b[0]), jnp.where(a_leads, a[1], b[1])
    # Of equals, which may be -inf, no difference is taken: it would be NaN.
    distance = jnp.where(a[0] == b[0], jnp.float32(0), -jnp.abs(a[0] - b[0]))
    leading, other = jnp.where(a_leads, a[2], b[2]), jnp.where(a_leads, b[2], a[2])
    return largest, best, leading + other * jnp.exp(distance), a[3] & b[3]
