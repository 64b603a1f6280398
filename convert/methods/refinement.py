"""Codes and scales improved in turn: each step keeps the rest fixed and lowers the output error."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dequant_matmul.layout import CENTRES, group_count
from qwen_jax.quant import WeightFormat

from .codes import Codes, as_stored, nearest
from .hessian import Factor, factor


@functools.partial(jax.jit, static_argnames="format")
def refined(
    weight: Float[Array, "*S O I"],
    hessian: Float[Array, "*S I I"],
    codes: Codes,
    format: WeightFormat,
    *,
    sweeps: Int[Array, ""] | int = 4,
    factored: Factor | None = None,
) -> Codes:
    """Coordinate descent on (W - Q) H (W - Q)^T, group by group: the scale, then each code.

    Args:
        weight: finite.
        hessian: mean of x x^T over the calibration inputs.
        codes: where to start.
        format: of the codes.
        sweeps: over all groups.
        factored: `factor` of the Hessian, if it is known already.
    """
    known: Factor = factored or factor(hessian)
    size, inputs = format.group_size, weight.shape[-1]
    padding = group_count(inputs, size) * size - inputs
    wide = [(0, 0)] * (weight.ndim - 2)
    weight = jnp.pad(weight.astype(jnp.float32), [*wide, (0, 0), (0, padding)])
    values = jnp.pad(codes.values.astype(jnp.float32), [*wide, (0, 0), (0, padding)])
    zero = jnp.full_like(codes.scale, CENTRES[format.bits]) if codes.zero is None else codes.zero
    values, scale = jnp.vectorize(
        functools.partial(_descend, format=format, sweeps=sweeps),
        signature="(o,p),(i,i),(o,p),(o,j),(o,j)->(o,p),(o,j)",
    )(weight, known.damped, values, codes.scale, zero)
    return Codes(values[..., :inputs].astype(jnp.uint8), scale, codes.zero)


def _descend(
    weight: Float[Array, "O I"],
    hessian: Float[Array, "I I"],
    values: Float[Array, "O I"],
    scale: Float[Array, "O J"],
    zero: Float[Array, "O J"],
    *,
    format: WeightFormat,
    sweeps: Int[Array, ""] | int,
) -> tuple[Float[Array, "O I"], Float[Array, "O J"]]:
    size, groups = format.group_size, scale.shape[1]
    padding = weight.shape[1] - hessian.shape[0]
    hessian = jnp.pad(hessian, ((0, padding), (0, padding)))
    spread = functools.partial(jnp.repeat, repeats=size, axis=1)
    exact = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    # What a change of each weight would gain, halved.
    gain = exact(weight - spread(scale) * (values - spread(zero)), hessian)

    def step(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        gain, values, scale = state
        group = number % groups
        start = group * size
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        rows = cut(hessian, axis=0)
        inner = cut(rows, axis=1)
        before, slope = cut(values, axis=1), cut(gain, axis=1)
        old, middle = scale[:, group], zero[:, group]

        direction = before - middle[:, None]
        curvature = jnp.sum(exact(direction, inner) * direction, axis=1)
        wanted = jnp.sum(slope * direction, axis=1)
        new = as_stored(old + wanted / jnp.maximum(curvature, 1e-30))
        change = new - old
        wins = (new > 0) & (2 * change * wanted - jnp.square(change) * curvature > 0)
        new = jnp.where(wins, new, old)
        slope = slope - exact((new - old)[:, None] * direction, inner)

        def column(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            slope, codes = state
            here = new * (codes[:, i] - middle)
            code = nearest(
                here + slope[:, i] / jnp.maximum(inner[i, i], 1e-30), new, middle, format.bits
            )
            moved = new * (code - codes[:, i])
            return slope - moved[:, None] * inner[i][None], codes.at[:, i].set(code)

        _, after = jax.lax.fori_loop(0, size, column, (slope, before))
        moved = new[:, None] * (after - middle[:, None]) - old[:, None] * direction
        values = jax.lax.dynamic_update_slice_in_dim(values, after, start, axis=1)
        return gain - exact(moved, rows), values, scale.at[:, group].set(new)

    _, values, scale = jax.lax.fori_loop(0, sweeps * groups, step, (gain, values, scale))
    return values, scale
