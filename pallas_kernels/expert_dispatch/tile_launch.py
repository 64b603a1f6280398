"""The launch of a stream past tiles of slots; see `tile_stream`."""

from __future__ import annotations

import contextlib
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
from .tile_assembly import list_items, multiply, registers
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
        _, *others = stream.shared(self.stages, self.programs)
        self.shared = [jax.ShapeDtypeStruct(boxes, jnp.uint32), *map(bytes_of, others)]
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
        text = setup(self.stages * stream.stage.blocks, stream.consumers, PRODUCERS + 1)
        inside.assembly(text, inside.shared_address(bars))
        item = _Items(inside, self, count, listed)
        inside.assembly(
            list_items(stream, self.programs),
            inside.program,
            *(inside.address(array) for array in (expert, first, rows)),
            inside.shared_address(listed),
        )
        with inside.when(inside.less(stream.consumers - 1, inside.thread)):
            inside.assembly(registers(stream)[0])
            with inside.over(0, item.count) as index:
                of_item = item.at(index)
                with inside.over(0, stream.chunks) as chunk:
                    self._ask(inside, of_item, chunk, (x, slot, codes, scales), shared)
        with inside.when(inside.less(inside.thread, stream.consumers)):
            inside.assembly(registers(stream)[1])
            with inside.over(0, item.count) as index:
                of_item = item.at(index)
                for slots in stream.sizes:
                    with self._has(inside, of_item, slots):
                        sums = self._multiply(inside, of_item, slots, shared)
                        self._store(inside, of_item, slots, out, shared, sums)

    def _stage(self, inside: Inside, index: Any, chunk: Any, shared: Any) -> _Stage:
        """That of a chunk of an item."""
        codes, held, scales, numbers, *_, bars = shared
        turn, stage = inside.divided(
            inside.sum(inside.product(index, self.stream.chunks), chunk), self.stages
        )
        _, parity = inside.divided(turn, 2)
        first = inside.shared_address(bars, inside.product(stage, 8))
        blocks = self.stream.stage.blocks
        barriers = [inside.sum(first, 8 * self.stages * each) for each in range(2 * blocks)]
        _, place = inside.divided(index, self.places)
        return _Stage(
            stage,
            parity,
            barriers[:blocks],
            barriers[blocks:],
            inside.shared_address(codes, inside.product(stage, self.stream.stage.size)),
            inside.shared_address(held, inside.product(stage, self.stream.held)),
            inside.shared_address(scales, inside.product(place, self.stream.scales)),
            inside.shared_address(numbers, inside.product(place, self.stream.numbers)),
        )

    def _ask(self, inside: Inside, item: _Item, chunk: Any, arrays: Any, shared: Any) -> None:
        """For a stage of an item, as soon as it is free: its codes when all of it is."""
        stream, (x, slot, codes, scales) = self.stream, arrays
        stage = self._stage(inside, item.index, chunk, shared)
        before = inside.product(chunk, 2 * stream.stage.inputs)
        for block, (full, empty) in enumerate(zip(stage.full, stage.empty, strict=True)):
            inside.wait(empty, inside.sum(1, inside.product(-1, stage.parity)))
            if block == stream.stage.blocks - 1:
                with inside.when(inside.less(inside.thread, stream.consumers + 1)):
                    self._ask_for_codes(inside, item, chunk, stage, (codes, scales), shared)
            inside.assembly(
                ask(stream, block),
                *(inside.address(array) for array in (x, slot)),
                *(item.place, item.filled, before, stage.inputs, stage.numbers, full),
            )

    def _ask_for_codes(
        self, inside: Inside, item: _Item, chunk: Any, stage: _Stage, arrays: Any, shared: Any
    ) -> None:
        """And for an item's scales at its beginning; by one thread."""
        stream, (codes, scales), (here, *_, bars) = self.stream, arrays, shared
        beginning, (first_block, *others) = inside.less(chunk, 1), stage.full
        more = inside.select(beginning, inside.number(stream.scales), inside.number(0))
        inside.expect(first_block, inside.sum(stream.stage.copied, more))
        for barrier in others:
            inside.expect(barrier, 0)
        units, width = stream.inputs // UNIT, stream.stage.line // 4
        for first, count, to in self.pieces:
            rows = self._row(inside, item, first), count
            for word in range(stream.bits):
                columns = inside.sum(word * units, inside.product(chunk, width)), width
                place = here, (stage.number, stream.stage.slot(word), to)
                inside.copy_rows(codes, rows, columns, place, (bars, stage.number))
        with inside.when(beginning):
            for first, count, to in self.pieces:
                each = 2 * stream.scale_groups
                source = inside.row_address(scales, self._row(inside, item, first), each)
                there = inside.sum(stage.scales, to * each)
                inside.copy(there, source, count * each, first_block)

    def _row(self, inside: Inside, item: _Item, further: int) -> Any:
        """Of all experts' matrices, so far behind the item's first."""
        return inside.sum(inside.product(item.expert, self.rows), item.first, further)

    def _has(
        self, inside: Inside, item: _Item, slots: int
    ) -> contextlib.AbstractContextManager[None]:
        """Only where so many are the fewest that take an item's slots."""
        fewest, *more = self.stream.sizes
        if not more:
            return contextlib.nullcontext()
        few = slots == fewest
        return inside.when(
            inside.less(item.filled, fewest + 1) if few else inside.less(fewest, item.filled)
        )

    def _multiply(self, inside: Inside, item: _Item, slots: int, shared: Any) -> list[Any]:
        """A thread's sums of an item's first slots, whose stages are multiplied as they come."""
        stream = self.stream

        def of_chunk(chunk: Any, *sums: Any) -> list[Any]:
            stage, made = self._stage(inside, item.index, chunk, shared), list(sums)
            of_scales = 2 * stream.stage.inputs // stream.group_size
            scales = inside.sum(stage.scales, inside.product(chunk, of_scales))
            for block, (full, empty) in enumerate(zip(stage.full, stage.empty, strict=True)):
                inside.wait(full, stage.parity)
                operands = stage.inputs, stage.codes, scales, *made
                text = multiply(stream, slots, block)
                made = inside.assembly(text, *operands, results=len(made))
                inside.give_back(empty)
            return made

        return inside.repeated(stream.chunks, [0] * stream.sums(slots), of_chunk)

    def _store(
        self, inside: Inside, item: _Item, slots: int, out: Any, shared: Any, sums: list[Any]
    ) -> None:
        """A thread's results of an item's first slots."""
        stream, (*_, turned, _, _) = self.stream, shared
        if stream.gated:
            text, operands = store_gated(stream, slots), (item.place, item.filled)
        else:
            text = store_by_slot(stream, slots)
            operands = item.filled, self._stage(inside, item.index, 0, shared).numbers
        addresses = inside.shared_address(turned), inside.address(out)
        inside.assembly(text, item.first, *operands, *addresses, *sums)


