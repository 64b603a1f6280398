"""How a matrix becomes codes: pure functions on arrays, batched over leading axes.

Letters: O outputs, I inputs, J groups of inputs, `*` a stack of experts or nothing.
"""

from .codes import Codes, bad_weights, dequantise
from .gptq import gptq
from .rounding import min_max, round_to_nearest

__all__ = [
    "Codes",
    "bad_weights",
    "dequantise",
    "gptq",
    "min_max",
    "round_to_nearest",
]
