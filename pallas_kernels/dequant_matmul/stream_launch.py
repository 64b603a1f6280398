"""The launch of a stream of codes past rows that stay; see `stream`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import mosaic
from .._compat import Target
from ..mosaic import Inside, bytes_of
from .layout import UNIT
from .qtensor import QTensor
from .stages import setup
from .stream import Stream
from .stream_assembly import finish, multiply, sums_of
from .stream_inputs import spread
from .tensor_cores import TILE


def products(
    stream: Stream,
    x: Float[Array, "M I"],
    weights: Sequence[QTensor],
    dtype: Any,
    target: Target,
) -> list[Float[Array, "M _O"]]:
    """Products with matrices of one format.

    Args:
        stream: sizes.
        x: rows, in bfloat16.
        weights: matrices.
        dtype: of the results.
        target: device.
    """
    plan = Plan(stream, stream.stages(target.shared_memory), target.cores, dtype)
    words = weights[0].bits * weights[0].codes.shape[-1]
    made = mosaic.launch(
        plan.kernel,
        x,
        *(weight.codes.reshape(-1, words) for weight in weights),
        *(weight.scale for weight in weights),
        name="dequant_matmul_stream",
        programs=plan.programs,
        threads=stream.threads,
        shared=plan.shared,
        out=plan.out,
    )
    if stream.splits == 1:
        return [y[0] for y in made]
    return [jnp.sum(y, axis=0).astype(dtype) for y in made]


class Plan:
    """The kernel.

    Args:
        stream: sizes.
        stages: chunks in shared memory at once.
        cores: multiprocessors.
        dtype: of results.
    """

    def __init__(self, stream: Stream, stages: int, cores: int, dtype: Any):
        self.stream, self.stages = stream, stages
        self.each = cores // (stream.splits * stream.row_parts)
        self.programs = self.each * stream.splits * stream.row_parts
        result = jnp.dtype(dtype if stream.splits == 1 else jnp.float32)
        self.size = result.itemsize
        self.out = [
            jax.ShapeDtypeStruct((stream.splits, stream.rows, outputs), result)
            for outputs in stream.outputs
        ]
        self.places = stream.scale_places(stages)
        boxes = stages, stream.bits, stream.stage.box_rows, stream.line // 4
        self.shared = [
            jax.ShapeDtypeStruct(boxes, jnp.uint32),
            bytes_of(stream.held),
            bytes_of(self.places * stream.scales),
            bytes_of(stream.sums),
            bytes_of(2 * 8 * stages),
        ]
        ends = [sum(stream.tiles[: index + 1]) for index in range(len(stream.tiles))]
        self.pieces = list(zip([0, *ends], ends, strict=False))

    def kernel(self, inside: Inside, *refs: Any) -> None:
        """See `mosaic.launch`."""
        stream, count = self.stream, len(self.pieces)
        x, codes, scales = refs[0], refs[1 : 1 + count], refs[1 + count : 1 + 2 * count]
        outs, shared = refs[1 + 2 * count : 1 + 3 * count], refs[1 + 3 * count :]
        held, bars = shared[1], shared[4]
        inside.assembly(setup(self.stages, stream.consumers), inside.shared_address(bars))
        # Programs of the same codes are neighbours: the second one finds them in the cache.
        rest, part = inside.divided(inside.program, stream.row_parts)
        split, place = inside.divided(rest, self.each)
        first_row = inside.product(part, stream.own_rows)
        total = self.pieces[-1][1]
        begin, _ = inside.divided(inside.product(place, total), self.each)
        end, _ = inside.divided(inside.product(inside.sum(place, 1), total), self.each)
        tiles = inside.sum(end, inside.product(begin, -1))
        consumers = stream.consumers
        producer = inside.both(
            inside.less(consumers - 1, inside.thread), inside.less(inside.thread, consumers + 1)
        )
        with inside.when(producer), inside.over(0, tiles) as index:
            tile = inside.sum(begin, index)
            for chunk in range(stream.chunks):
                self._ask(inside, index, tile, chunk, split, codes, scales, shared)
        with inside.when(inside.less(inside.thread, consumers)):
            start = inside.row_address(x, split, 2 * stream.own)
            inside.assembly(spread(stream), start, first_row, inside.shared_address(held))
            with inside.over(0, tiles) as index:
                tile = inside.sum(begin, index)
                self._multiply(inside, index, tile, (split, first_row), outs, shared)

    def _stage(self, inside: Inside, index: Any, chunk: Any, bars: Any) -> tuple[Any, ...]:
        """Which stage, its barriers (full and empty), and the parity of the first."""
        turn, stage = inside.divided(
            inside.sum(inside.product(index, self.stream.chunks), chunk), self.stages
        )
        _, parity = inside.divided(turn, 2)
        full = inside.shared_address(bars, inside.product(stage, 8))
        return stage, full, inside.sum(full, 8 * self.stages), parity

    def _scales(self, inside: Inside, index: Any, scales_here: Any) -> Any:
        """Where a tile's scales lie."""
        _, place = inside.divided(index, self.places)
        return inside.shared_address(scales_here, inside.product(place, self.stream.scales))

    def _ask(
        self,
        inside: Inside,
        index: Any,
        tile: Any,
        chunk: int,
        split: Any,
        codes: Any,
        scales: Any,
        shared: Any,
    ) -> None:
        """For a chunk of a tile, as soon as its stage is free."""
        stream, (codes_here, _, scales_here, _, bars) = self.stream, shared
        stage, full, empty, parity = self._stage(inside, index, chunk, bars)
        inside.wait(empty, inside.sum(1, inside.product(-1, parity)))
        size = stream.stage.copied + (0 if chunk else stream.scales)
        inside.expect(full, size)
        units, width = stream.inputs // UNIT, stream.line // 4
        column = inside.sum(inside.product(split, stream.own // UNIT), chunk * width)
        for (begin, end), words, numbers in zip(self.pieces, codes, scales, strict=True):
            mine = inside.both(inside.less(begin - 1, tile), inside.less(tile, end))
            with inside.when(mine):
                first = inside.product(inside.sum(tile, -begin), TILE)
                for word in range(stream.bits):
                    columns = inside.sum(column, word * units), width
                    to = codes_here, (stage, stream.stage.slot(word), 0)
                    inside.copy_rows(words, (first, TILE), columns, to, (bars, stage))
                if chunk == 0:
                    there = self._scales(inside, index, scales_here)
                    source = inside.row_address(numbers, first, 2 * stream.scale_groups)
                    inside.copy(there, source, stream.scales, full)

    def _multiply(
        self, inside: Inside, index: Any, tile: Any, own: Any, outs: Any, shared: Any
    ) -> None:
        """A tile, chunk by chunk, as they come."""
        stream, (codes_here, held, scales_here, sums_here, bars) = self.stream, shared
        (split, first_row), x = own, inside.shared_address(held)
        count = sums_of(stream)
        numbers = inside.sum(
            self._scales(inside, index, scales_here),
            inside.product(split, 2 * stream.scale_groups // stream.splits),
        )

        def of_chunk(chunk: Any, *sums: Any) -> list[Any]:
            stage, full, empty, parity = self._stage(inside, index, chunk, bars)
            inside.wait(full, parity)
            there = inside.shared_address(codes_here, inside.product(stage, stream.stage.size))
            inputs = inside.sum(x, inside.product(chunk, 2 * stream.own_rows * stream.stage.inputs))
            mine = inside.sum(
                numbers, inside.product(chunk, 2 * stream.stage.inputs // stream.group_size)
            )
            operands = inputs, there, mine, *sums
            made = inside.assembly(multiply(stream), *operands, results=count)
            inside.give_back(empty)
            return made

        # One after the other: unrolled, they would share addresses that there are no registers for.
        sums = inside.repeated(stream.chunks, [0] * count, of_chunk)
        first, out, width = None, None, None
        for (begin, _), ref, outputs in zip(self.pieces, outs, stream.outputs, strict=True):
            own = inside.product(inside.sum(tile, -begin), TILE)
            row = inside.row_address(ref, split, stream.rows * outputs * self.size)
            mine = own, row, inside.number(outputs)
            if first is None:
                first, out, width = mine
            else:
                here = inside.less(begin - 1, tile)
                first, out, width = (
                    inside.select(here, a, b)
                    for a, b in zip(mine, (first, out, width), strict=True)
                )
        here = inside.shared_address(sums_here)
        inside.assembly(finish(stream, self.size), here, first, first_row, out, width, *sums)
