"""The shapes that the tests, the benchmark and the compile check use, and what the kernels take."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

DTYPES = ("bfloat16", "float32")
MOST_EXPERTS = 1024
OPTIONS = ("bias", "mask", "valid", "limit", "temperature", "forced", "scale", "part")
PARTS = 3
"""How many calls' rows options have that come with a part."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call.

    Attributes:
        rows: M.
        width: D.
        experts: E.
        slots: A.
        dtype: of x.
        weight: dtype of the weight.
        renormalise: see `api.router`.
        given: which of `OPTIONS` the call has.
        shared_row: whether options that have rows of experts have one for all tokens.
    """

    rows: int = 1
    width: int = 2048
    experts: int = 256
    slots: int = 8
    dtype: str = "float32"
    weight: str = "bfloat16"
    renormalise: bool = True
    given: tuple[str, ...] = ("valid",)
    shared_row: bool = False

    @property
    def bytes_moved(self) -> int:
        """Bytes that the call must read and write, without the options."""
        read = self.rows * self.width * jnp.dtype(self.dtype).itemsize
        read += self.experts * self.width * jnp.dtype(self.weight).itemsize
        return read + 4 * self.rows * (self.experts + 2 * self.slots)

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and dtypes of x, weight and the options; None for one that is not given."""
        rows, all_experts = self.rows, (self.rows, self.experts)
        options = {
            "bias": (all_experts, jnp.float32),
            "mask": (all_experts, jnp.bool_),
            "valid": ((rows,), jnp.bool_),
            "limit": ((rows,), jnp.int32),
            "temperature": ((rows,), jnp.float32),
            "forced": (all_experts, jnp.bool_),
            "scale": (all_experts, jnp.float32),
            "part": ((1,), jnp.int32),
        }
        of_experts = [name for name, (shape, _) in options.items() if shape == all_experts]
        several = 1 if self.shared_row else PARTS * rows
        if self.shared_row or "part" in self.given:
            options |= {name: ((several, self.experts), options[name][1]) for name in of_experts}
        return (
            jax.ShapeDtypeStruct((rows, self.width), jnp.dtype(self.dtype)),
            jax.ShapeDtypeStruct((self.experts, self.width), jnp.dtype(self.weight)),
            *(
                jax.ShapeDtypeStruct(*option) if name in self.given else None
                for name, option in options.items()
            ),
        )

    def settings(self) -> dict[str, Any]:
        """Settings of the call."""
        return {"slots": self.slots, "renormalise": self.renormalise}


def _wide(rows: int) -> Spec:
    return Spec(rows, experts=512, slots=10)


# The first are of qwen3.6-35b-a3b; then qwen3-next, qwen3-30b-a3b and qwen1.5-moe.
SPECS = {
    "1 row, 8 of 256": Spec(),
    "4 rows, 8 of 256": Spec(4),
    "8 rows, 8 of 256": Spec(8),
    "16 rows, 8 of 256": Spec(16),
    "32 rows, 8 of 256": Spec(32),
    "64 rows, 8 of 256": Spec(64),
    "512 rows, 8 of 256": Spec(512),
    "8192 rows, 8 of 256": Spec(8192),
    "1 row, 8 of 256, float32": Spec(weight="float32"),
    "1 row, 10 of 512": _wide(1),
    "32 rows, 10 of 512": _wide(32),
    "512 rows, 10 of 512": _wide(512),
    "1 row, 8 of 128": Spec(experts=128),
    "16 rows, 8 of 128, bfloat16": Spec(16, experts=128, dtype="bfloat16"),
    "40 rows, 4 of 60, 2020 wide": Spec(40, 2020, 60, 4),
    "5 rows, 3 of 37, 301 wide": Spec(5, 301, 37, 3),
    "16 rows, 8 of 256, float32": Spec(16, weight="float32"),
    "515 rows, 8 of 256, float32": Spec(515, weight="float32"),
    "1100 rows, 4 of 60, 2020 wide": Spec(1100, 2020, 60, 4),
    "1 row, 4 of 60": Spec(experts=60, slots=4, renormalise=False),
    "13 rows, 4 of 60, all options": Spec(
        13, experts=60, slots=4, renormalise=False, given=OPTIONS
    ),
    "8 rows, 8 of 256, all options": Spec(8, given=OPTIONS[:-1], shared_row=True),
}
