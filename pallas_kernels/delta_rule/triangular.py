"""The inverse of a unit lower triangular matrix, by dense products of small blocks."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LEAF = 8

_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def unit_lower_inverse(strict: Float[Array, "... n n"]) -> Float[Array, "... n n"]:
    """(I + A)^-1 for a strictly lower triangular A, n being 8 times a power of two.

    Diagonal blocks of 8 are inverted as a product of powers, which cannot grow far in so few
    steps; then pairs of blocks are joined until one is left. As a product of powers of the whole
    A it would be shorter, but on repetitive text those powers grow like binomial coefficients
    before they cancel, and nothing is left of a float32. Substitution row by row is as accurate
    as this and 200 times slower in XLA on a CPU.
    """
    negative = -_blocks(strict, LEAF, below=False)
    power = _matmul(negative, negative)
    inverse = jnp.broadcast_to(jnp.eye(LEAF, dtype=strict.dtype), negative.shape) + negative
    inverse += _matmul(inverse, power)
    inverse += _matmul(inverse, _matmul(power, power))
    size = LEAF
    while size < strict.shape[-1]:
        top, bottom = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_matmul(bottom, _matmul(_blocks(strict, size, below=True), top))
        upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def _blocks(a: Float[Array, "... n n"], size: int, *, below: bool) -> Float[Array, "... c s s"]:
    """Blocks on the diagonal; with `below`, the lower left one of each pair on the diagonal."""
    step = 2 * size if below else size
    starts = [(i + size if below else i, i) for i in range(0, a.shape[-1], step)]
    blocks = [a[..., row : row + size, column : column + size] for row, column in starts]
    return jnp.stack(blocks, axis=-3)
