"""How experts' codes stream through the shared memory of a multiprocessor.

Each multiprocessor has one program, and that a run of items: an item is a tile of the outputs of
one row of slots, see `order.Order`. One thread asks for what items need, whole stages ahead. Groups
of warps take items in turn, multiply, and give each stage back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.qtensor import QTensor
from ..dequant_matmul.turn import THREADS, Turn

# Slots of a row. Tensor cores take eight columns, and each slot is two: its inputs of one group of
# 64, and those of the next, zeros elsewhere, so that sums of both stay apart.
ROWS = 4
# Inputs that are multiplied together: a unit for each of the threads that share an output.
BLOCK = THREADS * UNIT
BITS, GROUP_SIZES = (3, 4), (64, 128)
# What `stream_assembly` multiplies: each thread takes pieces of 16 bytes, which lie side by side.
TURN = Turn(UNIT, run=8)
_WARP, _PRODUCERS = 32, 128
_MOST_STAGES, _LEAST_STAGES = 6, 3
# An entry of the list of rows is a row and 2^16 times its expert.
MOST_EXPERTS = 1 << 16
# Bytes of a line of shared memory in which a row of codes lies.
_LINES = (128, 64, 32)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a launch is cut.

    Attributes:
        bands: warps a group that share out the outputs of a tile, 16 rows of the matrix each.
        parts: warps that share out the inputs of each band.
        groups: of warps.
        chains: sums of tensor cores under way at once, by warp.
    """

    bands: int
    parts: int
    groups: int
    chains: int


# Those behind the first are for larger codes. On an H200, of 32 tokens of qwen3.6-35b-a3b: 42 us
# and 25 us alone. One group of all warps takes 48 and 27, four 45 and 27; half the bands 47 and 25.
GATES = Cut(4, 2, 2, 1), Cut(2, 4, 2, 1)
OUTPUTS = Cut(8, 1, 2, 2), Cut(4, 1, 4, 2)


@dataclasses.dataclass(frozen=True)
class Stream:
    """A launch: products of all rows of slots with their experts' matrices.

    Attributes:
        bits: of a code.
        group_size: inputs a group.
        inputs: of a product.
        outputs: of a product; where there are gates, as many as there are gates.
        gated: whether the matrix has gates, and as many rows above.
        slots: in all, S.
        slots_of_token: how many have the same inputs.
        cut: see there.
    """

    bits: int
    group_size: int
    inputs: int
    outputs: int
    gated: bool
    slots: int
    slots_of_token: int
    cut: Cut

    @property
    def units(self) -> int:
        """Of a row of the matrix."""
        return self.inputs // UNIT

    @property
    def blocks(self) -> int:
        """That a warp multiplies."""
        return self.inputs // BLOCK // self.cut.parts

    @property
    def groups(self) -> int:
        """Scales of a row of the matrix."""
        return self.inputs // self.group_size

    @property
    def rows(self) -> int:
        """Rows of the matrix a tile."""
        return 16 * self.cut.bands

    @property
    def tile(self) -> int:
        """Outputs of it."""
        return self.rows // 2 if self.gated else self.rows

    @property
    def tiles(self) -> int:
        """Of all outputs."""
        return self.outputs // self.tile

    @property
    def line(self) -> int:
        """Bytes of a row of codes side by side; further ones are in further boxes."""
        return next(line for line in _LINES if self.units * 4 % line == 0)

    @property
    def boxes(self) -> int:
        """In which the words of a tile lie that are the same ones of each unit."""
        return self.units * 4 // self.line

    @property
    def box(self) -> int:
        """Bytes of one."""
        return self.rows * self.line

    @property
    def codes(self) -> int:
        """Bytes of a tile's codes."""
        return self.bits * self.boxes * self.box

    @property
    def scales(self) -> int:
        """Bytes of a tile's scales."""
        return self.rows * self.groups * 2

    @property
    def token(self) -> int:
        """Bytes of a slot's inputs."""
        return self.inputs * 2

    @property
    def zeros(self) -> int:
        """Bytes of zeros: what threads read in place of inputs, from the middle of a line on."""
        return 64 + self.blocks * BLOCK * 2

    @property
    def sums(self) -> int:
        """Bytes in which parts of inputs bring their sums to the first; for two items a group."""
        return 2 * self.cut.groups * (self.cut.parts - 1) * self.cut.bands * _WARP * 8

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return _WARP * self.cut.bands * self.cut.parts * self.cut.groups

    @property
    def threads(self) -> int:
        """Of a program."""
        return self.consumers + _PRODUCERS

    def stages(self, memory: int) -> int:
        """How many tiles fit into so many bytes of shared memory."""
        lists = 4 * (self.slots + 1) + 8 * (2 * _MOST_STAGES + 2)
        # Each piece of memory begins at a multiple of 1,024.
        others = 2 * ROWS * self.token + self.sums + self.zeros + lists + 7 * 1024
        fitting = (memory - others) // (self.codes + self.scales)
        # A row's inputs lie where those of the second row before it did, and what is asked for
        # ahead must not go back so far.
        return min(_MOST_STAGES, self.tiles - 1, fitting)

    def oddities(self, memory: int) -> list[str]:
        """Why these sizes cannot be streamed; empty if they can."""
        shape = f"{self.outputs}x{self.inputs}"
        least = max(UNIT * min(_LINES) // 4, BLOCK * self.cut.parts)
        if self.inputs % least or self.outputs % self.tile:
            return [f"{shape} is not cut into {least} inputs and {self.tile} outputs"]
        in_line = self.line // 16
        if self.blocks % in_line and in_line % self.blocks:
            return [f"{self.inputs} inputs are not cut into lines of {self.line} bytes of codes"]
        # A group at item i has had item i - groups, which came once i - groups - stages was given
        # back. It waits for i - stages; the stage's barrier cannot tell that from i - 3 * stages.
        # So i - 2 * stages must be known to be given back: no fewer stages than groups.
        stages = max(_LEAST_STAGES, self.cut.groups)
        if self.tiles <= stages:
            return [f"{shape} is {self.tiles} tiles, not more than {stages}"]
        if self.stages(memory) < stages:
            return [f"{stages} tiles of {shape} need more than {memory} bytes"]
        return []


def streams(
    gate_up_proj: QTensor, down_proj: QTensor, ids: Any, memory: int
) -> tuple[Stream, Stream]:
    """Both launches of a call, cut so that they can be streamed, if they can at all.

    Args:
        gate_up_proj: stack.
        down_proj: likewise.
        ids: experts of slots [M, A].
        memory: bytes of shared memory.
    """
    tokens, slots = ids.shape
    total, hidden = tokens * slots, gate_up_proj.shape[1] // 2
    first = [_of(gate_up_proj, hidden, True, total, slots, cut) for cut in GATES]
    second = [_of(down_proj, down_proj.shape[1], False, total, 1, cut) for cut in OUTPUTS]
    return _first_fitting(first, memory), _first_fitting(second, memory)


def _of(
    weight: QTensor, outputs: int, gated: bool, slots: int, slots_of_token: int, cut: Cut
) -> Stream:
    kind = weight.bits, weight.group_size, weight.inputs
    return Stream(*kind, outputs, gated, slots, slots_of_token, cut)


def _first_fitting(found: list[Stream], memory: int) -> Stream:
    return next((stream for stream in found if not stream.oddities(memory)), found[0])
