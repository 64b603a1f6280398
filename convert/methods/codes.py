"""Codes of a matrix before they are packed, and the numbers that they stand for."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

from pallas_kernels.dequant_matmul.layout import CENTRES, group_count
from qwen_jax.quant import WeightFormat

SMALLEST_SCALE = 2.0**-100


class Codes(NamedTuple):
    """A matrix or a stack of them as scale * (value - zero), not packed yet.

    Attributes:
        values: uint8 [*, O, I], 0 to 2^bits - 1.
        scale: float32 [*, O, J], of each group, above zero and representable in bfloat16.
        zero: float32 [*, O, J], representable in bfloat16; None in a symmetric format, whose
            middle is `layout.CENTRES`.
    """

    values: UInt[Array, "*S O I"]
    scale: Float[Array, "*S O J"]
    zero: Float[Array, "*S O J"] | None


@functools.partial(jax.jit, static_argnames="format")
def dequantise(codes: Codes, format: WeightFormat) -> Float[Array, "*S O I"]:
    """The numbers that codes stand for, float32."""
    scale, zero = of_inputs(codes, format)
    return scale * (jnp.asarray(codes.values).astype(jnp.float32) - zero)


def of_inputs(
    codes: Codes, format: WeightFormat
) -> tuple[Float[Array, "*S O I"], Float[Array, "*S O I"]]:
    """Scale and zero point of each weight."""
    inputs = codes.values.shape[-1]

    def spread(x: Array) -> Array:
        return jnp.repeat(jnp.asarray(x), format.group_size, axis=-1)[..., :inputs]

    scale = spread(codes.scale)
    if codes.zero is None:
        return scale, jnp.full_like(scale, CENTRES[format.bits])
    return scale, spread(codes.zero)


def nearest(
    weight: Float[Array, "*S"], scale: Float[Array, "*S"], zero: Float[Array, "*S"], bits: int
) -> Float[Array, "*S"]:
    """The code whose level is nearest, as a float."""
    return jnp.clip(jnp.round(weight / scale + zero), 0, 2**bits - 1)


def as_stored(scale: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Rounded to bfloat16's precision, as files keep scales and zero points."""
    # Not two casts: XLA may leave out both.
    return jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=7)


def in_groups(x: Float[Array, "*S I"], group_size: int) -> Float[Array, "*S J G"]:
    """The last axis in groups; the tail repeats the last value, so that it adds no new extreme."""
    inputs = x.shape[-1]
    groups = group_count(inputs, group_size)
    tail = [(0, 0)] * (x.ndim - 1) + [(0, groups * group_size - inputs)]
    return jnp.pad(x, tail, mode="edge").reshape(*x.shape[:-1], groups, group_size)
