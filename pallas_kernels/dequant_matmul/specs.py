"""The shapes that tests, benchmarks and the compile check use, and what the kernels take."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .layout import group_count, unit_count

SCALES = ("bfloat16", "float32")
RESULTS = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        rows: rows of x.
        outputs: O.
        inputs: I.
        bits: of a code.
        group_size: inputs a group.
        zero: whether groups have zero points.
        scale: dtype of scales and zero points.
        result: dtype of the result.
    """

    rows: int
    outputs: int
    inputs: int
    bits: int = 3
    group_size: int = 128
    zero: bool = False
    scale: str = "bfloat16"
    result: str = "bfloat16"

    @property
    def weight_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(a.size * a.dtype.itemsize for a in self.arguments()[1:] if a is not None)

    @property
    def nbytes(self) -> int:
        """Bytes that the call must read and write."""
        rows = 2 * self.inputs + jnp.dtype(self.result).itemsize * self.outputs
        return self.weight_bytes + self.rows * rows

    def arguments(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """Shapes and dtypes of x, codes, scale and zero."""
        words = (self.outputs, self.bits, unit_count(self.inputs))
        groups = (self.outputs, group_count(self.inputs, self.group_size))
        scale = jax.ShapeDtypeStruct(groups, jnp.dtype(self.scale))
        return (
            jax.ShapeDtypeStruct((self.rows, self.inputs), jnp.bfloat16),
            jax.ShapeDtypeStruct(words, jnp.uint32),
            scale,
            scale if self.zero else None,
        )

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {"group_size": self.group_size, "dtype": jnp.dtype(self.result)}


# Of qwen3.6-35b-a3b, unless they say otherwise: projections of the delta net into one another's
# width, its output, and the head.
SPECS = {
    "1 row, 12288x2048": Spec(1, 12288, 2048),
    "1 row, 2048x4096": Spec(1, 2048, 4096),
    "1 row, 8192x512": Spec(1, 8192, 512),
    "1 row, head, 4 bits": Spec(1, 248320, 2048, 4, result="float32"),
    "1 row, 12288x2048, 8 bits": Spec(1, 12288, 2048, 8),
    "1 row, 12288x2048, groups of 32, zero": Spec(1, 12288, 2048, 3, 32, zero=True),
    "2 rows, 12288x2048": Spec(2, 12288, 2048),
    "4 rows, 12288x2048": Spec(4, 12288, 2048),
    "16 rows, 12288x2048": Spec(16, 12288, 2048),
    "16 rows, 12288x2048, groups of 64": Spec(16, 12288, 2048, 3, 64),
    "16 rows, 12288x2048, groups of 32, zero": Spec(16, 12288, 2048, 3, 32, zero=True),
    "64 rows, 12288x2048": Spec(64, 12288, 2048),
    "16 rows, head, 4 bits": Spec(16, 248320, 2048, 4, result="float32"),
    "256 rows, 12288x2048": Spec(256, 12288, 2048),
    "4096 rows, 12288x2048": Spec(4096, 12288, 2048),
    "4096 rows, 2048x4096, 8 bits, zero": Spec(4096, 2048, 4096, 8, 64, zero=True),
    "515 rows, 1000x1000": Spec(515, 1000, 1000, 3, 64, scale="float32", result="float32"),
}
