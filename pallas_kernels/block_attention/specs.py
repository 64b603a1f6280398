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
        lengths: tokens of each sequence, the new ones included.
        query_heads: N.
        kv_heads: K.
        width: H.
        dtype: of queries, keys and values.
        block_size: Z.
        room: tokens that a sequence has room for in the table, at least; the longest if 0.
        new_tokens: T.
        window: sliding window, if any.
        sinks: first tokens that stay visible besides the window.
        int8: keys and values are int8 codes, with scales.
    """

    lengths: tuple[int, ...]
    query_heads: int = 16
    kv_heads: int = 2
    width: int = 256
    dtype: str = "bfloat16"
    block_size: int = 64
    room: int = 0
    new_tokens: int = 1
    window: int | None = None
    sinks: int = 0
    int8: bool = False

    @property
    def columns(self) -> int:
        """Columns of the table, W."""
        return -(-max(self.room, *self.lengths, 1) // self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the call must read, with the scales of codes."""
        itemsize = jnp.dtype(self.dtype).itemsize
        tokens = sum(self._visible(length) for length in self.lengths) * self.kv_heads
        if self.int8:
            base = self.width * itemsize // self.block_size
            return tokens * (2 * self.width + 2 * 4 + base)
        return 2 * tokens * self.width * itemsize

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the arrays, with a pool that just holds the sequences."""
        batch, dtype = len(self.lengths), jnp.dtype(self.dtype)
        blocks = 1 + sum(-(-length // self.block_size) for length in self.lengths)
        rows = (blocks, self.kv_heads, self.block_size)
        pool = jax.ShapeDtypeStruct((*rows, self.width), jnp.int8 if self.int8 else dtype)
        scale = jax.ShapeDtypeStruct(rows, jnp.float32)
        base = jax.ShapeDtypeStruct((*rows[:2], self.width), dtype)
        arrays = (
            jax.ShapeDtypeStruct((batch, self.new_tokens, self.query_heads, self.width), dtype),
            pool,
            pool,
            jax.ShapeDtypeStruct((batch, self.columns), jnp.int32),
            jax.ShapeDtypeStruct((batch, self.new_tokens), jnp.int32),
        )
        return (*arrays, BlockScales(scale, scale, base)) if self.int8 else arrays

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {"window": self.window, "sinks": self.sinks}

    def _visible(self, length: int) -> int:
        if self.window is None:
            return length
        return min(length, self.window + self.new_tokens - 1 + self.sinks)


# Decoding with the attention of qwen3.6-35b-a3b, unless they say otherwise. "in 32k" has room for
# more tokens than there are.
SPECS = {
    "batch 1, 512": Spec((512,)),
    "batch 1, 512 in 32k": Spec((512,), room=32768),
    "batch 1, 4k": Spec((4096,)),
    "batch 1, 32k": Spec((32768,)),
    "batch 8, 512": Spec((512,) * 8),
    "batch 8, 32k": Spec((32768,) * 8),
    "batch 32, 640": Spec((640,) * 32),
    "batch 8, unequal": Spec((32768, 100, 512, 1, 9000, 700, 64, 2048)),
    "batch 64, unequal": Spec(tuple(65 * i for i in range(1, 65))),
    "batch 1, 128k": Spec((131072,)),
    "batch 8, 32k, window 4k": Spec((32768,) * 8, window=4096, sinks=4),
    "batch 8, 4k, blocks of 16": Spec((4096,) * 8, block_size=16),
    "batch 8, 4k, blocks of 128": Spec((4096,) * 8, block_size=128),
    "batch 8, 4k, 28 heads of 128": Spec((4096,) * 8, query_heads=28, kv_heads=4, width=128),
    "batch 8, 4k, 32 heads of 64": Spec((4096,) * 8, query_heads=32, kv_heads=8, width=64),
    "batch 8, 4k, 4 new tokens": Spec((4096,) * 8, new_tokens=4),
    "batch 8, 4k, float32": Spec((4096,) * 8, dtype="float32"),
    "batch 1, 512, int8": Spec((512,), int8=True),
    "batch 1, 32k, int8": Spec((32768,), int8=True),
    "batch 8, 32k, int8": Spec((32768,) * 8, int8=True),
    "batch 8, 4k, blocks of 16, int8": Spec((4096,) * 8, block_size=16, int8=True),
    "batch 8, 4k, 32 heads of 64, int8": Spec(
        (4096,) * 8, query_heads=32, kv_heads=8, width=64, int8=True
    ),
    "batch 8, 4k, float32, int8": Spec((4096,) * 8, dtype="float32", int8=True),
    "8k new": Spec((8192,), new_tokens=8192),
    "512 new on 32k": Spec((32768,), new_tokens=512),
    "512 new, unequal": Spec((8192, 512, 3000, 513), new_tokens=512),
    "512 new on 32k, window 4k": Spec((32768,), new_tokens=512, window=4096, sinks=4),
    "512 new on 8k, blocks of 16": Spec((8192,), new_tokens=512, block_size=16),
    "512 new on 8k, blocks of 128, 28 heads of 128": Spec(
        (8192,), query_heads=28, kv_heads=4, width=128, new_tokens=512, block_size=128
    ),
    "512 new on 4k, 32 heads of 64": Spec(
        (4096,), query_heads=32, kv_heads=8, width=64, new_tokens=512
    ),
    "512 new on 8k, int8": Spec((8192,), new_tokens=512, int8=True),
    "512 new on 4k, 32 heads of 64, blocks of 16, int8": Spec(
        (4096,), query_heads=32, kv_heads=8, width=64, block_size=16, new_tokens=512, int8=True
    ),
    "512 new on 4k, float32": Spec((4096,), new_tokens=512, dtype="float32"),
}
