"""The shapes that tests, benchmarks and the compile check use, and what the kernels take."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .layout import group_count, unit_count
from .qtensor import QTensor

NUMBERS = ("bfloat16", "float32")
RESULTS = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix.

    Attributes:
        outputs: O.
        bits: of a code; 16 for an array of bfloat16, 32 for one of float32.
        group_size: inputs a group.
        zero: whether groups have zero points.
        scale: dtype of scales and zero points.
    """

    outputs: int
    bits: int = 3
    group_size: int = 128
    zero: bool = False
    scale: str = "bfloat16"

    @property
    def coded(self) -> bool:
        """Whether it is in codes."""
        return self.bits not in (16, 32)

    def array(self, inputs: int) -> QTensor | jax.ShapeDtypeStruct:
        """Shapes and dtypes."""
        struct: Any = jax.ShapeDtypeStruct
        if not self.coded:
            dtype = jnp.bfloat16 if self.bits == 16 else jnp.float32
            return struct((self.outputs, inputs), dtype)
        words = (self.outputs, self.bits, unit_count(inputs))
        groups = (self.outputs, group_count(inputs, self.group_size))
        scale = struct(groups, jnp.dtype(self.scale))
        zero = scale if self.zero else None
        return QTensor(struct(words, jnp.uint32), scale, zero, None, inputs, self.group_size)


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        rows: rows of x.
        inputs: I.
        matrices: that share them.
        result: dtype of the results.
    """

    rows: int
    inputs: int
    matrices: tuple[Matrix, ...]
    result: str = "bfloat16"

    @property
    def outputs(self) -> int:
        """Of all matrices."""
        return sum(matrix.outputs for matrix in self.matrices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices."""
        leaves = jax.tree.leaves(self.arguments()[1])
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @property
    def nbytes(self) -> int:
        """Bytes that the call must read and write."""
        rows = 2 * self.inputs + jnp.dtype(self.result).itemsize * self.outputs
        return self.weight_bytes + self.rows * rows

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, tuple[Any, ...]]:
        """Shapes and dtypes of x and the matrices."""
        x = jax.ShapeDtypeStruct((self.rows, self.inputs), jnp.bfloat16)
        return x, tuple(matrix.array(self.inputs) for matrix in self.matrices)

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {"dtype": jnp.dtype(self.result)}


def of_one(
    rows: int, outputs: int, inputs: int, *of_matrix: Any, result: str = "bfloat16", **more: Any
) -> Spec:
    """A call with one matrix, whose further attributes follow."""
    return Spec(rows, inputs, (Matrix(outputs, *of_matrix, **more),), result)


# Of qwen3.6-35b-a3b, unless they say otherwise. Those that read the delta net's input, those that
# read attention's, and the shared expert's, all as recipe q3 has them.
DELTA_INPUTS = (Matrix(8192, 4, 64), Matrix(4096, 4, 64), Matrix(32, 16), Matrix(32, 16))
ATTENTION_INPUTS = (Matrix(8192, 4, 64), Matrix(512, 4, 64), Matrix(512, 4, 64))
SHARED_INPUTS = (Matrix(512, 8, 64), Matrix(512, 8, 64), Matrix(1, 16))

SPECS = {
    "1 row, 12288x2048": of_one(1, 12288, 2048),
    "1 row, 2048x4096": of_one(1, 2048, 4096),
    "1 row, 8192x512": of_one(1, 8192, 512),
    "1 row, head, 4 bits": of_one(1, 248320, 2048, 4, result="float32"),
    "1 row, 12288x2048, 8 bits": of_one(1, 12288, 2048, 8),
    "1 row, 12288x2048, groups of 32, zero": of_one(1, 12288, 2048, 3, 32, zero=True),
    "2 rows, 12288x2048": of_one(2, 12288, 2048),
    "4 rows, 12288x2048": of_one(4, 12288, 2048),
    "16 rows, 12288x2048": of_one(16, 12288, 2048),
    "16 rows, 12288x2048, groups of 64": of_one(16, 12288, 2048, 3, 64),
    "16 rows, 12288x2048, groups of 32, zero": of_one(16, 12288, 2048, 3, 32, zero=True),
    "64 rows, 12288x2048": of_one(64, 12288, 2048),
    "16 rows, head, 4 bits": of_one(16, 248320, 2048, 4, result="float32"),
    "256 rows, 12288x2048": of_one(256, 12288, 2048),
    "4096 rows, 12288x2048": of_one(4096, 12288, 2048),
    "4096 rows, 2048x4096, 8 bits, zero": of_one(4096, 2048, 4096, 8, 64, zero=True),
    "515 rows, 1000x1000": of_one(515, 1000, 1000, 3, 64, scale="float32", result="float32"),
    **{
        f"{rows} row{'s' if rows > 1 else ''}, {name}": Spec(rows, 2048, matrices)
        for name, matrices in {
            "delta net": DELTA_INPUTS,
            "attention": ATTENTION_INPUTS,
            "shared expert": SHARED_INPUTS,
        }.items()
        for rows in (1, 4, 16)
    },
    "1 row, 3 and 4 bits, zero": Spec(1, 2048, (Matrix(4096), Matrix(4096, 4, 32, True))),
}
