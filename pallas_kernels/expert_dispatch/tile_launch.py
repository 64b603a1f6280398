"""The launch of a stream past tiles of slots; see `tile_stream`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import mosaic
from .._compat import Target
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.stages import PRODUCERS, setup
from ..mosaic import Inside, bytes_of
from .sorting import Tiles
from .tile_assembly import list_tiles, multiply, sums_of
from .tile_inputs import ask
from .tile_results import store_by_slot, store_gated
from .tile_stream import ENTRY, HEIGHT, TileStream


def products(
    stream: TileStream,
    x: Float[Array, "_M _I"],
    tiles: Tiles,
    weight: QTensor,
    target: Target,
    name: str,
) -> Float[Array, "S _O"]:
    """Of all slots, in bfloat16: silu(gate) * up by place; or down projections, by slot.

    Args:
        stream: sizes.
        x: tokens, or inputs by place, in bfloat16 and in the matrix's `order_of`.
        tiles: of slots.
        weight: stack of all experts.
        target: device.
        name: of the launch.

    Returns:
        Results; at places that no slot has, or in slots that are not filled, anything.
    """
    plan = Plan(stream, target, weight.shape[1])
    return mosaic.launch(
        plan.kernel,
        x,
        *tiles,
        weight.codes.reshape(-1, weight.bits * weight.codes.shape[-1]),
        weight.scale.reshape(-1, stream.scale_groups),
        name=name,
        programs=target.cores,
        threads=stream.threads,
        shared=plan.shared,
        out=jax.ShapeDtypeStruct((stream.slots, stream.outputs), jnp.bfloat16),
    )


class Plan:
    """The kernel.

    Args:
        stream: sizes.
        target: device.
        rows: of an expert's matrix.
    """

    def __init__(self, stream: TileStream, target: Target, rows: int):
        self.stream, self.programs, self.rows = stream, target.cores, rows
        self.stages = stream.stages(target.shared_memory, target.cores)
        self.places = stream.places(self.stages)
        boxes = self.stages, stream.bits, stream.stage.box_rows, stream.stage.line // 4
        self.shared = [
            jax.ShapeDtypeStruct(boxes, jnp.uint32),
            bytes_of(self.stages * stream.held),
            bytes_of(self.places * stream.scales),
            bytes_of(self.places * stream.numbers),
            bytes_of(stream.turned),
            bytes_of(stream.listed(self.programs) * ENTRY),
            bytes_of(2 * 8 * self.stages),
        ]
        # Gates come with the rows above: first row, how many, and where to.
        self.pieces = [(0, HEIGHT, 0)]
        if stream.gated:
            half = HEIGHT // 2
            self.pieces = [(0, half, 0), (stream.outputs, half, half)]

    def kernel(self, inside: Inside, *refs: Any) -> None:
        """See `mosaic.launch`."""
        stream = self.stream
        x, slot, expert, first, rows, count, codes, scales, out, *shared = refs
        *_, listed, bars = shared
        text = setup(self.stages, stream.consumers, PRODUCERS + 1)
        inside.assembly(text, inside.shared_address(bars))
        item = _Items(inside, self, count, listed)
        inside.assembly(
            list_tiles(stream, self.programs),
            item.first_tile,
            *(inside.address(array) for array in (expert, first, rows)),
            inside.shared_address(listed),
        )
        with inside.when(inside.less(stream.consumers - 1, inside.thread)):
            with inside.over(0, item.count) as index:
                of_item = item.at(index)
                with inside.over(0, stream.chunks) as chunk:
                    self._ask(inside, of_item, chunk, (x, slot, codes, scales), shared)
        multiplies = inside.less(inside.thread, stream.consumers)
        with inside.when(multiplies), inside.over(0, item.count) as index:
            of_item = item.at(index)
            sums = self._multiply(inside, of_item, shared)
            self._store(inside, of_item, out, shared, sums)

    def _stage(self, inside: Inside, index: Any, chunk: Any, shared: Any) -> _Stage:
        """That of a chunk of an item."""
        codes, held, scales, numbers, *_, bars = shared
        turn, stage = inside.divided(
            inside.sum(inside.product(index, self.stream.chunks), chunk), self.stages
        )
        _, parity = inside.divided(turn, 2)
        full = inside.shared_address(bars, inside.product(stage, 8))
        _, place = inside.divided(index, self.places)
        return _Stage(
            stage,
            parity,
            full,
            inside.sum(full, 8 * self.stages),
            inside.shared_address(codes, inside.product(stage, self.stream.stage.size)),
            inside.shared_address(held, inside.product(stage, self.stream.held)),
            inside.shared_address(scales, inside.product(place, self.stream.scales)),
            inside.shared_address(numbers, inside.product(place, self.stream.numbers)),
        )

    def _ask(self, inside: Inside, item: _Item, chunk: Any, arrays: Any, shared: Any) -> None:
        """For a stage of an item, as soon as it is free."""
        stream, (x, slot, codes, scales) = self.stream, arrays
        stage = self._stage(inside, item.index, chunk, shared)
        inside.wait(stage.empty, inside.sum(1, inside.product(-1, stage.parity)))
        beginning = inside.less(chunk, 1)
        with inside.when(inside.less(inside.thread, stream.consumers + 1)):
            more = inside.select(beginning, inside.number(stream.scales), inside.number(0))
            inside.expect(stage.full, inside.sum(stream.stage.copied, more))
            self._ask_for_codes(inside, item, chunk, stage, codes, shared)
            with inside.when(beginning):
                for first, count, to in self.pieces:
                    each = 2 * stream.scale_groups
                    source = inside.row_address(scales, self._row(inside, item, first), each)
                    there = inside.sum(stage.scales, to * each)
                    inside.copy(there, source, count * each, stage.full)
        before = inside.product(chunk, 2 * stream.stage.inputs)
        inside.assembly(
            ask(stream),
            *(inside.address(array) for array in (x, slot)),
            *(item.place, item.filled, before, stage.inputs, stage.numbers, stage.full),
        )

    def _ask_for_codes(
        self, inside: Inside, item: _Item, chunk: Any, stage: _Stage, codes: Any, shared: Any
    ) -> None:
        """By one thread."""
        stream, (here, *_, bars) = self.stream, shared
        units, width = stream.inputs // UNIT, stream.stage.line // 4
        for first, count, to in self.pieces:
            rows = self._row(inside, item, first), count
            for word in range(stream.bits):
                columns = inside.sum(word * units, inside.product(chunk, width)), width
                place = here, (stage.number, stream.stage.slot(word), to)
                inside.copy_rows(codes, rows, columns, place, (bars, stage.number))

    def _row(self, inside: Inside, item: _Item, further: int) -> Any:
        """Of all experts' matrices, so far behind the item's first."""
        return inside.sum(inside.product(item.expert, self.rows), item.first, further)

    def _multiply(self, inside: Inside, item: _Item, shared: Any) -> list[Any]:
        """A thread's sums of an item, whose stages are multiplied as they come."""
        stream = self.stream

        def of_chunk(chunk: Any, *sums: Any) -> list[Any]:
            stage = self._stage(inside, item.index, chunk, shared)
            inside.wait(stage.full, stage.parity)
            of_scales = 2 * stream.stage.inputs // stream.group_size
            scales = inside.sum(stage.scales, inside.product(chunk, of_scales))
            operands = stage.inputs, stage.codes, scales, *sums
            made = inside.assembly(multiply(stream), *operands, results=sums_of(stream))
            inside.give_back(stage.empty)
            return made

        return inside.repeated(stream.chunks, [0] * sums_of(stream), of_chunk)

    def _store(self, inside: Inside, item: _Item, out: Any, shared: Any, sums: list[Any]) -> None:
        """A thread's results of an item."""
        stream, out = self.stream, inside.address(out)
        if stream.gated:
            inside.assembly(store_gated(stream), item.first, item.place, item.filled, out, *sums)
            return
        *_, turned, _, _ = shared
        numbers = self._stage(inside, item.index, 0, shared).numbers
        operands = item.first, item.filled, numbers, inside.shared_address(turned), out
        inside.assembly(store_by_slot(stream), *operands, *sums)


