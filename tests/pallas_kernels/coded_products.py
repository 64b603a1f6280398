"""Random calls of products with codes, and what they must give in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.dequant_matmul import api, layout, triton
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.dequant_matmul.specs import Matrix, Spec, of_one
from pallas_kernels.testing import norm_error

Call = tuple[jax.Array, tuple[QTensor | jax.Array, ...]]


@functools.cache
def drawn(spec: Spec) -> tuple[Call, list[np.ndarray]]:
    """Arrays of a call, and the products in float64."""
    rng = np.random.default_rng(spec.outputs)
    x = jnp.asarray(rng.standard_normal((spec.rows, spec.inputs)), jnp.bfloat16)
    weights, expected = [], []
    for matrix in spec.matrices:
        weight, numbers = drawn_matrix(rng, matrix, spec.inputs)
        weights.append(weight)
        expected.append(np.asarray(x, np.float64) @ numbers.T)
    return (x, tuple(weights)), expected


def drawn_matrix(
    rng: np.random.Generator, matrix: Matrix, inputs: int
) -> tuple[QTensor | jax.Array, np.ndarray]:
    """A matrix and its numbers in float64. Bits behind the last input are ones."""
    shapes: Any = matrix.array(inputs)
    if not matrix.coded:
        weight = jnp.asarray(rng.standard_normal(shapes.shape), shapes.dtype)
        return weight, np.asarray(weight, np.float64)
    values = rng.integers(0, 2**matrix.bits, (matrix.outputs, inputs))
    tail = ((0, 0), (0, -inputs % layout.UNIT))
    packed = layout.pack(np.pad(values, tail, constant_values=2**matrix.bits - 1), matrix.bits)
    assert packed.shape == shapes.codes.shape
    groups, dtype = shapes.scale.shape, shapes.scale.dtype
    scale = jnp.asarray(rng.uniform(0.1, 3, groups) * rng.choice((-1, 1), groups)).astype(dtype)
    zero = None
    if matrix.zero:
        zero = jnp.asarray(rng.uniform(0, 2**matrix.bits, groups), dtype)

    def wide(x):
        return np.repeat(np.asarray(x, np.float64), matrix.group_size, axis=1)[:, :inputs]

    numbers = values - (layout.CENTRES[matrix.bits] if zero is None else wide(zero))
    weight = QTensor(jnp.asarray(packed), scale, zero, None, inputs, matrix.group_size)
    return weight, numbers * wide(scale)


def bar(spec: Spec) -> float:
    """Greatest acceptable error; weights are rounded to bfloat16 from 65 rows on."""
    return (3e-4 if spec.rows <= 64 else 3e-3) + (2e-3 if spec.result == "bfloat16" else 0)


def check(spec: Spec, implementation: str | None, config=None):
    arrays, expected = drawn(spec)
    run = functools.partial(api.OPERATION, implementation=implementation, **spec.settings())
    if config is not None:
        run = functools.partial(triton.dequant_matmul, config=config, **spec.settings())
    for y, wanted in zip(jax.jit(run)(*arrays), expected, strict=True):
        assert y.dtype == spec.result
        assert y.shape == wanted.shape
        assert norm_error(y, wanted) < bar(spec)


def small(rows: int, bits: int, group_size: int, **more) -> Spec:
    """A call whose sizes are multiples of nothing."""
    more = {"outputs": 37, "inputs": 300, "result": "float32"} | more
    return of_one(rows, bits=bits, group_size=group_size, **more)


def launches(spec: Spec) -> int:
    """Kernels that a call becomes on an H200."""

    def call(*arrays):
        return api.OPERATION(*arrays, implementation="triton", **spec.settings())

    return lower_for_cuda(call, *spec.arguments()).count("xla.gpu.triton")
