"""An online softmax over tiles of tokens, inside a Triton kernel.

Letters of this file: R rows of a program, S tokens of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._compat import dot, multiply_add

LOWEST = float(jnp.finfo(jnp.float32).min)
PATIENCE = 8.0


def softmax_scale(width: int) -> float:
    """Factor of the scores, for a softmax to base 2."""
    return width**-0.5 * math.log2(math.e)


class Softmax(NamedTuple):
    """An online softmax to base 2: largest score, sum of weights, weighted values."""

    largest: Float[Array, " R"]
    total: Float[Array, " R"]
    mixed: Float[Array, "R H"]

    @classmethod
    def empty(cls, rows: int, width: int) -> Softmax:
        """Nothing seen yet."""
        return cls(
            jnp.full((rows,), LOWEST, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, width), jnp.float32),
        )

    def add(
        self,
        scores: Float[Array, "R S"],
        scale: float,
        values: Float[Array, "S H"],
        visible: Bool[Array, "R S"] | None,
        patient: bool,
    ) -> Softmax:
        """One more tile; all of it is visible if `visible` is None.

        If patient, what was summed is rescaled only when a largest score has grown a lot: weights
        may be up to 2^PATIENCE, which float32 sums bear, and most tiles go without that work.
        """
        if visible is not None:
            scores = jnp.where(visible, scores, LOWEST)
        largest = jnp.maximum(self.largest, jnp.max(scores, axis=1))
        grown = None
        if patient:
            grown = jnp.max(largest - self.largest) > PATIENCE / scale
            largest = jnp.where(grown, largest, self.largest)
        decay = jnp.exp2((self.largest - largest) * scale)
        weights = jnp.exp2(multiply_add(scores, scale, (-scale * largest)[:, None]))
        if visible is not None:
            # In a row that has seen nothing so far, hidden scores are the largest too.
            weights = jnp.where(visible, weights, 0.0)
        if grown is None:
            mixed = self.mixed * decay[:, None]
        else:
            mixed = jax.lax.cond(grown, lambda x: x * decay[:, None], lambda x: x, self.mixed)
        return Softmax(
            largest,
            self.total * decay + jnp.sum(weights, axis=1),
            mixed + dot(weights.astype(values.dtype), values),
        )

    def result(self, wanted: Bool[Array, " R"]) -> Float[Array, "R H"]:
        """The attended values; zero in rows that saw nothing or are not wanted."""
        known = wanted & (self.total > 0)
        return self.mixed * jnp.where(known, 1.0 / self.total, 0.0)[:, None]