class _Stage(NamedTuple):
    """Where a stage is.

    Attributes:
        number: of all stages.
        parity: of its barriers' phase.
        full: shared address of the barrier that it came.
        empty: and of that that it was multiplied.
        codes: shared address of its codes.
        inputs: and of its inputs.
        scales: and of its item's scales.
        numbers: and of its item's numbers of slots.
    """

    number: Any
    parity: Any
    full: Any
    empty: Any
    codes: Any
    inputs: Any
    scales: Any
    numbers: Any


class _Items:
    """The items of a program: as many as others have, one behind the other.

    Attributes:
        count: how many.
        first_tile: that of the first item.
    """

    def __init__(self, inside: Inside, plan: Plan, count: Any, listed: Any):
        self._inside, self._plan, self._listed = inside, plan, listed
        items, programs = plan.stream.items, plan.programs
        [tiles] = inside.assembly("ld.global.nc.b32 $0, [$1];", inside.address(count), results=1)
        total = inside.product(tiles, items)
        self._begin, _ = inside.divided(inside.product(total, inside.program), programs)
        following = inside.product(total, inside.sum(inside.program, 1))
        end, _ = inside.divided(following, programs)
        self.count = inside.sum(end, inside.product(self._begin, -1))
        self.first_tile, _ = inside.divided(self._begin, items)

    def at(self, index: Any) -> _Item:
        """One of them."""
        inside, items = self._inside, self._plan.stream.items
        tile, number = inside.divided(inside.sum(self._begin, index), items)
        entry = inside.sum(tile, inside.product(self.first_tile, -1))
        address = inside.shared_address(self._listed, inside.product(entry, ENTRY))
        words = inside.assembly("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", address, results=4)
        return _Item(index, inside.product(number, self._plan.stream.item), *words[:3])


class _Item(NamedTuple):
    """Some outputs of a tile of slots.

    Attributes:
        index: of the program's.
        first: output.
        expert: of the tile.
        place: of the tile's first slot.
        filled: how many it has.
    """

    index: Any
    first: Any
    expert: Any
    place: Any
    filled: Any
