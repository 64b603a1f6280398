"""Stages: places in shared memory that codes come into, one behind the other; see `stream`."""

from __future__ import annotations

import dataclasses

from ..assembly import Assembly
from .layout import UNIT
from .tensor_cores import BLOCK

# Numbers of the barriers of all threads of a program, and of those that multiply.
ALL, CONSUMERS = 15, 8
WARP = 32
# Threads beside those that multiply, of which one asks for codes.
PRODUCERS = 128
# Bytes of a stage's row, of the words that are the same ones of each unit.
LINES = (128, 64)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Codes of some rows, as the copy engine leaves them: a box for each word of units.

    Attributes:
        bits: of a code.
        rows: of the matrix.
        line: bytes of a row in a box.
    """

    bits: int
    rows: int
    line: int

    @property
    def inputs(self) -> int:
        """Of a row."""
        return self.line // 4 * UNIT

    @property
    def blocks(self) -> int:
        """Of them."""
        return self.inputs // BLOCK

    @property
    def box_rows(self) -> int:
        """Rows from one box to the next.

        Threads that read one piece of four boxes at once find it in other banks of each, or in
        lines of 32 bytes in those of two: what the copy engine does to the order of pieces follows
        the address, a multiple of 128 bytes.
        """
        return self.rows if self.bits == 3 else self.rows + max(2, 128 // self.line)

    @property
    def box(self) -> int:
        """Bytes from one box to the next."""
        return self.box_rows * self.line

    @property
    def size(self) -> int:
        """Bytes of it."""
        return self.bits * self.box

    @property
    def copied(self) -> int:
        """Bytes that come into it."""
        return self.bits * self.rows * self.line

    def slot(self, word: int) -> int:
        """Which box has a word: those that four threads read at once are neighbours."""
        return word if self.bits != 8 else word // 2 + 4 * (word % 2)


def places_ahead(stages: int, chunks: int) -> int:
    """For how many tiles or items of so many stages there is room for what comes with each.

    What is asked for ahead needs its own.
    """
    return -(-stages // chunks) + 1


def setup(stages: int, consumers: int, fill: int = 1) -> str:
    """Barriers: of each stage that it is full, then that it is empty; all threads wait for it.

    Takes their shared address.

    Args:
        stages: how many.
        consumers: threads that multiply.
        fill: how many threads arrive when a stage is asked for.
    """
    a = Assembly()
    # XLA may launch this one while the launch before is under way.
    a.do("griddepcontrol.wait")
    thread = a.b32("mov.u32", "%tid.x")
    first = a.holds("eq.u32", thread, 0)
    for place in range(2 * stages):
        count = fill if place < stages else consumers // WARP
        a.do("mbarrier.init.shared.b64", f"[$0+{8 * place}]", count, when=first)
    a.do("fence.mbarrier_init.release.cluster", when=first)
    a.do("bar.sync", ALL, consumers + PRODUCERS)
    return str(a)
