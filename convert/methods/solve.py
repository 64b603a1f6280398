"""One tensor to codes by the method of its rule, and what is reported of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qwen_jax.quant import Method, Rule, WeightFormat

from .activation_aware import Ties, activation_aware
from .codes import Codes, dequantise, of_inputs
from .gptq import gptq
from .hessian import factor
from .refinement import refined
from .rounding import round_to_nearest

# Weights that are rounded at a time; bounds device memory to a few GB.
AT_ONCE = 1 << 27


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """What became of one tensor; a row of `quantization_report.json`.

    Attributes:
        method: the rule's method; "round-to-nearest" where there was no calibration.
        bits: of a code.
        group_size: inputs that share a scale.
        weight_error: ||W - Q|| / ||W||.
        output_error: ||(W - Q) X|| / ||W X|| on the calibration inputs; None without calibration.
        samples: calibration rows that each matrix saw; 0 without calibration.
        routed: fewest rows among them that the router sent there, of the stack.
        clipped: share of weights more than half a step beyond the outermost levels.
        fallback: matrices of the stack (0 for a single one) that no sample reached, or whose
            samples were of no use: rounded without data.
    """

    method: str
    bits: int
    group_size: int
    weight_error: float
    output_error: float | None
    samples: int
    routed: int
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

    def weight(self, format: WeightFormat) -> Float[Array, "*S O I"]:
        """The numbers that it stands for, float32."""
        return _wide(self.codes, self.input_scale, format)


class Solution(NamedTuple):
    """Codes of a matrix, or of some matrices of a stack, and what a report is made of.

    Attributes:
        codes: on the device.
        input_scale: float32 [*, I]; None where there is none.
        squares: [*, 4], sums of squares: weights, their errors, outputs, their errors.
        clipped: [*], weights beyond the outermost levels.
        usable: bool [*], whether the Hessian was of use.
    """

    codes: Codes
    input_scale: Array | None
    squares: Array
    clipped: Array
    usable: Array

    def weight(self, format: WeightFormat) -> Float[Array, "*S O I"]:
        """The numbers that it stands for, float32."""
        return _wide(self.codes, self.input_scale, format)


@functools.partial(jax.jit, static_argnames=("format", "method", "ties"))
def solve(
    weight: Float[Array, "*S O I"],
    hessian: Float[Array, "*S I I"] | None,
    format: WeightFormat,
    method: Method,
    ties: Ties | None = None,
) -> Solution:
    """Codes of a matrix or of a stack, by one method.

    No row of a matrix ends with a larger error of its outputs than rounding with a searched scale
    gives it.

    Args:
        weight: finite.
        hessian: mean of x x^T over the calibration inputs; None for rounding without data, whatever
            the method. Matrices whose Hessian is of no use (nothing but zeros, or not finite) are
            rounded without data.
        format: of the codes.
        method: how codes are chosen.
        ties: see `activation_aware`; other methods have no factors of inputs.
    """
    weight = weight.astype(jnp.float32)
    size, stack = weight.shape[-1], weight.shape[:-2]
    rounded = round_to_nearest(weight, format)
    if hessian is None:
        usable = jnp.zeros(stack, bool)
        hessian = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (*stack, size, size))
        return _measured(weight, hessian, usable, rounded, None, format)
    factored = factor(hessian)
    usable = factored.found & (jnp.trace(hessian, axis1=-2, axis2=-1) > 0)
    hessian = jnp.where(usable[..., None, None], hessian, jnp.eye(size, dtype=jnp.float32))
    input_scale = None
    if method == "gptq":
        codes = gptq(weight, hessian, format, factored=factored)
        codes = refined(weight, hessian, codes, format, factored=factored)
        codes = _better(weight, hessian, codes, rounded, format)
    elif method == "activation-aware":
        codes, input_scale = activation_aware(weight, hessian, format, ties)
    else:
        codes = rounded
    return _measured(weight, hessian, usable, codes, input_scale, format)


@functools.partial(jax.jit, static_argnames=("format",))
def measured(
    weight: Float[Array, "*S O I"],
    hessian: Float[Array, "*S I I"],
    codes: Codes,
    input_scale: Float[Array, "*S I"] | None,
    format: WeightFormat,
) -> Solution:
    """Codes as they are, with what `solve` would report of them."""
    usable = factor(hessian).found & (jnp.trace(hessian, axis1=-2, axis2=-1) > 0)
    size = weight.shape[-1]
    hessian = jnp.where(usable[..., None, None], hessian, jnp.eye(size, dtype=jnp.float32))
    return _measured(weight.astype(jnp.float32), hessian, usable, codes, input_scale, format)


def finished(
    parts: Sequence[Solution],
    rule: Rule,
    *,
    samples: int = 0,
    routed: Sequence[int] | None = None,
    rows: bool = False,
) -> Solved:
    """Solutions of parts of a tensor as one, on the host, with their report.

    Args:
        parts: consecutive matrices of a stack, or consecutive rows of a matrix.
        rule: of the tensor.
        samples: rows that each Hessian is a mean of; 0 without calibration.
        routed: rows among them that the router sent to each expert; all if None.
        rows: whether the parts are rows of one matrix.
    """
    if rule.format is None:
        raise ValueError("the rule leaves tensors as they are")
    host: list[Solution] = [jax.tree.map(np.asarray, part) for part in parts]
    first = host[0]
    if len(host) > 1:
        whole = jax.tree.map(lambda *x: np.concatenate(x) if x[0].ndim else np.stack(x), *host)
        input_scale = first.input_scale if rows else whole.input_scale
        first = whole._replace(input_scale=input_scale)
    squares = first.squares.reshape(-1, 4).sum(axis=0)
    weight_error, output_error = np.sqrt(squares[[1, 3]] / np.maximum(squares[[0, 2]], 1e-30))
    # Rows of one matrix share its Hessian.
    usable = first.usable.reshape(-1)[: 1 if rows else None]
    report = TensorReport(
        method=rule.method if samples else "round-to-nearest",
        bits=rule.format.bits,
        group_size=rule.format.group_size,
        weight_error=float(weight_error),
        output_error=float(output_error) if samples else None,
        samples=samples,
        routed=samples if routed is None else min(routed),
        clipped=float(first.clipped.sum() / first.codes.values.size),
        fallback=tuple(int(i) for i in np.flatnonzero(~usable)) if samples else (),
    )
    scale = None if first.input_scale is None else np.asarray(first.input_scale)
    return Solved(first.codes, scale, report)


def rounded_without_data(weight: Float[np.ndarray, "*S O I"], rule: Rule) -> Solved:
    """A tensor that no calibration reaches (the embedding), some rows or matrices at a time."""
    if rule.format is None:
        raise ValueError("the rule leaves tensors as they are")
    at_once = max(1, AT_ONCE // int(np.prod(weight.shape[1:])))
    parts = [
        solve(jnp.asarray(weight[start : start + at_once]), None, rule.format, "round-to-nearest")
        for start in range(0, len(weight), at_once)
    ]
    return finished(parts, rule, rows=weight.ndim == 2)


def _wide(codes: Codes, input_scale: Any, format: WeightFormat) -> Array:
    wide = dequantise(codes, format)
    return wide if input_scale is None else wide * jnp.asarray(input_scale)[..., None, :]


def _output_error(difference: Array, hessian: Array) -> Array:
    """Mean square of each output, [*, O]."""
    product = jnp.matmul(difference, hessian, precision=jax.lax.Precision.HIGHEST)
    return jnp.maximum(jnp.sum(product * difference, axis=-1), 0.0)


def _better(
    weight: Array, hessian: Array, codes: Codes, others: Codes, format: WeightFormat
) -> Codes:
    """Of each output the codes with the smaller error; the first ones where they are alike."""
    first, second = (
        _output_error(weight - dequantise(c, format), hessian) for c in (codes, others)
    )
    wins = (first <= second)[..., None]
    return jax.tree.map(lambda a, b: jnp.where(wins, a, b), codes, others)


def _measured(
    weight: Array,
    hessian: Array,
    usable: Array,
    codes: Codes,
    input_scale: Array | None,
    format: WeightFormat,
) -> Solution:
    wide = dequantise(codes, format)
    scale, zero = of_inputs(codes, format)
    if input_scale is not None:
        wide, scale = wide * input_scale[..., None, :], scale * input_scale[..., None, :]
    difference = weight - wide
    squares = (
        jnp.sum(jnp.square(weight), axis=(-2, -1)),
        jnp.sum(jnp.square(difference), axis=(-2, -1)),
        jnp.sum(_output_error(weight, hessian), axis=-1),
        jnp.sum(_output_error(difference, hessian), axis=-1),
    )
    place = weight / scale + zero
    outside = (place < -0.5) | (place > 2**format.bits - 0.5)
    clipped = jnp.sum(outside.astype(jnp.float32), axis=(-2, -1))
    return Solution(codes, input_scale, jnp.stack(squares, axis=-1), clipped, usable)