class _Stage(NamedTuple):
    """Where a stage is.

    Attributes:
        number: of all stages.
        parity: of its barriers' phase.
        full: shared addresses of barriers that it came, block by block.
        empty: and of those that it was multiplied.
        codes: shared address of its codes.
        inputs: and of its inputs.
        scales: and of its item's scales.
        numbers: and of its item's numbers of slots.
    """

    number: Any
    parity: Any
    full: list[Any]
    empty: list[Any]
    codes: Any
    inputs: Any
    scales: Any
    numbers: Any


class _Items:
    """The items of a program: one of as many as there are programs, then one of the next so many.

    So a tile's items are worked on at the same time, and its inputs are read once for all of them.
    If each program had a run of items, all together would read more than the cache holds before one
    came back to its tile: on an H200, of the reads of 16,384 tokens' first launch 70 % missed it.

    Attributes:
        count: how many.
    """

    def __init__(self, inside: Inside, plan: Plan, count: Any, listed: Any):
        self._inside, self._listed = inside, listed
        [tiles] = inside.assembly("ld.global.nc.b32 $0, [$1];", inside.address(count), results=1)
        total = inside.product(tiles, plan.stream.items)
        others = inside.sum(total, plan.programs - 1, inside.product(-1, inside.program))
        self.count, _ = inside.divided(others, plan.programs)

    def at(self, index: Any) -> _Item:
        """One of them."""
        inside = self._inside
        address = inside.shared_address(self._listed, inside.product(index, ENTRY))
        words = inside.assembly("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", address, results=4)
        return _Item(index, *words)


class _Item(NamedTuple):
    """Some outputs of a tile of slots.

    Attributes:
        index: of the program's.
        expert: of the tile.
        place: of the tile's first slot.
        filled: how many it has.
        first: output.
    """

    index: Any
    expert: Any
    place: Any
    filled: Any
    first: Any
