"""The shapes that the tests, the benchmark and the compile check use."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..attention.scales import BlockScales


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        batch: B.
        new_tokens: T.
        query_heads: N.
        kv_heads: K.
        width: H.
        rotated: R.
        gated: queries come with output gates.
        norm: "zero-centred", "plain", or "none".
        cache: "dtype" (a pool in the inputs' dtype), "int8", or "none".
        dtype: of queries, keys and values.
        block_size: Z.
        columns: columns of the table, W.
    """

    batch: int
    new_tokens: int = 1
    query_heads: int = 16
    kv_heads: int = 2
    width: int = 256
    rotated: int = 64
    gated: bool = True
    norm: str = "zero-centred"
    cache: str = "dtype"
    dtype: str = "bfloat16"
    block_size: int = 64
    columns: int = 8

    @property
    def nbytes(self) -> int:
        """Bytes that the call must read and write."""
        itemsize, rotated_bytes = jnp.dtype(self.dtype).itemsize, 4 * self.rotated
        q = 2 * self.query_heads * self.width * itemsize
        written = 1 if self.cache == "int8" else itemsize
        scales = 8 if self.cache == "int8" else 0
        kv = 2 * self.kv_heads * (self.width * (itemsize + written) + scales // 2)
        return self.batch * self.new_tokens * (q + kv + rotated_bytes)

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the arrays, with a pool that just holds the sequences."""
        tokens, dtype = (self.batch, self.new_tokens), jnp.dtype(self.dtype)

        def of(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        projections = (
            of(*tokens, self.query_heads, self.width * (2 if self.gated else 1)),
            of(*tokens, self.kv_heads, self.width),
            of(*tokens, self.kv_heads, self.width),
        )
        tables = (of(*tokens, self.rotated // 2, dtype=jnp.float32),) * 2
        weights = (None,) * 2 if self.norm == "none" else (of(self.width),) * 2
        if self.cache == "none":
            return (*projections, *tables, *weights)
        rows = (1 + self.batch * self.columns, self.kv_heads, self.block_size)
        coded = self.cache == "int8"
        pool = of(*rows, self.width, dtype=jnp.int8 if coded else dtype)
        scale, base = of(*rows, dtype=jnp.float32), of(*rows[:2], self.width)
        return (
            *(*projections, *tables, *weights, pool, pool),
            of(self.batch, self.columns, dtype=jnp.int32),
            of(*tokens, dtype=jnp.int32),
            BlockScales(scale, scale, base) if coded else None,
        )

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {"eps": 1e-6, "zero_centred": self.norm == "zero-centred"}


# The attention of qwen3.6-35b-a3b, unless they say otherwise.
SPECS = {
    "batch 1": Spec(1),
    "batch 8": Spec(8),
    "batch 64": Spec(64),
    "8k tokens": Spec(1, 8192, columns=128),
    "batch 1, int8": Spec(1, cache="int8"),
    "batch 64, int8": Spec(64, cache="int8"),
    "8k tokens, int8": Spec(1, 8192, columns=128, cache="int8"),
    "8k tokens, no cache": Spec(1, 8192, cache="none"),
    "batch 8, 28 heads of 128, no norm": Spec(
        8, 1, 28, 4, 128, 128, gated=False, norm="none", block_size=16
    ),
    "batch 8, float32, plain norm": Spec(8, 65, 32, 8, 64, 24, False, "plain", "int8", "float32"),
}
