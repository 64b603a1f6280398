"""GPTQ: round one input after the other, and let those to come make up for the error.

Frantar et al. (arXiv 2210.17323).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qwen_jax.quant import WeightFormat

from .codes import Codes, nearest, of_inputs
from .hessian import Factor, factor
from .rounding import round_to_nearest

BLOCK = 64


@functools.partial(jax.jit, static_argnames=("format", "act_order"))
def gptq(
    weight: Float[Array, "*S O I"],
    hessian: Float[Array, "*S I I"],
    format: WeightFormat,
    *,
    act_order: bool = True,
    factored: Factor | None = None,
) -> Codes:
    """Codes that lose little in the outputs on the calibration inputs.

    Scales are searched before, weighted by the Hessian's diagonal. So the order in which inputs are
    rounded is free, while groups stay consecutive.

    Args:
        weight: finite.
        hessian: mean of x x^T over the inputs x that the matrix meets; may be singular or zero.
        format: of the codes.
        act_order: round the inputs with the largest mean square first.
        factored: `factor` of the Hessian, in the order to round in, if it is known already.
    """
    weight = weight.astype(jnp.float32)
    importance = jnp.diagonal(hessian, axis1=-2, axis2=-1)
    start = round_to_nearest(weight, format, importance=importance)
    known: Factor = factored or factor(hessian, act_order=act_order)
    values = jnp.vectorize(
        functools.partial(_compensated, bits=format.bits),
        signature="(o,i),(i),(i,i),(o,i),(o,i)->(o,i)",
    )(weight, known.order, known.root, *of_inputs(start, format))
    return start._replace(values=values.astype(jnp.uint8))


def _compensated(
    weight: Float[Array, "O I"],
    order: Int[Array, " I"],
    root: Float[Array, "I I"],
    scale: Float[Array, "O I"],
    zero: Float[Array, "O I"],
    *,
    bits: int,
) -> Float[Array, "O I"]:
    """The codes, with given scales."""
    outputs, inputs = weight.shape
    # Row i says what an error at input i asks of the inputs after it.
    upper = jax.scipy.linalg.solve_triangular(root, jnp.eye(inputs, dtype=jnp.float32), lower=False)
    upper = upper / jnp.diagonal(upper)[:, None]

    padding = -inputs % BLOCK
    upper = jnp.pad(upper, ((0, padding), (0, padding)))
    columns = [jnp.pad(x[:, order], ((0, 0), (0, padding))) for x in (weight, scale, zero)]
    columns[1] = jnp.where(jnp.arange(inputs + padding)[None] < inputs, columns[1], 1.0)

    def block(number: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        remaining, codes = state
        start = number * BLOCK
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=BLOCK)
        part, part_scale, part_zero = (cut(x, axis=1) for x in (remaining, columns[1], columns[2]))
        rows = cut(upper, axis=0)
        inner = cut(rows, axis=1)

        def column(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            part, codes, errors = state
            code = nearest(part[:, i], part_scale[:, i], part_zero[:, i], bits)
            error = part[:, i] - part_scale[:, i] * (code - part_zero[:, i])
            part = part - error[:, None] * jnp.where(jnp.arange(BLOCK) > i, inner[i], 0.0)[None]
            return part, codes.at[:, i].set(code), errors.at[:, i].set(error)

        none = jnp.zeros((outputs, BLOCK), jnp.float32)
        _, found, errors = jax.lax.fori_loop(0, BLOCK, column, (part, none, none))
        change = jnp.matmul(errors, rows, precision=jax.lax.Precision.HIGHEST)
        return remaining - change, jax.lax.dynamic_update_slice_in_dim(codes, found, start, axis=1)

    blocks = (inputs + padding) // BLOCK
    state = (columns[0], jnp.zeros_like(columns[0]))
    _, codes = jax.lax.fori_loop(0, blocks, block, state)
    return jnp.zeros_like(weight).at[:, order].set(codes[:, :inputs])
