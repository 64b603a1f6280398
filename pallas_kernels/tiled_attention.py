"""Attention of a tile of query rows over tiles of keys, inside a Triton kernel.

The prefill kernels share it; they differ in where the tokens of a tile lie. The query heads of one
key/value head are rows of one matrix product, so that a tile of keys is loaded once for all.

Letters of this file: R rows of a program, S tokens of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, Shaped

from ._compat import dot, multiply_add
from .attention_cut import Cut

LOWEST = float(jnp.finfo(jnp.float32).min)
PATIENCE = 8.0

# (number of the tile, the tokens to read or None for all) -> its keys and values. Rows of tokens
# that are not to be read are finite.
Load = Callable[
    [Int[Array, ""], Bool[Array, " S"] | None], tuple[Float[Array, "S H"], Float[Array, "S H"]]
]


class Sight(NamedTuple):
    """What each row sees: the tokens from `first` to `last`, and sinks.

    Attributes:
        first: may be after `last`, which leaves the sinks.
        last: below 0 in a row that sees nothing.
        sinks: this many first tokens are seen besides, as far as they are not after `last`.
    """

    first: Int[Array, " R"]
    last: Int[Array, " R"]
    sinks: int = 0

    @property
    def any(self) -> Bool[Array, " R"]:
        """Rows that see something."""
        return self.last >= (jnp.zeros_like(self.first) if self.sinks else self.first)


class Softmax(NamedTuple):
    """An online softmax to base 2: largest score, sum of weights, weighted values."""

    largest: Float[Array, " R"]
    total: Float[Array, " R"]
    mixed: Float[Array, "R H"]

    @classmethod
    def empty(cls, rows: int, width: int) -> Softmax:
        """Nothing seen yet."""
        return cls(
            jnp.full((rows,), LOWEST, jnp.float32),
            jnp.zeros((rows,), jnp.float32),
            jnp.zeros((rows, width), jnp.float32),
        )

    def add(
        self,
        scores: Float[Array, "R S"],
        scale: float,
        values: Float[Array, "S H"],
        visible: Bool[Array, "R S"] | None,
        patient: bool,
    ) -> Softmax:
        """One more tile; all of it is visible if `visible` is None.

        If patient, what was summed is rescaled only when a largest score has grown a lot: weights
        may be up to 2^PATIENCE, which float32 sums bear, and most tiles go without that work.
        """
        if visible is not None:
            scores = jnp.where(visible, scores, LOWEST)
        largest = jnp.maximum(self.largest, jnp.max(scores, axis=1))
        grown = None
        if patient:
            grown = jnp.max(largest - self.largest) > PATIENCE / scale
            largest = jnp.where(grown, largest, self.largest)
        decay = jnp.exp2((self.largest - largest) * scale)
        weights = jnp.exp2(multiply_add(scores, scale, (-scale * largest)[:, None]))
        if visible is not None:
            # In a row that has seen nothing so far, hidden scores are the largest too.
            weights = jnp.where(visible, weights, 0.0)
        if grown is None:
            mixed = self.mixed * decay[:, None]
        else:
            mixed = jax.lax.cond(grown, lambda x: x * decay[:, None], lambda x: x, self.mixed)
        return Softmax(
            largest,
            self.total * decay + jnp.sum(weights, axis=1),
            mixed + dot(weights.astype(values.dtype), values),
        )

    def result(self, wanted: Bool[Array, " R"]) -> Float[Array, "R H"]:
        """The attended values; zero in rows that saw nothing or are not wanted."""
        known = wanted & (self.total > 0)
        return self.mixed * jnp.where(known, 1.0 / self.total, 0.0)[:, None]


def softmax_scale(width: int) -> float:
    """Factor of the scores, for a softmax to base 2."""
    return width**-0.5 * math.log2(math.e)


def attend(
    q: Float[Array, "R H"],
    sight: Sight,
    load: Load,
    cut: Cut,
    *,
    patient: bool,
    split: Array | int = 0,
) -> Softmax:
    """Softmax attention of a program's rows over what they see.

    Tiles that all rows see whole come first and need no mask; the masked ones at both ends of the
    triangle, or of the window, follow.

    Args:
        q: queries, not scaled.
        sight: what each row sees.
        load: reads a tile.
        cut: how the work is cut.
        patient: see `Softmax.add`. On an H200 that gains 7 % where tokens lie in a row, and loses
            8 % where each tile is looked up in a table first.
        split: which of the `cut.splits` parts of the tokens to look at.
    """
    rows, width = q.shape
    scale = softmax_scale(width)
    span, sinks = _Span.of(sight, cut.tile), sight.sinks

    def plain(number: Array, state: Softmax) -> Softmax:
        keys, values = load(number, None)
        return state.add(dot(q, keys.T), scale, values, None, patient)

    def masked(index: Array, state: Softmax) -> Softmax:
        number = span.masked_tile(index)
        token = number * cut.tile + jnp.arange(cut.tile, dtype=jnp.int32)
        seen = (token >= span.earliest) | (token < sinks)
        keys, values = load(number, seen & (token <= span.latest))
        visible = (token[None, :] >= sight.first[:, None]) | (token < sinks)[None, :]
        visible &= token[None, :] <= sight.last[:, None]
        return state.add(dot(q, keys.T), scale, values, visible, patient)

    def share(count: Array) -> tuple[Array, Array]:
        return count * split // cut.splits, count * (split + 1) // cut.splits

    state = Softmax.empty(rows, width)
    start, stop = share(span.plain_stop - span.plain_start)
    state = jax.lax.fori_loop(span.plain_start + start, span.plain_start + stop, plain, state)
    return jax.lax.fori_loop(*share(span.masked_tiles), masked, state)


class _Span(NamedTuple):
    """The tiles that a program looks at, as int32 scalars.

    Attributes:
        earliest: first token that a row sees, sinks aside.
        latest: last token that a row sees.
        sink_tiles: tiles in front of `start` that hold sinks.
        start: first tile that is seen, sinks aside.
        plain_start: first tile that all rows see whole.
        plain_stop: tile after the last that all rows see whole.
        stop: tile after the last that is seen.
    """

    earliest: Array
    latest: Array
    sink_tiles: Array
    start: Array
    plain_start: Array
    plain_stop: Array
    stop: Array

    @classmethod
    def of(cls, sight: Sight, tile: int) -> _Span:
        """The tiles that rows with this sight look at; none if they see nothing."""
        most = jnp.iinfo(jnp.int32).max - tile
        latest = jnp.max(jnp.where(sight.any, sight.last, -1))
        earliest = jnp.min(jnp.where(sight.any, sight.first, most))
        stop = (latest + tile) // tile
        start = jnp.minimum(earliest // tile, stop)
        whole = (jnp.max(jnp.where(sight.any, sight.first, 0)) + tile - 1) // tile
        plain_start = jnp.clip(whole, start, stop)
        end = (jnp.min(jnp.where(sight.any, sight.last, most)) + 1) // tile
        plain_stop = jnp.clip(end, plain_start, stop)
        sink_tiles = jnp.minimum((sight.sinks + tile - 1) // tile, start)
        return cls(earliest, latest, sink_tiles, start, plain_start, plain_stop, stop)

    @property
    def masked_tiles(self) -> Array:
        """How many tiles some row does not see whole."""
        return self.sink_tiles + self.plain_start - self.start + self.stop - self.plain_stop

    def masked_tile(self, index: Array) -> Array:
        """Number of a masked tile: first those with sinks, then those at the two ends."""
        number = index - self.sink_tiles
        number = self.start + number
        number += jnp.where(number < self.plain_start, 0, self.plain_stop - self.plain_start)
        return jnp.where(index < self.sink_tiles, index, number)


def load_rows(
    ref: Any, place: Int[Array, " r"], wanted: Bool[Array, " r"] | None
) -> Shaped[Array, "r H"]:
    """Rows of a matrix; zero where not wanted, if something is said about that."""
    row, column, mask = _grid(place, wanted, ref.shape[1])
    other = None if wanted is None else jnp.zeros((), ref.dtype)
    return plt.load(ref.at[row, column], mask=mask, other=other)


def store_rows(
    ref: Any, place: Int[Array, " r"], wanted: Bool[Array, " r"], values: Float[Array, "r H"]
) -> None:
    """Writes the wanted rows of a matrix."""
    row, column, mask = _grid(place, wanted, ref.shape[1])
    plt.store(ref.at[row, column], values.astype(ref.dtype), mask=mask)


def _grid(
    place: Int[Array, " r"], wanted: Bool[Array, " r"] | None, width: int
) -> tuple[Array, Array, Array | None]:
    shape = (place.shape[0], width)
    if wanted is not None:
        wanted = jnp.broadcast_to(wanted[:, None], shape)
    row = jnp.broadcast_to(place[:, None], shape)
    return row, jax.lax.broadcasted_iota(jnp.int32, shape, 1), wanted
