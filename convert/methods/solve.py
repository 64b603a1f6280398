"""One tensor to codes by the method of its rule, and what is reported of it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float

from qwen_jax.quant import Rule

from .codes import Codes


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """What became of one tensor; a row of `quantization_report.json`.

    Attributes:
        method: what was done: the rule's method, or "round-to-nearest" without data.
        bits: of a code.
        group_size: inputs that share a scale.
        weight_error: ||W - Q|| / ||W||.
        output_error: ||(W - Q) X|| / ||W X|| on the calibration inputs; None without data.
        samples: fewest calibration rows that a matrix of the stack saw; 0 without data.
        samples_mean: the same on average.
        clipped: share of weights beyond the outermost level by more than half a step.
        fallback: experts (or [0] for a single matrix) that were rounded without data.
    """

    method: str
    bits: int
    group_size: int
    weight_error: float
    output_error: float | None
    samples: int
    samples_mean: float
    clipped: float
    fallback: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """For the report file."""
        return dataclasses.asdict(self) | {"fallback": list(self.fallback)}


class Solved(NamedTuple):
    """A tensor in codes, on the host.

    Attributes:
        codes: NumPy arrays.
        input_scale: float32 [*, I], a factor of each input; None where there is none.
        report: see `TensorReport`.
    """

    codes: Codes
    input_scale: np.ndarray | None
    report: TensorReport


def solve(
    weight: Float[Array, "*S O I"],
    rule: Rule,
    statistics: Any = None,
) -> Solved:
    """Codes of one tensor.

    Args:
        weight: a matrix [O, I] or a stack [E, O, I], finite.
        rule: its format and method.
        statistics: `calibrate.Statistics` of its inputs; None: data-free rounding, whatever the
            rule's method (embeddings, and layers that no calibration token reaches).
    """
    raise NotImplementedError
