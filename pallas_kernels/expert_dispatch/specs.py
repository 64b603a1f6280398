"""The shapes that tests, benchmarks and the compile check use."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..dequant_matmul.layout import group_count, unit_count
from ..dequant_matmul.qtensor import QTensor
from .shared import SharedExpert

NUMBERS = {16: "bfloat16", 32: "float32"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call. Bits are those of a code; 16 and 32 are numbers, bfloat16 and float32.

    Attributes:
        tokens: M.
        experts: E.
        slots: A.
        width: D.
        hidden: F.
        bits: of `gate_up_proj`.
        down_bits: of `down_proj`.
        group_size: inputs a group.
        zero: whether groups have zero points.
        shared_hidden: Fs; 0 for no shared expert.
        shared_bits: of the shared expert's projections.
        shared_down_bits: of its down projection; 0 for those of the others.
        x: dtype of tokens.
        inner: to which what the down projections read is rounded.
    """

    tokens: int
    experts: int = 256
    slots: int = 8
    width: int = 2048
    hidden: int = 512
    bits: int = 3
    down_bits: int = 3
    group_size: int = 64
    zero: bool = False
    shared_hidden: int = 512
    shared_bits: int = 8
    shared_down_bits: int = 0
    x: str = "float32"
    inner: str = "bfloat16"

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the call's arrays."""
        struct: Any = jax.ShapeDtypeStruct
        routing = self.tokens, self.slots
        width, hidden = self.width, self.hidden
        shared = None
        if self.shared_hidden:
            sizes = self.shared_hidden, width
            shared = SharedExpert(
                self.weight(sizes, self.shared_bits),
                self.weight(sizes, self.shared_bits),
                self.weight(sizes[::-1], self.shared_down_bits or self.shared_bits),
                struct((1, width), jnp.dtype(self.inner)),
            )
        return (
            struct((self.tokens, width), jnp.dtype(self.x)),
            struct(routing, jnp.int32),
            struct(routing, jnp.float32),
            self.weight((self.experts, 2 * hidden, width), self.bits),
            self.weight((self.experts, width, hidden), self.down_bits),
            shared,
        )

    def weight(self, shape: tuple[int, ...], bits: int) -> Any:
        """Shapes and dtypes of a matrix or a stack."""
        struct: Any = jax.ShapeDtypeStruct
        if bits in NUMBERS:
            return struct(shape, jnp.dtype(NUMBERS[bits]))
        *rows, inputs = shape
        codes = struct((*rows, bits, unit_count(inputs)), jnp.uint32)
        groups = (*rows, group_count(inputs, self.group_size))
        scale = struct(groups, jnp.bfloat16)
        zero = scale if self.zero else None
        return QTensor(codes, scale, zero, None, inputs, self.group_size)

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {"inner_dtype": jnp.dtype(self.inner), "dtype": jnp.dtype("float32")}


# Of qwen3.6-35b-a3b, unless they say otherwise.
SPECS = {
    "1 token": Spec(1),
    "2 tokens": Spec(2),
    "4 tokens": Spec(4),
    "8 tokens": Spec(8),
    "16 tokens": Spec(16),
    "32 tokens": Spec(32),
    "64 tokens": Spec(64),
    "1 token, 4 bits": Spec(1, bits=4, down_bits=4),
    "1 token, 8 bits": Spec(1, bits=8, down_bits=8),
    "1 token, groups of 32, zero": Spec(1, group_size=32, zero=True),
    "1 token, bf16": Spec(1, bits=16, down_bits=16, shared_bits=16),
    "8 tokens, bf16": Spec(8, bits=16, down_bits=16, shared_bits=16),
    "1 token, qwen3-30b-a3b": Spec(1, experts=128, hidden=768, shared_hidden=0),
    "1 token, qwen3-next-80b-a3b": Spec(1, experts=512, slots=10),
    "1 token, qwen1.5-moe-a2.7b": Spec(1, 60, 4, hidden=1408, shared_hidden=5632),
    "512 tokens": Spec(512),
    "8192 tokens": Spec(8192),
    "8192 tokens, bf16": Spec(8192, bits=16, down_bits=16, shared_bits=16),
}
