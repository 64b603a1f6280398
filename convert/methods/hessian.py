"""Hessians made safe to factor.

Few samples, an input that is always zero, or no sample at all leave a Hessian singular, and JAX's
Cholesky then answers NaN without an error.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

DAMPING = 0.01
ATTEMPTS = 5


class Factor(NamedTuple):
    """R of H = R R^T with R upper triangular, and whether it could be had.

    Attributes:
        root: [I, I]; the identity where `found` is False.
        damped: H with what was added to its diagonal, and its mean diagonal 1.
        found: False for a Hessian that is not finite, or that no damping made definite.
    """

    root: Float[Array, "I I"]
    damped: Float[Array, "I I"]
    found: Bool[Array, ""]


def factor(hessian: Float[Array, "I I"], damping: float = DAMPING) -> Factor:
    """Factor H + damping * mean(diag H) * 1, with ten times the damping as often as it needs.

    Inputs that are always zero get the mean of the others on the diagonal: whatever their weights
    become changes nothing.
    """
    size = hessian.shape[-1]
    eye = jnp.eye(size, dtype=jnp.float32)
    finite = jnp.all(jnp.isfinite(hessian))
    hessian = jnp.where(finite, hessian, eye)
    diagonal = jnp.diagonal(hessian)
    alive = diagonal > 0
    mean = jnp.sum(jnp.where(alive, diagonal, 0.0)) / jnp.maximum(
        jnp.sum(alive.astype(jnp.float32)), 1.0
    )
    mean = jnp.where(mean > 0, mean, 1.0)
    both = alive[:, None] & alive[None, :]
    scaled = jnp.where(both, hessian / mean, 0.0) + jnp.diag(jnp.where(alive, 0.0, 1.0))
    scaled = (scaled + scaled.T) * 0.5

    def attempt(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, _, _ = state
        damped = scaled + eye * (damping * 10.0**number)
        # Cholesky of the reversed matrix, reversed back, is upper triangular.
        root = jnp.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        return number + 1, root, damped

    def fails(state: tuple[Array, Array, Array]) -> Array:
        number, root, _ = state
        return (number < ATTEMPTS) & ~jnp.all(jnp.isfinite(root))

    state = attempt((jnp.float32(0), eye, eye))
    _, root, damped = jax.lax.while_loop(fails, attempt, state)
    found = finite & jnp.all(jnp.isfinite(root))
    return Factor(jnp.where(found, root, eye), jnp.where(found, damped, eye), found)
