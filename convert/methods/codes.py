"""Codes of a matrix before they are packed, and the numbers that they stand for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float, UInt

from qwen_jax.quant import WeightFormat


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


def dequantise(codes: Codes, format: WeightFormat) -> Float[Array, "*S O I"]:
    """The numbers that codes stand for, float32."""
    raise NotImplementedError


def bad_weights(weight: np.ndarray) -> str | None:
    """What a weight holds that no code stands for ("3 NaN, 1 infinite"); None if all is finite."""
    raise NotImplementedError
