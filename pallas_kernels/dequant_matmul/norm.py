"""A norm of the rows in front of products, and its part in the kernel of few rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compat import multiply_add


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """Rows x / sqrt(mean(x^2) + eps) * w of w's dtype, see `rms_norm`.

    As a part of the kernel of few rows it stays float32, and the factor of a whole row is left to
    the sums: so rows are read once.

    Attributes:
        weight: w, [I].
        eps: keeps rows of zeros finite.
        zero_centred: multiply by 1 + w instead.
    """

    weight: Float[Array, " I"]
    eps: float = dataclasses.field(metadata={"static": True})
    zero_centred: bool = dataclasses.field(default=False, metadata={"static": True})

    # JAX also builds trees with leaves that are no arrays.
    __no_type_check__ = True

    def settings(self) -> dict[str, Any]:
        """Of `rms_norm`."""
        return {
            "eps": self.eps,
            "zero_centred": self.zero_centred,
            "dtype": jnp.dtype(self.weight.dtype),
        }

    def weighted(self, x: Float[Array, "*s"], weight: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """X times w in float32, not rounded; products with it lack but `factor`."""
        return multiply_add(x, weight, x) if self.zero_centred else x * weight

    def factor(self, squares: Float[Array, "o u"]) -> Float[Array, "o 1"]:
        """What is left of the norm of a row, whose squares add up along the last axis."""
        total = jnp.sum(squares, axis=1, keepdims=True)
        return jax.lax.rsqrt(total / self.weight.shape[0] + self.eps)
