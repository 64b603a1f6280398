"""Hessians made safe to factor.

Few samples, an input that is always zero, or no sample at all leave a Hessian singular, and JAX's
Cholesky then answers NaN without an error.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

DAMPING = 0.01
ATTEMPTS = 5


class Factor(NamedTuple):
    """R of H = R R^T with R upper triangular, for each matrix of a stack.

    Attributes:
        order: int32 [*, I], the inputs in the order in which R has them.
        root: [*, I, I], R; the identity where `found` is False.
        damped: [*, I, I], H in the inputs' own order with what was added to its diagonal, and its
            mean diagonal 1.
        found: [*], False for a Hessian that is not finite, or that no damping made definite.
    """

    order: Int[Array, "*S I"]
    root: Float[Array, "*S I I"]
    damped: Float[Array, "*S I I"]
    found: Bool[Array, "*S"]


def factor(
    hessian: Float[Array, "*S I I"], *, act_order: bool = True, damping: float = DAMPING
) -> Factor:
    """Factor H + damping * mean(diag H) * 1, with ten times the damping as often as it needs.

    Inputs that are always zero get the mean of the others on the diagonal: whatever their weights
    become changes nothing.

    Args:
        hessian: may be singular, zero, or not finite.
        act_order: the inputs with the largest mean square first, else as they are.
        damping: of the first attempt.
    """
    stack = hessian.shape[:-2]
    flat = hessian.reshape(-1, *hessian.shape[-2:])
    # One after the other: the batched Cholesky of GPU libraries is made for small matrices.
    found = jax.lax.map(functools.partial(_factor, act_order=act_order, damping=damping), flat)
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), found)


def _factor(hessian: Float[Array, "I I"], *, act_order: bool, damping: float) -> Factor:
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
    order = jnp.arange(size, dtype=jnp.int32)
    if act_order:
        order = jnp.argsort(-diagonal).astype(jnp.int32)

    def attempt(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, _, _ = state
        damped = scaled + eye * (damping * 10.0**number)
        # Cholesky of the reversed matrix, reversed back, is upper triangular.
        reversed_order = order[::-1]
        root = jnp.linalg.cholesky(damped[reversed_order][:, reversed_order])[::-1, ::-1]
        return number + 1, root, damped

    def fails(state: tuple[Array, Array, Array]) -> Array:
        number, root, _ = state
        return (number < ATTEMPTS) & ~((number > 0) & jnp.all(jnp.isfinite(root)))

    _, root, damped = jax.lax.while_loop(fails, attempt, (jnp.float32(0), eye, eye))
    found = finite & jnp.all(jnp.isfinite(root))
    return Factor(order, jnp.where(found, root, eye), jnp.where(found, damped, eye), found)
