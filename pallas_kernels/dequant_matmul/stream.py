"""How codes stream through shared memory past a few rows of inputs that stay in it.

Each multiprocessor has one program, and that some rows, a part of their inputs and a run of tiles
of outputs. Those inputs lie in shared memory from the beginning, where the tensor cores read them;
one thread asks for codes, whole stages ahead: a chunk of the inputs of a tile. Groups of four warps
decode a part of each stage each, and the tensor cores take that out of registers.
"""

from __future__ import annotations

import dataclasses

from .layout import UNIT

# Outputs of a tile: the tensor cores' rows. Rows of inputs are their columns, eight together.
TILE, COLUMNS = 64, 8
# Of a program: with more, inputs would leave no room for stages.
MOST_ROWS = 32
# Inputs whose words a thread reads together: four units, 16 bytes of each of their words.
BLOCK = 4 * UNIT
# Inputs of a row that lie together, in as many bytes as the tensor cores' order repeats in.
SLAB, SLAB_BYTES = 64, 128
# Number of the barrier of the threads that multiply.
CONSUMERS = 8
# By bits of a code. At 3 bits a thread has a whole unit, so that four share a group.
GROUP_SIZES = {3: (128,), 4: (32, 64, 128), 8: (32, 64, 128)}
WARPS = 4  # of a group
# Bytes of a stage's row, of the words that are the same ones of each unit.
_LINES = (128, 64)
_WARP, _PRODUCERS = 32, 128
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
    line: int = _LINES[0]

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
    def chunk(self) -> int:
        """Inputs of a stage."""
        return self.line // 4 * UNIT

    @property
    def chunks(self) -> int:
        """Stages of a tile."""
        return self.own // self.chunk

    @property
    def blocks(self) -> int:
        """Of a stage, for each group of warps."""
        return self.chunk // BLOCK // self.groups

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
    def box_rows(self) -> int:
        """Rows of a stage from one box to the next; a box has the same words of all units.

        Threads that read one piece of four boxes at once find it in other banks of each: what the
        copy engine does to the order of pieces follows the address.
        """
        return TILE if self.bits == 3 else TILE + 2

    @property
    def box(self) -> int:
        """Bytes from one box to the next."""
        return self.box_rows * self.line

    @property
    def codes(self) -> int:
        """Bytes of a stage."""
        return self.bits * self.box

    @property
    def copied(self) -> int:
        """Bytes that come into one."""
        return self.bits * TILE * self.line

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
        return (self.groups - 1) * WARPS * _WARP * self.columns * 16

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return self.groups * WARPS * _WARP

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.consumers + _PRODUCERS

    def scale_places(self, stages: int) -> int:
        """For how many tiles there is room for scales: what is asked for ahead needs its own."""
        return -(-stages // self.chunks) + 1

    def stages(self, memory: int) -> int:
        """How many chunks fit into so many bytes of shared memory."""
        others = self.held + self.sums + 5 * 1024
        for stages in range(_MOST_STAGES, 0, -1):
            own = stages * self.codes + self.scale_places(stages) * self.scales
            if own + others <= memory:
                return stages
        return 0

    def fits(self, cores: int, memory: int) -> bool:
        """Whether inputs are cut into whole stages, with room for them and a program a part."""
        return (
            self.inputs % (self.chunk * self.splits) == 0
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
        for line in _LINES:
            stream = Stream(bits, group_size, rows, inputs, outputs, splits, line)
            if stream.fits(cores, memory):
                programs = cores // (splits * stream.row_parts)
                turns = -(-sum(stream.tiles) // programs)
                found.append((turns * stream.own, splits, -line, stream))
        if found and sum(outputs) >= TILE * cores:
            break
    return min(found, key=lambda each: each[:3])[3] if found else None
