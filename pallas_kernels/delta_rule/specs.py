"""The shapes that the tests, the benchmark and the compile check use, and what the kernels take."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

WIDTHS = (32, 64, 128)
DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        batch: B.
        length: T.
        key_heads: heads of queries and keys.
        heads: value heads, M.
        key_width: Q.
        value_width: R.
        taps: W.
        dtype: of everything but gates' constants and the delta state.
        state_dtype: of the delta state.
    """

    batch: int = 1
    length: int = 1
    key_heads: int = 16
    heads: int = 32
    key_width: int = 128
    value_width: int = 128
    taps: int = 4
    dtype: str = "bfloat16"
    state_dtype: str = "float32"

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key_width + self.heads * self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of the delta state, once."""
        itemsize = jnp.dtype(self.state_dtype).itemsize
        return self.batch * self.heads * self.key_width * self.value_width * itemsize

    def arguments(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the arrays."""
        dtype = jnp.dtype(self.dtype)
        gate = jax.ShapeDtypeStruct((self.batch, self.length, self.heads), dtype)
        constant = jax.ShapeDtypeStruct((self.heads,), jnp.float32)
        state = (self.batch, self.heads, self.key_width, self.value_width)
        count = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return (
            jax.ShapeDtypeStruct((self.batch, self.length, self.channels), dtype),
            gate,
            gate,
            jax.ShapeDtypeStruct((self.channels, self.taps), dtype),
            constant,
            constant,
            jax.ShapeDtypeStruct((self.batch, self.channels, self.taps), dtype),
            jax.ShapeDtypeStruct(state, jnp.dtype(self.state_dtype)),
            count,
            count,
        )

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {}


# The layers of qwen3.6-35b-a3b, unless they say otherwise.
SPECS = {
    "decode, batch 1": Spec(),
    "decode, batch 8": Spec(batch=8),
    "decode, batch 32": Spec(batch=32),
    "decode, batch 64": Spec(batch=64),
    "decode, batch 1, 64 heads": Spec(heads=64),
    "decode, batch 1, 48 heads": Spec(heads=48),
    "decode, batch 1, 16 heads": Spec(heads=16),
    "decode, batch 1, float32": Spec(dtype="float32"),
    "decode, batch 32, bfloat16 state": Spec(batch=32, state_dtype="bfloat16"),
    "prefill, 64 tokens": Spec(length=64),
    "prefill, 512 tokens": Spec(length=512),
    "prefill, 8k": Spec(length=8192),
    "prefill, 8k, float32": Spec(length=8192, dtype="float32"),
    "prefill, 32 x 512": Spec(batch=32, length=512),
    "prefill, 8k, 64 heads": Spec(length=8192, heads=64),
    "prefill, 8k, 16 heads": Spec(length=8192, heads=16),
    "prefill, 200 tokens, widths 32": Spec(
        length=200, key_heads=4, heads=8, key_width=32, value_width=32, dtype="float32"
    ),
}
