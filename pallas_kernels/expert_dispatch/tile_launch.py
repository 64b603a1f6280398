"""The launch of a stream past tiles of slots; see `tile_stream`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import mosaic
from .._compat import Target
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.stages import setup
from ..dequant_matmul.tensor_cores import TILE
from ..mosaic import Inside, bytes_of
from .sorting import Tiles
from .tile_assembly import finish, list_tiles, multiply, sums_of
from .tile_inputs import spread
from .tile_stream import ENTRY, GROUPS, ROWS, TileStream


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
        x: tokens, or inputs by place, in bfloat16.
        tiles: of slots.
        weight: stack of all experts.
        target: device.
        name: of the launch.

    Returns:
        Results; at places that no slot has, or in slots that are not filled, anything.
    """
    plan = _Plan(stream, target, weight.shape[1])
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


class _Plan:
    """The kernel.

    Args:
        stream: sizes.
        target: device.
        rows: of an expert's matrix.
    """

    def __init__(self, stream: TileStream, target: Target, rows: int):
        self.stream, self.programs, self.rows = stream, target.cores, rows
        self.stages = stream.stages(target.shared_memory, target.cores)
        self.places = stream.scale_places(self.stages)
        boxes = self.stages, stream.bits, stream.stage.box_rows, stream.stage.line // 4
        self.shared = [
            jax.ShapeDtypeStruct(boxes, jnp.uint32),
            bytes_of(stream.held),
            bytes_of(self.places * stream.scales),
            bytes_of(stream.listed(self.programs) * ENTRY),
            bytes_of(4 * ROWS),
            bytes_of(2 * 8 * self.stages),
        ]
        # Gates come with the rows above: first row, how many, and where to.
        every = GROUPS * TILE
        self.pieces = [(0, every, 0)]
        if stream.gated:
            self.pieces = [(0, every // 2, 0), (stream.outputs, every // 2, every // 2)]

    def kernel(self, inside: Inside, *refs: Any) -> None:
        """See `mosaic.launch`."""
        stream = self.stream
        x, slot, expert, first, rows, count, codes, scales, out, *shared = refs
        _, held, _, listed, _, bars = shared
        inside.assembly(setup(self.stages, stream.consumers), inside.shared_address(bars))
        item = _Items(inside, self, count, listed)
        inside.assembly(
            list_tiles(stream, self.programs),
            item.first_tile,
            *(inside.address(array) for array in (expert, first, rows)),
            inside.shared_address(listed),
            inside.shared_address(held),
        )
        consumers = stream.consumers
        producer = inside.both(
            inside.less(consumers - 1, inside.thread), inside.less(inside.thread, consumers + 1)
        )
        with inside.when(producer), inside.over(0, item.count) as index:
            of_item = item.at(index)
            for chunk in range(stream.chunks):
                self._ask(inside, of_item, chunk, codes, scales, shared)
        with inside.when(inside.less(inside.thread, consumers)):
            with inside.over(0, item.count) as index:
                of_item = item.at(index)
                self._hold(inside, of_item, x, slot, shared)
                self._multiply(inside, of_item, out, shared)

    def _stage(self, inside: Inside, index: Any, chunk: Any, bars: Any) -> tuple[Any, ...]:
        """Which stage, its barriers (full and empty), and the parity of the first."""
        turn, stage = inside.divided(
            inside.sum(inside.product(index, self.stream.chunks), chunk), self.stages
        )
        _, parity = inside.divided(turn, 2)
        full = inside.shared_address(bars, inside.product(stage, 8))
        return stage, full, inside.sum(full, 8 * self.stages), parity

    def _scales(self, inside: Inside, item: _Item, scales_here: Any) -> Any:
        """Where an item's scales lie."""
        _, place = inside.divided(item.index, self.places)
        return inside.shared_address(scales_here, inside.product(place, self.stream.scales))

    def _ask(
        self, inside: Inside, item: _Item, chunk: int, codes: Any, scales: Any, shared: Any
    ) -> None:
        """For a stage of an item, as soon as it is free."""
        stream, (codes_here, _, scales_here, _, _, bars) = self.stream, shared
        stage, full, empty, parity = self._stage(inside, item.index, chunk, bars)
        inside.wait(empty, inside.sum(1, inside.product(-1, parity)))
        inside.expect(full, stream.stage.copied + (0 if chunk else stream.scales))
        units, width = stream.inputs // UNIT, stream.stage.line // 4
        base = inside.sum(inside.product(item.expert, self.rows), item.first)
        for first, count, to in self.pieces:
            rows = inside.sum(base, first), count
            for word in range(stream.bits):
                columns = word * units + chunk * width, width
                place = codes_here, (stage, stream.stage.slot(word), to)
                inside.copy_rows(codes, rows, columns, place, (bars, stage))
            if chunk == 0:
                each = 2 * stream.scale_groups
                there = inside.sum(self._scales(inside, item, scales_here), to * each)
                source = inside.row_address(scales, rows[0], each)
                inside.copy(there, source, count * each, full)

    def _hold(self, inside: Inside, item: _Item, x: Any, slot: Any, shared: Any) -> None:
        """Brings the inputs of a tile, for its first item here and those behind it."""
        with inside.when(item.fresh):
            inside.assembly(
                spread(self.stream),
                inside.address(x),
                inside.row_address(slot, item.place, 4),
                item.place,
                item.filled,
                inside.shared_address(shared[1]),
                inside.shared_address(shared[4]),
            )

    def _multiply(self, inside: Inside, item: _Item, out: Any, shared: Any) -> None:
        """An item, stage by stage, as they come."""
        stream, (codes_here, held, scales_here, _, numbers, bars) = self.stream, shared
        scales = self._scales(inside, item, scales_here)

        def of_chunk(chunk: Any, *sums: Any) -> list[Any]:
            stage, full, empty, parity = self._stage(inside, item.index, chunk, bars)
            inside.wait(full, parity)
            there = inside.shared_address(codes_here, inside.product(stage, stream.stage.size))
            of_inputs = 2 * stream.own_rows * stream.stage.inputs
            inputs = inside.shared_address(held, inside.product(chunk, of_inputs))
            of_scales = 2 * stream.stage.inputs // stream.group_size
            mine = inside.sum(scales, inside.product(chunk, of_scales))
            operands = inputs, there, mine, *sums
            made = inside.assembly(multiply(stream), *operands, results=sums_of(stream))
            inside.give_back(empty)
            return made

        sums = inside.repeated(stream.chunks, [0] * sums_of(stream), of_chunk)
        slots = inside.shared_address(numbers)
        operands = item.first, item.place, item.filled, slots, inside.address(out), *sums
        inside.assembly(finish(stream), *operands)


class _Items:
    """The items of a program: as many as others have, one behind the other.

    Attributes:
        count: how many.
        first_tile: that of the first item.
    """

    def __init__(self, inside: Inside, plan: _Plan, count: Any, listed: Any):
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
        first = inside.product(number, self._plan.stream.item)
        fresh = inside.either(inside.less(number, 1), inside.less(index, 1))
        return _Item(index, first, fresh, *words[:3])


class _Item:
    """Some outputs of a tile of slots.

    Attributes:
        index: of the program's.
        first: output.
        fresh: whether it is the program's first one of its tile.
        expert: of the tile.
        place: of the tile's first slot.
        filled: how many it has.
    """

    def __init__(self, index: Any, first: Any, fresh: Any, expert: Any, place: Any, filled: Any):
        self.index, self.first, self.fresh = index, first, fresh
        self.expert, self.place, self.filled = expert, place, filled
