"""The shapes that the tests, the benchmark and the compile check use."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        lengths: tokens of each sequence; all the same if they are not packed.
        query_heads: N.
        kv_heads: K.
        width: H.
        dtype: of queries, keys and values.
        packed: one row holds all sequences.
        padding: tokens of padding behind packed sequences.
        window: sliding window, if any.
    """

    lengths: tuple[int, ...]
    query_heads: int = 16
    kv_heads: int = 2
    width: int = 256
    dtype: str = "bfloat16"
    packed: bool = False
    padding: int = 0
    window: int | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """B and T."""
        if self.packed:
            return 1, sum(self.lengths) + self.padding
        return len(self.lengths), self.lengths[0]

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Where packed sequences start, and where the last ends."""
        return (0, *itertools.accumulate(self.lengths))

    @property
    def flops(self) -> int:
        """Operations of the two products over the pairs of tokens that see each other."""
        pairs = sum(self._pairs(length) for length in self.lengths)
        return 4 * pairs * self.query_heads * self.width

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays."""
        q, kv = (
            jax.ShapeDtypeStruct((*self.rows, heads, self.width), jnp.dtype(self.dtype))
            for heads in (self.query_heads, self.kv_heads)
        )
        if not self.packed:
            return q, kv, kv
        return q, kv, kv, jax.ShapeDtypeStruct((len(self.lengths) + 1,), jnp.int32)

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {"window": self.window}

    def _pairs(self, length: int) -> int:
        hidden = max(0, length - (self.window or length))
        return length * (length + 1) // 2 - hidden * (hidden + 1) // 2


# The attention of qwen3.6-35b-a3b, unless they say otherwise.
SPECS = {
    "8k": Spec((8192,)),
    "32 x 512": Spec((512,) * 32),
    "512": Spec((512,)),
    "packed, ragged": Spec((4096, 1, 2000, 63, 64, 65, 700, 1200), packed=True, padding=3),
    "8k, window 4k": Spec((8192,), window=4096),
    "8k, 28 heads of 128": Spec((8192,), query_heads=28, kv_heads=4, width=128),
    "8k, 32 heads of 64": Spec((8192,), query_heads=32, kv_heads=8, width=64),
    "4k, float32": Spec((4096,), dtype="float32"),
    "2k, float32, 28 heads of 128": Spec(
        (2048,), query_heads=28, kv_heads=4, width=128, dtype="float32"
    ),
    "2k, float32, 32 heads of 64": Spec(
        (2048,), query_heads=32, kv_heads=8, width=64, dtype="float32"
    ),
}
