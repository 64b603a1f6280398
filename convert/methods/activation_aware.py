"""Activation-aware scaling: inputs with large activations get finer steps.

Lin et al., AWQ (arXiv 2306.00978). Weights are rounded as W * t, with t a power of each input's
root mean square, and x / t meets them: 1 / t is the `input_scale` of a `QTensor`.
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


@functools.partial(jax.jit, static_argnames=("format",))
def activation_aware(
    weight: Float[Array, "*S O I"], hessian: Float[Array, "*S I I"], format: WeightFormat
) -> tuple[Codes, Float[Array, "*S I"]]:
    """Codes and the `input_scale` that together lose least in the outputs.

    The exponent of t is searched from 0 (plain rounding) to 1, for each matrix of a stack.

    Args:
        weight: finite.
        hessian: mean of x x^T over the calibration inputs.
        format: of the codes.
    """
    weight = weight.astype(jnp.float32)
    square = jnp.diagonal(hessian, axis1=-2, axis2=-1)
    mean = jnp.mean(square, axis=-1, keepdims=True)
    root = jnp.sqrt(jnp.maximum(square, FLOOR * mean + 1e-30))
    root = root / jnp.exp(jnp.mean(jnp.log(root), axis=-1, keepdims=True))

    def attempt(exponent: Array) -> tuple[Array, Codes, Array]:
        # In bfloat16's precision, so that products with it are rounded less.
        input_scale = as_stored(root**-exponent)
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
