"""How experts' codes stream past tiles of slots, of some more than 64 tokens.

Each multiprocessor has one program, and that a run of items: an item is some outputs of a tile of
up to 16 slots of one expert, see `sorting.Tiles`. The tile's inputs lie in shared memory while its
items are multiplied, in the order of the tensor cores; one thread asks for codes, whole stages
ahead: some of the inputs of an item. Two groups of four warps have 64 rows of the matrix each,
decode them, and the tensor cores take that out of registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.stages import LINES, PRODUCERS, WARP, Stage
from ..dequant_matmul.tensor_cores import COLUMNS, SLAB, TILE, WARPS
from . import sorting

# Slots of a tile.
ROWS = 16
GROUPS = 2
# Bytes of an entry of the list of a program's tiles.
ENTRY = 16
_MOST_STAGES, _LEAST_STAGES = 6, 2


@dataclasses.dataclass(frozen=True)
class TileStream:
    """A launch: products of all tiles of slots with their experts' matrices.

    Attributes:
        bits: of a code.
        group_size: inputs a group.
        inputs: of a product.
        outputs: of a product; where there are gates, as many as there are gates.
        gated: whether the matrix has gates, and as many rows above.
        slots: in all, S.
        slots_of_token: how many have the same inputs, where inputs are tokens.
        tiles: most of them.
        line: see `Stage`.
    """

    bits: int
    group_size: int
    inputs: int
    outputs: int
    gated: bool
    slots: int
    slots_of_token: int
    tiles: int
    line: int

    @property
    def copies(self) -> int:
        """Columns of a slot.

        At 3 bits a thread has a whole unit, so that groups of 64 are summed apart: each of two
        columns has the inputs of one, and zeros in place of the other's.
        """
        return 2 if (self.bits, self.group_size) == (3, 64) else 1

    @property
    def columns(self) -> int:
        """Of a tile, eight by eight."""
        return self.own_rows // COLUMNS

    @property
    def own_rows(self) -> int:
        """Columns of a tile."""
        return ROWS * self.copies

    @property
    def span(self) -> int:
        """Inputs that are summed before they meet a scale: more would not have registers."""
        return min(self.group_size, SLAB)

    @property
    def stage(self) -> Stage:
        """Some of the inputs of an item."""
        return Stage(self.bits, GROUPS * TILE, self.line)

    @property
    def chunks(self) -> int:
        """Stages of an item."""
        return self.inputs // self.stage.inputs

    @property
    def item(self) -> int:
        """Outputs of one."""
        return GROUPS * TILE // (2 if self.gated else 1)

    @property
    def items(self) -> int:
        """Of a tile of slots."""
        return self.outputs // self.item

    @property
    def apart(self) -> int:
        """Rows of a stage from a thread's first one to its second: of its gate's to that above."""
        return GROUPS * TILE // 2 if self.gated else 8

    @property
    def scale_groups(self) -> int:
        """Scales of a row of the matrix."""
        return self.inputs // self.group_size

    @property
    def scales(self) -> int:
        """Bytes of an item's scales."""
        return GROUPS * TILE * self.scale_groups * 2

    @property
    def held(self) -> int:
        """Bytes of a tile's inputs."""
        return self.inputs * self.own_rows * 2

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return GROUPS * WARPS * WARP

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.consumers + PRODUCERS

    def listed(self, programs: int) -> int:
        """Most tiles of which a program has items."""
        return -(-self.tiles // programs) + 2

    def scale_places(self, stages: int) -> int:
        """For how many items there is room for scales: what is asked for ahead needs its own."""
        return -(-stages // self.chunks) + 1

    def stages(self, memory: int, programs: int) -> int:
        """How many fit into so many bytes of shared memory."""
        others = self.held + self.listed(programs) * ENTRY + 5 * 1024
        for stages in range(_MOST_STAGES, 0, -1):
            own = stages * self.stage.size + self.scale_places(stages) * self.scales
            if own + others <= memory:
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


def tile_streams(
    gate_up_proj: QTensor, down_proj: QTensor, ids: Any, memory: int, programs: int
) -> tuple[TileStream, TileStream]:
    """Both launches of a call, cut so that they can be streamed, if they can at all.

    Args:
        gate_up_proj: stack.
        down_proj: likewise.
        ids: experts of slots [M, A].
        memory: bytes of shared memory.
        programs: of a launch.
    """
    tokens, slots = ids.shape
    total, hidden = tokens * slots, gate_up_proj.shape[1] // 2
    tiles = sorting.tile_count(total, down_proj.shape[0], ROWS)

    def of(weight: QTensor, outputs: int, gated: bool) -> TileStream:
        kind = weight.bits, weight.group_size, weight.inputs, outputs, gated, total, slots, tiles
        found = [TileStream(*kind, line) for line in LINES]
        fitting = (each for each in found if not each.oddities(memory, programs))
        return next(fitting, found[-1])

    return of(gate_up_proj, hidden, True), of(down_proj, down_proj.shape[1], False)
