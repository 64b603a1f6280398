"""GPTQ: round one input after the other, and let those to come make up for the error.

Frantar et al. (arXiv 2210.17323).
"""

from __future__ import annotations

from jax import Array
from jaxtyping import Float

from qwen_jax.quant import WeightFormat

from .codes import Codes


def gptq(
    weight: Float[Array, "*S O I"],
    hessian: Float[Array, "*S I I"],
    format: WeightFormat,
    *,
    act_order: bool = True,
) -> Codes:
    """Codes that lose little in the outputs on the calibration inputs.

    Args:
        weight: finite.
        hessian: mean of x x^T over the inputs x that the matrix meets; may be singular or zero.
        format: of the codes.
        act_order: round the inputs with the largest mean square first.
    """
    raise NotImplementedError
