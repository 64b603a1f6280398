"""The launch of a stream: one warp that asks, groups of others that multiply; see `stream`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import mosaic
from .._compat import Target
from ..dequant_matmul.qtensor import QTensor
from ..mosaic import Inside, bytes_of
from .stream import MOST_EXPERTS, ROWS, Stream
from .stream_assembly import barriers, multiply, setup


def products(
    stream: Stream,
    x: Float[Array, "_M _I"],
    experts: Int[Array, " S"],
    slots: Int[Array, "S R"],
    weight: QTensor,
    target: Target,
    name: str,
) -> Float[Array, "S _O"]:
    """Of all slots: silu(gate) * up in bfloat16, in `stream.TURN`; or down projections, in float32.

    Args:
        stream: sizes.
        x: inputs, in bfloat16 and `stream.TURN`; each for `stream.slots_of_token` slots.
        experts: see `order.Order`.
        slots: likewise.
        weight: stack of all experts.
        target: device.
        name: of the launch.

    Returns:
        Results, in slots that are not filled anything.
    """
    words = weight.bits * stream.units
    stages = stream.stages(target.shared_memory)
    plan = _Plan(stream, stages, target.cores, weight.shape[1])
    dtype = jnp.bfloat16 if stream.gated else jnp.float32
    return mosaic.launch(
        plan.kernel,
        x,
        experts,
        slots,
        weight.codes.reshape(-1, words),
        weight.scale.reshape(-1, stream.groups),
        name=name,
        programs=target.cores,
        threads=stream.threads,
        shared=plan.shared,
        out=jax.ShapeDtypeStruct((stream.slots, stream.outputs), dtype),
    )


class _Plan:
    """The kernel.

    Args:
        stream: sizes.
        stages: tiles in shared memory at once.
        programs: of the launch.
        rows: of an expert's matrix.
    """

    def __init__(self, stream: Stream, stages: int, programs: int, rows: int):
        self.stream, self.stages, self.programs, self.rows = stream, stages, programs, rows
        boxes = stages, stream.bits * stream.boxes, stream.rows, stream.line // 4
        self.shared = [
            jax.ShapeDtypeStruct(boxes, jnp.uint32),
            bytes_of(stages * stream.scales),
            # Inputs of a row of slots, while those of the next one come.
            bytes_of(2 * ROWS * stream.token),
            bytes_of(stream.sums),
            bytes_of(4 * (stream.slots + 1)),
            bytes_of(stream.zeros),
            bytes_of(8 * barriers(stages)),
        ]
        # Tiles of gates come with those of the rows above: first row, how many, and where to.
        half = stream.rows // 2
        self.pieces = [(0, half, 0), (stream.outputs, half, half)]
        if not stream.gated:
            self.pieces = [(0, stream.rows, 0)]

    def kernel(self, inside: Inside, *refs: Any) -> None:
        """See `mosaic.launch`."""
        arrays, out, shared = refs[:5], refs[5], refs[6:]
        _, experts, *_ = arrays
        _, _, _, _, listed, zeros, bars = shared
        own = [inside.shared_address(ref) for ref in (listed, bars, zeros)]
        inside.assembly(setup(self.stream, self.stages), inside.address(experts), *own)
        item = _Items(inside, self, listed)
        consumers = self.stream.consumers
        first_producer = inside.both(
            inside.less(consumers - 1, inside.thread), inside.less(inside.thread, consumers + 1)
        )
        with inside.when(first_producer), inside.over(0, item.count) as index:
            self._ask(inside, item.at(index), arrays, shared)
        with inside.when(inside.less(inside.thread, consumers)):
            of_group = consumers // self.stream.cut.groups
            group, _ = inside.divided(inside.thread, of_group)
            with inside.over(group, item.count, self.stream.cut.groups) as index:
                self._multiply(inside, item.at(index), arrays[2], out, shared)

    def _ask(self, inside: Inside, item: _Item, arrays: Any, shared: Any) -> None:
        """For what an item needs, as soon as its stage is free."""
        stream = self.stream
        x, _, slots, codes, scales = arrays
        codes_here, scales_here, x_here, _, _, _, bars = shared
        full, empty = item.barriers(bars)
        row = inside.row_address(slots, item.row, 4 * ROWS)
        mine = inside.assembly("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", row, results=ROWS)
        inside.wait(empty, item.before)
        inside.expect(full, stream.codes + stream.scales)
        base = inside.sum(inside.product(item.expert, self.rows), item.first)
        for first, count, to in self.pieces:
            rows = inside.sum(base, first), count
            for box in range(stream.bits * stream.boxes):
                columns = box * stream.line // 4, stream.line // 4
                place = codes_here, (item.stage, box, to)
                inside.copy_rows(codes, rows, columns, place, (bars, item.stage))
            each = 2 * stream.groups
            there = inside.shared_address(
                scales_here, inside.product(item.stage, stream.scales), to * each
            )
            source = inside.row_address(scales, rows[0], each)
            inside.copy(there, source, count * each, full)
        # Inputs of a row's first item here serve the others.
        with inside.when(item.fresh):
            filled = [inside.less(slot, stream.slots) for slot in mine]
            tokens = inside.sum(*map(inside.one_if, filled))
            come = item.inputs_barrier(bars)
            inside.expect(come, inside.product(tokens, stream.token))
            for index, (slot, condition) in enumerate(zip(mine, filled, strict=True)):
                with inside.when(condition):
                    token, _ = inside.divided(slot, stream.slots_of_token)
                    there = inside.sum(item.inputs(x_here), index * stream.token)
                    source = inside.row_address(x, token, stream.token)
                    inside.copy(there, source, stream.token, come)

    def _multiply(self, inside: Inside, item: _Item, slots: Any, out: Any, shared: Any) -> None:
        """An item, as soon as all of it has come."""
        stream = self.stream
        codes_here, scales_here, x_here, sums, _, zeros, bars = shared
        full, empty = item.barriers(bars)
        # A barrier tells the last phase from the one before it, and no more: another group may not
        # yet have had what was in the stage before.
        inside.wait(empty, item.before)
        inside.wait(full, item.parity)
        inside.wait(item.inputs_barrier(bars), item.inputs_parity)
        # Others may still read those of the item before.
        _, turn = inside.divided(item.index, 2 * stream.cut.groups)
        inside.assembly(
            multiply(stream),
            item.inputs(x_here),
            inside.shared_address(codes_here, inside.product(item.stage, stream.codes)),
            inside.shared_address(scales_here, inside.product(item.stage, stream.scales)),
            inside.shared_address(
                sums, inside.product(turn, stream.sums // (2 * stream.cut.groups))
            ),
            inside.shared_address(zeros),
            inside.row_address(slots, item.row, 4 * ROWS),
            item.first,
            inside.address(out),
            empty,
        )


class _Items:
    """The items of a program: as many as others have, one behind the other.

    Attributes:
        count: how many.
    """

    def __init__(self, inside: Inside, plan: _Plan, listed: Any):
        self._inside, self._plan, self._listed = inside, plan, listed
        tiles, programs = plan.stream.tiles, plan.programs
        behind = inside.shared_address(listed, 4 * plan.stream.slots)
        [rows] = inside.assembly("ld.shared.b32 $0, [$1];", behind, results=1)
        items = inside.product(rows, tiles)
        self.begin, _ = inside.divided(inside.product(items, inside.program), programs)
        following = inside.product(items, inside.sum(inside.program, 1))
        end, _ = inside.divided(following, programs)
        self.count = inside.sum(end, inside.product(self.begin, -1))

    def at(self, index: Any) -> _Item:
        """One of them."""
        inside, tiles = self._inside, self._plan.stream.tiles
        place, tile = inside.divided(inside.sum(self.begin, index), tiles)
        entry = inside.shared_address(self._listed, inside.product(place, 4))
        [both] = inside.assembly("ld.shared.b32 $0, [$1];", entry, results=1)
        expert, row = inside.divided(both, MOST_EXPERTS)
        first_place, _ = inside.divided(self.begin, tiles)
        fresh = inside.either(inside.less(tile, 1), inside.less(index, 1))
        ordinal = inside.sum(place, inside.product(first_place, -1))
        return _Item(inside, self._plan, index, row, expert, tile, fresh, ordinal)


class _Item:
    """A tile of outputs of a row of slots.

    Attributes:
        index: of the program's.
        row: of slots.
        expert: of the row.
        first: output.
        fresh: whether it is the program's first one of its row.
        stage: where it lies in shared memory.
        parity: of the stage's barriers, once it is full.
        before: their parity for what was in the stage before.
        inputs_parity: of the barrier of the row's inputs.
    """

    def __init__(
        self,
        inside: Inside,
        plan: _Plan,
        index: Any,
        row: Any,
        expert: Any,
        tile: Any,
        fresh: Any,
        ordinal: Any,
    ):
        self._inside, self._plan = inside, plan
        self.index, self.row, self.expert, self.fresh = index, row, expert, fresh
        self.first = inside.product(tile, plan.stream.tile)
        turn, self.stage = inside.divided(index, plan.stages)
        _, self.parity = inside.divided(turn, 2)
        self.before = inside.sum(1, inside.product(-1, self.parity))
        inputs_turn, self._side = inside.divided(ordinal, 2)
        _, self.inputs_parity = inside.divided(inputs_turn, 2)

    def barriers(self, bars: Any) -> tuple[Any, Any]:
        """Shared addresses of those that say that the stage is full, and empty."""
        full = self._inside.shared_address(bars, self._inside.product(self.stage, 8))
        return full, self._inside.sum(full, 8 * self._plan.stages)

    def inputs_barrier(self, bars: Any) -> Any:
        """Shared address of the one that says that the row's inputs are there."""
        behind = 2 * 8 * self._plan.stages
        return self._inside.shared_address(bars, behind, self._inside.product(self._side, 8))

    def inputs(self, x_here: Any) -> Any:
        """Shared address of the row's inputs."""
        size = ROWS * self._plan.stream.token
        return self._inside.shared_address(x_here, self._inside.product(self._side, size))
