"""Rounding to the nearest level, without calibration or with the inputs' importance alone."""

from __future__ import annotations

from jax import Array
from jaxtyping import Float

from qwen_jax.quant import WeightFormat

from .codes import Codes


def round_to_nearest(
    weight: Float[Array, "*S O I"],
    format: WeightFormat,
    *,
    importance: Float[Array, "*S I"] | None = None,
    search: bool = True,
) -> Codes:
    """Each weight to its nearest level; the scale of each group is searched.

    Args:
        weight: finite.
        format: of the codes.
        importance: of each input, e.g. its mean square; all alike if None.
        search: try smaller scales, which clip the largest weights; else the group's largest weight
            is its outermost level.
    """
    raise NotImplementedError


def min_max(weight: Float[Array, "*S O I"], format: WeightFormat) -> Float[Array, "*S O I"]:
    """What plain rounding on the integer grid (-4 to 3 at 3 bits) makes of a weight, float32.

    Only something to compare with: no file of this project holds such a grid.
    """
    raise NotImplementedError
