"""The static sizes of one call, as the kernels need them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from .config import rows_for


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes in the order B, T, K, G, H, P, Z, W; G is the query heads a key/value head.

    A program works for one owner, a key/value head of a sequence: there are C = B * K of them. In
    decoding its matrices have R rows: T * G queries and padding.
    """

    batch: int
    length: int
    kv_heads: int
    group: int
    width: int
    blocks: int
    block_size: int
    columns: int
    window: int | None
    sinks: int

    @classmethod
    def of(
        cls, q: Any, key_blocks: Any, block_table: Any, *, window: int | None, sinks: int
    ) -> Shape:
        """The sizes of a call with these arrays."""
        batch, length, query_heads, width = q.shape
        blocks, kv_heads, block_size, _ = key_blocks.shape
        return cls(
            batch=batch,
            length=length,
            kv_heads=kv_heads,
            group=query_heads // kv_heads,
            width=width,
            blocks=blocks,
            block_size=block_size,
            columns=block_table.shape[1],
            window=window,
            sinks=sinks,
        )

    @property
    def owners(self) -> int:
        """C = B * K."""
        return self.batch * self.kv_heads

    @property
    def queries(self) -> int:
        """Queries of an owner, T * G."""
        return self.length * self.group

    @property
    def rows(self) -> int:
        """R, the rows of a decoding program."""
        return rows_for(self.queries)

    @property
    def room(self) -> int:
        """Tokens that a row of the table has room for."""
        return self.columns * self.block_size

    def query_at(self, sequence: Array, head: Array, row: Array) -> Array:
        """Where an owner's queries lie in [B * T * N]."""
        token = sequence * self.length + row // self.group
        return (token * self.kv_heads + head) * self.group + row % self.group
