"""How a matrix becomes codes: pure functions on arrays, batched over leading axes.

Letters: O outputs, I inputs, J groups of inputs, `*` a stack of experts or nothing.
"""

from .activation_aware import activation_aware
from .codes import Codes, dequantise
from .gptq import gptq
from .refinement import refined
from .rounding import min_max, round_to_nearest
from .solve import (
    Solution,
    Solved,
    TensorReport,
    finished,
    measured,
    rounded_without_data,
    solve,
)

__all__ = [
    "Codes",
    "Solution",
    "Solved",
    "TensorReport",
    "activation_aware",
    "dequantise",
    "finished",
    "gptq",
    "measured",
    "min_max",
    "refined",
    "round_to_nearest",
    "rounded_without_data",
    "solve",
]
