"""The shapes that the tests, the benchmark and the compile check use, and what the kernel takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

DTYPES = ("bfloat16", "float32")
MOST_WIDTH = 16384


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        rows: rows.
        width: D.
        dtype: of x.
        result: dtype of the norm.
        weight: dtype of the weight.
        added: dtype of what is added to x; nothing is if None.
        gated: whether there is a gate, of x's dtype.
        zero_centred: see `api.rms_norm`.
    """

    rows: int = 1
    width: int = 2048
    dtype: str = "float32"
    result: str = "bfloat16"
    weight: str = "bfloat16"
    added: str | None = None
    gated: bool = False
    zero_centred: bool = True

    @property
    def bytes_moved(self) -> int:
        """Bytes of rows that the call must read and write."""
        moved = [self.dtype, self.result]
        if self.added is not None:
            moved += [self.added, self.dtype]
        if self.gated:
            moved.append(self.dtype)
        return self.rows * self.width * sum(jnp.dtype(dtype).itemsize for dtype in moved)

    def arguments(self) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        """Shapes and dtypes of x, weight, y and gate."""

        def rows(dtype: str) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.rows, self.width), jnp.dtype(dtype))

        return (
            rows(self.dtype),
            jax.ShapeDtypeStruct((self.width,), jnp.dtype(self.weight)),
            None if self.added is None else rows(self.added),
            rows(self.dtype) if self.gated else None,
        )

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {
            "eps": 1e-6,
            "zero_centred": self.zero_centred,
            "dtype": jnp.dtype(self.result),
        }


def _of_heads(rows: int, width: int = 128, dtype: str = "bfloat16") -> Spec:
    return Spec(rows, width, dtype, dtype, "float32", gated=True, zero_centred=False)


def _after_mixer(rows: int) -> Spec:
    return Spec(rows, result="float32", added="bfloat16")


# The norms of qwen3.6-35b-a3b, unless they say otherwise.
SPECS = {
    "1 row": Spec(),
    "8 rows": Spec(8),
    "64 rows": Spec(64),
    "8192 rows": Spec(8192),
    "add, 1 row": _after_mixer(1),
    "add, 8 rows": _after_mixer(8),
    "add, 64 rows": _after_mixer(64),
    "add, 8192 rows": _after_mixer(8192),
    "gated, 1 token": _of_heads(32),
    "gated, 8 tokens": _of_heads(8 * 32),
    "gated, 64 tokens": _of_heads(64 * 32),
    "gated, 8192 tokens": _of_heads(8192 * 32),
    "8 rows of 5120": Spec(8, 5120, zero_centred=False),
    "100000 rows of 2560": Spec(100_000, 2560, result="float32"),
    "1 row of 4096, bfloat16": Spec(1, 4096, "bfloat16", "bfloat16"),
    "gated, 515 rows of 64, float32": _of_heads(515, 64, "float32"),
}
