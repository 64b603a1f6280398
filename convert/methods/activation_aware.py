"""Activation-aware scaling: inputs with large activations get finer steps.

Lin et al., AWQ (arXiv 2306.00978). Weights are rounded as W * t, with t a power of each input's
root mean square, and x / t meets them: 1 / t is the `input_scale` of a `QTensor`. Where it is to
be folded into what makes the inputs, it is a power of two, so that this is exact.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qwen_jax.quant import WeightFormat

from .codes import Codes, as_stored, dequantise
from .rounding import round_to_nearest

EXPONENTS = np.linspace(0.0, 1.0, 11, dtype=np.float32)
# An input that was never seen, or hardly, is treated as one with this share of the mean square.
FLOOR = 1e-4

# Inputs as [K, R, H]: those that differ in the middle index alone have one factor.
Ties = tuple[int, int, int]


@functools.partial(jax.jit, static_argnames=("format", "ties"))
def activation_aware(
    weight: Float[Array, "*S O I"],
    hessian: Float[Array, "*S I I"],
    format: WeightFormat,
    ties: Ties | None = None,
) -> tuple[Codes, Float[Array, "*S I"]]:
    """Codes and the `input_scale` that together lose least in the outputs.

    The exponent of t is searched from 0 (plain rounding) to 1, for each matrix of a stack.

    Args:
        weight: finite.
        hessian: mean of x x^T over the calibration inputs.
        format: of the codes.
        ties: which inputs share a factor that is to be folded, hence a power of two; None where it
            stays a vector, and each input has its own.
    """
    weight = weight.astype(jnp.float32)
    square = jnp.diagonal(hessian, axis1=-2, axis2=-1)
    mean = jnp.mean(square, axis=-1, keepdims=True)
    root = jnp.sqrt(jnp.maximum(_tied(square, ties), FLOOR * mean + 1e-30))
    root = root / jnp.exp(jnp.mean(jnp.log(root), axis=-1, keepdims=True))

    def attempt(exponent: Array) -> tuple[Array, Codes, Array]:
        input_scale = root**-exponent
        # In bfloat16's precision, so that products with it are rounded less.
        input_scale = as_stored(input_scale) if ties is None else _power_of_two(input_scale)
        importance = square * jnp.square(input_scale)
        codes = round_to_nearest(weight / input_scale[..., None, :], format, importance=importance)
        difference = weight - dequantise(codes, format) * input_scale[..., None, :]
        product = jnp.matmul(difference, hessian, precision=jax.lax.Precision.HIGHEST)
        return jnp.sum(product * difference, axis=(-2, -1)), codes, input_scale

    def step(i: Array, best: tuple[Array, Codes, Array]) -> tuple[Array, Codes, Array]:
        new = attempt(jnp.asarray(EXPONENTS)[i])
        wins = new[0] < best[0]

        def choose(a: Array, b: Array) -> Array:
            return jnp.where(wins.reshape(*wins.shape, *[1] * (a.ndim - wins.ndim)), a, b)

        return jax.tree.map(choose, new, best)

    _, codes, input_scale = jax.lax.fori_loop(
        1, len(EXPONENTS), step, attempt(jnp.float32(EXPONENTS[0]))
    )
    return codes, input_scale


def _tied(square: Float[Array, "*S I"], ties: Ties | None) -> Float[Array, "*S I"]:
    """Means over the inputs that share a factor."""
    if ties is None:
        return square
    apart = square.reshape(*square.shape[:-1], *ties)
    mean = jnp.mean(apart, axis=-2, keepdims=True)
    return jnp.broadcast_to(mean, apart.shape).reshape(square.shape)


def _power_of_two(x: Float[Array, "*S I"]) -> Float[Array, "*S I"]:
    """The nearest one; `exp2` need not be exact."""
    return jnp.ldexp(jnp.ones_like(x), jnp.round(jnp.log2(x)).astype(jnp.int32))
