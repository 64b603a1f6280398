"""How experts' codes stream past tiles of slots, of more than 64 tokens.

Each multiprocessor has one program, and that many items: an item is some outputs of a tile of
slots of one expert, see `sorting.Tiles`. They go through it stage by stage: a stage has some
inputs, the codes of the item's rows of the matrix and the tile's own, in the order of the tensor
cores. A group of four warps asks for both, whole stages ahead. Four groups, or where sums are many
two, decode a part of the rows each, put in scales, and the tensor cores take that out of registers
while the next is decoded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.stages import PRODUCERS, WARP, Stage, places_ahead
from ..dequant_matmul.tensor_cores import TILE, WARPS
from ..dequant_matmul.turn import Turn, part_width
from ..mosaic import memory_of
from . import sorting

# Rows of the matrix, of a stage: where there are gates, half of them, and the rows above.
HEIGHT = 256
# Rows of a warp.
OF_WARP = 16
# Bytes of a row of a stage, of the words that are the same ones of each unit.
LINE = 32
# Slots whose gated results come into their order at once.
TURNED = 32
# Bytes of an entry of the list of a program's items.
ENTRY = 16
# Slots of a tile, with how many an expert should have on average for it.
ROWS = {16: 0, 32: 12, 64: 32, 128: 128}
# A thread's sums of more slots leave no room in its registers where groups are four.
_OF_FOUR_GROUPS = 64
_MOST_STAGES, _LEAST_STAGES = 6, 2


@dataclasses.dataclass(frozen=True)
class TileStream:
    """A launch: products of all tiles of slots with their experts' matrices.

    Attributes:
        bits: of a code.
        group_size: inputs a group.
        inputs: of a product.
        outputs: of a product; where there are gates, as many as there are gates.
        slots: in all, S.
        rows: most slots of a tile.
        tiles: most of them.
        slots_of_token: where inputs are tokens, and results go through gates: how many slots have
            the same inputs.
        turn: order in which results lie, if not in their own.
    """

    bits: int
    group_size: int
    inputs: int
    outputs: int
    slots: int
    rows: int
    tiles: int
    slots_of_token: int | None = None
    turn: Turn | None = None

    @property
    def gated(self) -> bool:
        """Whether the matrix has gates, and as many rows above."""
        return self.slots_of_token is not None

    @property
    def groups(self) -> int:
        """Groups of four warps that multiply."""
        return 4 if self.rows <= _OF_FOUR_GROUPS else 2

    @property
    def strips(self) -> int:
        """Into so many the rows of a stage are cut, of each of which a warp has its part."""
        return HEIGHT // (self.groups * TILE)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many slots the tensor cores take: all of a tile, or half where it has no more."""
        return (self.rows,) if self.strips == 1 else (self.rows // 2, self.rows)

    def sums(self, slots: int) -> int:
        """Of so many slots, that a thread has of an item."""
        return self.strips * slots // 2

    @property
    def stage(self) -> Stage:
        """Codes of some of the inputs of an item."""
        return Stage(self.bits, HEIGHT, LINE)

    @property
    def chunks(self) -> int:
        """Stages of an item."""
        return self.inputs // self.stage.inputs

    @property
    def held(self) -> int:
        """Bytes of a stage's inputs."""
        return self.rows * self.stage.inputs * 2

    @property
    def item(self) -> int:
        """Outputs of one."""
        return HEIGHT // 2 if self.gated else HEIGHT

    @property
    def strip(self) -> int:
        """Outputs of one."""
        return self.item // self.strips

    @property
    def apart(self) -> int:
        """Rows of a stage from a thread's first one to its second: of its gate's to that above."""
        return HEIGHT // 2 if self.gated else 8

    @property
    def items(self) -> int:
        """Of a tile of slots."""
        return self.outputs // self.item

    @property
    def scale_groups(self) -> int:
        """Scales of a row of the matrix."""
        return self.inputs // self.group_size

    @property
    def scales(self) -> int:
        """Bytes of an item's scales."""
        return HEIGHT * self.scale_groups * 2

    @property
    def numbers(self) -> int:
        """Bytes of an item's numbers of slots, where results lie by slot."""
        return 0 if self.gated else self.rows * 4

    @property
    def turned(self) -> int:
        """Bytes in which results come into their order."""
        return min(self.rows, TURNED) * self.item * 2 if self.gated else self.rows * self.strip * 2

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.groups * WARPS * WARP

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.consumers + PRODUCERS

    def listed(self, programs: int) -> int:
        """Most items of a program."""
        return -(-self.tiles * self.items // programs)

    def places(self, stages: int) -> int:
        """For how many items there is room for scales and numbers of slots."""
        return places_ahead(stages, self.chunks)

    def shared(self, stages: int, programs: int) -> list[int]:
        """Bytes of shared memory with so many stages.

        Codes, inputs, scales, numbers of slots, results on their way, the list, and barriers.
        """
        places = self.places(stages)
        return [
            stages * self.stage.size,
            stages * self.held,
            places * self.scales,
            places * self.numbers,
            self.turned,
            self.listed(programs) * ENTRY,
            2 * 8 * stages * self.stage.blocks,
        ]

    def stages(self, memory: int, programs: int) -> int:
        """How many fit into so many bytes of shared memory."""
        for stages in range(_MOST_STAGES, 0, -1):
            if memory_of(self.shared(stages, programs)) <= memory:
                return stages
        return 0

    def oddities(self, memory: int, programs: int) -> list[str]:
        """Why these sizes cannot be streamed; empty if they can."""
        shape = f"{self.outputs}x{self.inputs}"
        if self.inputs % self.stage.inputs or self.outputs % self.item:
            return [f"{shape} is not cut into {self.stage.inputs} inputs and {self.item} outputs"]
        if self.stages(memory, programs) < _LEAST_STAGES:
            return [f"{_LEAST_STAGES} stages of {shape} need more than {memory} bytes"]
        return []


def order_of(weight: QTensor) -> Turn:
    """In which order a matrix's inputs are multiplied."""
    return Turn(part_width(weight.bits))


def tile_streams(
    gate_up_proj: QTensor, down_proj: QTensor, ids: Any, memory: int, programs: int
) -> tuple[TileStream, TileStream]:
    """Both launches of a call, of as many slots a tile as both have the memory for.

    Args:
        gate_up_proj: stack.
        down_proj: likewise.
        ids: experts of slots [M, A].
        memory: bytes of shared memory.
        programs: of a launch.
    """
    average = ids.size // down_proj.shape[0]
    found = [
        _of_rows(gate_up_proj, down_proj, ids, rows)
        for rows, least in reversed(ROWS.items())
        if average >= least
    ]
    fitting = (both for both in found if not any(each.oddities(memory, programs) for each in both))
    return next(fitting, found[-1])


def _of_rows(
    gate_up_proj: QTensor, down_proj: QTensor, ids: Any, rows: int
) -> tuple[TileStream, TileStream]:
    """With so many slots a tile."""
    slots, of_token = ids.size, ids.shape[1]
    tiles = sorting.tile_count(slots, down_proj.shape[0], rows)

    def of(weight: QTensor, outputs: int, *more: Any) -> TileStream:
        return TileStream(
            weight.bits, weight.group_size, weight.inputs, outputs, slots, rows, tiles, *more
        )

    hidden = gate_up_proj.shape[1] // 2
    gates = of(gate_up_proj, hidden, of_token, order_of(down_proj))
    return gates, of(down_proj, down_proj.shape[1])
