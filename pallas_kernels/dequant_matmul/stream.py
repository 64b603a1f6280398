"""How codes stream through shared memory past a few rows of inputs that stay in it.

Each multiprocessor has one program, and that some rows, a part of their inputs and a run of tiles
of outputs. Those inputs lie in shared memory from the beginning, where the tensor cores read them;
one thread asks for codes, whole stages ahead: a chunk of the inputs of a tile. Groups of four warps
decode a part of each stage each, and the tensor cores take that out of registers.
"""

from __future__ import annotations

import dataclasses

from .stages import LINES, PRODUCERS, WARP, Stage, places_ahead
from .tensor_cores import COLUMNS, SLAB, TILE, WARPS

# Of a program: with more, inputs would leave no room for stages.
MOST_ROWS = 32
# By bits of a code. At 3 bits a thread has a whole unit, so that four share a group.
GROUP_SIZES = {3: (128,), 4: (32, 64, 128), 8: (32, 64, 128)}
_MOST_STAGES, _LEAST_STAGES = 6, 2


@dataclasses.dataclass(frozen=True)
class Stream:
    """Products of some rows with matrices of one format.

    Attributes:
        bits: of a code.
        group_size: inputs a group.
        rows: of inputs, M.
        inputs: of a row.
        outputs: of each matrix, whole tiles.
        splits: parts of the inputs, whose sums are added by a further launch.
        line: bytes of a row of a stage, of the words that are the same ones of each unit.
    """

    bits: int
    group_size: int
    rows: int
    inputs: int
    outputs: tuple[int, ...]
    splits: int = 1
    line: int = LINES[0]

    @property
    def row_parts(self) -> int:
        """Programs that share out the rows."""
        return -(-self.rows // MOST_ROWS)

    @property
    def columns(self) -> int:
        """A program's rows, eight by eight."""
        return -(-self.rows // (self.row_parts * COLUMNS))

    @property
    def own_rows(self) -> int:
        """Of a program."""
        return self.columns * COLUMNS

    @property
    def groups(self) -> int:
        """Of warps: as many as there are registers for."""
        return 4 if self.columns <= 2 else 2

    @property
    def own(self) -> int:
        """Inputs of a program."""
        return self.inputs // self.splits

    @property
    def stage(self) -> Stage:
        """A chunk of the inputs of a tile."""
        return Stage(self.bits, TILE, self.line)

    @property
    def chunks(self) -> int:
        """Stages of a tile."""
        return self.own // self.stage.inputs

    @property
    def blocks(self) -> int:
        """Of a stage, for each group of warps."""
        return self.stage.blocks // self.groups

    @property
    def span(self) -> int:
        """Inputs of one scale that are summed together.

        There are two at once, and with more of them registers run out: then the compiler has each
        instruction of the tensor cores waited for.
        """
        return min(self.group_size, SLAB)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Of each matrix."""
        return tuple(outputs // TILE for outputs in self.outputs)

    @property
    def scale_groups(self) -> int:
        """Scales of a row of a matrix."""
        return self.inputs // self.group_size

    @property
    def scales(self) -> int:
        """Bytes of a tile's scales."""
        return TILE * self.scale_groups * 2

    @property
    def held(self) -> int:
        """Bytes of a program's inputs."""
        return self.own * self.own_rows * 2

    @property
    def sums(self) -> int:
        """Bytes in which groups of warps give each other the sums that others finish."""
        return (self.groups - 1) * WARPS * WARP * self.columns * 16

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.groups * WARPS * WARP

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.consumers + PRODUCERS

    def scale_places(self, stages: int) -> int:
        """For how many tiles there is room for scales."""
        return places_ahead(stages, self.chunks)

    def stages(self, memory: int) -> int:
        """How many chunks fit into so many bytes of shared memory."""
        others = self.held + self.sums + 5 * 1024
        for stages in range(_MOST_STAGES, 0, -1):
            own = stages * self.stage.size + self.scale_places(stages) * self.scales
            if own + others <= memory:
                return stages
        return 0

    def fits(self, cores: int, memory: int) -> bool:
        """Whether inputs are cut into whole stages, with room for them and a program a part."""
        return (
            self.inputs % (self.stage.inputs * self.splits) == 0
            and self.splits * self.row_parts <= cores
            and self.stages(memory) >= _LEAST_STAGES
        )


def fitting(
    bits: int,
    group_size: int,
    rows: int,
    inputs: int,
    outputs: tuple[int, ...],
    cores: int,
    memory: int,
) -> Stream | None:
    """The cut of a call: as few parts as shared memory allows, and programs with equal work.

    None where there is none: inputs are no whole stages, or rows leave too little shared memory.
    """
    found = []
    for splits in (1, 2, 4, 8):
        for line in LINES:
            stream = Stream(bits, group_size, rows, inputs, outputs, splits, line)
            if stream.fits(cores, memory):
                programs = cores // (splits * stream.row_parts)
                turns = -(-sum(stream.tiles) // programs)
                found.append((turns * stream.own, splits, -line, stream))
        if found and sum(outputs) >= TILE * cores:
            break
    return min(found, key=lambda each: each[:3])[3] if found else None
