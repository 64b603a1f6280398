"""The static sizes of one call, as the kernels need them."""

from __future__ import annotations

import dataclasses
import math

from jax.experimental import pallas as pl
from jaxtyping import Array

from .config import Config, rows_for


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes in the order B, T, K, G, H, P, Z, W; G is the query heads a key/value head.

    A program works for one owner, a key/value head of a sequence: there are C = B * K of them. Its
    matrices have R rows: T * G queries and padding. `coded` pools hold int8 codes.
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
    coded: bool
    config: Config

    @property
    def owners(self) -> int:
        """C = B * K."""
        return self.batch * self.kv_heads

    @property
    def queries(self) -> int:
        """Rows of a program that hold a query, T * G."""
        return self.length * self.group

    @property
    def rows(self) -> int:
        """R, the rows of a program."""
        return rows_for(self.queries)

    @property
    def scale(self) -> float:
        """Factor of the scores, for a softmax to base 2."""
        return self.width**-0.5 * math.log2(math.e)

    @property
    def sink_tiles(self) -> int:
        """Tiles that hold the sinks."""
        return pl.cdiv(self.sinks, self.config.tile)

    def query_at(self, sequence: Array, head: Array, row: Array) -> Array:
        """Where the query of a program's row lies in [B * T * N]."""
        token = sequence * self.length + row // self.group
        return (token * self.kv_heads + head) * self.group + row % self.group
