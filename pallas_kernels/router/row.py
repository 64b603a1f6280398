"""One row of logits and options, as a program of the second launch reads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

# Parts that are read together. Reads wait for one another less the more these are, but a longer
# program takes longer to fetch: about as long for eight parts as what they wait.
PARTS_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """References and a place in them, inside a kernel.

    Attributes:
        parts: of the logits, [P, M, E].
        options: those that are given, by name; see `api.router`.
        index: of the row.
    """

    parts: Any
    options: dict[str, Any]
    index: Any

    def logits(self, column: Int[Array, " n"], exists: Any) -> Float[Array, " n"]:
        """Of the experts in the columns, with the parts added in their order."""
        count = self.parts.shape[0]
        rounds = pl.cdiv(count, PARTS_AT_ONCE)
        each = pl.cdiv(count, rounds)

        def read(part: Any) -> Float[Array, " n"]:
            inside = exists
            if count % each:
                inside = part < count if exists is None else exists & (part < count)
            if inside is not None:
                inside = jnp.broadcast_to(inside, column.shape)
            places = self._places(part, column), self._places(self.index, column)
            other = None if inside is None else 0.0
            return plt.load(self.parts.at[*places, column], mask=inside, other=other)

        def add(turn: Any, total: Float[Array, " n"]) -> Float[Array, " n"]:
            for found in [read(turn * each + part) for part in range(each)]:
                total += found
            return total

        if count == 1:
            return read(0)
        return jax.lax.fori_loop(0, rounds, add, jnp.zeros(column.shape, jnp.float32))

    def score(
        self, logits: Float[Array, " n"], column: Int[Array, " n"], exists: Any
    ) -> Float[Array, " n"]:
        """Of logits in the columns, whatever the mask says."""
        if "bias" in self.options:
            logits += self.of_experts("bias", column, exists)
        if "temperature" in self.options:
            logits /= self.of_row("temperature")
        return logits

    def of_row(self, name: str) -> Any:
        """An option that has a number a row."""
        return self.options[name][self.index]

    def of_experts(
        self, name: str, column: Int[Array, " n"], exists: Bool[Array, " n"] | None
    ) -> Array:
        """An option of the experts in the columns: of this row, or of the only one."""
        ref = self.options[name]
        if "part" in self.options:
            index = self.options["part"][0] * self.parts.shape[1] + self.index
        else:
            index = self.index if ref.shape[0] > 1 else 0
        other = None if exists is None else (False if ref.dtype == jnp.bool_ else 0.0)
        return plt.load(ref.at[self._places(index, column), column], mask=exists, other=other)

    def _places(self, index: Any, column: Int[Array, " n"]) -> Int[Array, " n"]:
        return jnp.full(column.shape, index, jnp.int32)
