"""How threads read their words of a stage of codes, and scales, in PTX: see `stream`."""

from __future__ import annotations

from ..assembly import Assembly
from .stages import Stage


class Words:
    """A thread's words.

    Four threads share a row. At 3 bits each takes one of four units, else eight inputs of each.

    Args:
        a: to which instructions are added.
        stage: see there.
        codes: its shared address.
        row: the thread's first one.
        thread: which of the four it is.
        first: block that is its first one, a power of two or none.
    """

    def __init__(self, a: Assembly, stage: Stage, codes: str, row: str, thread: str, first: str):
        self._a, self._stage = a, stage
        self._row = a.b32("mad.lo.u32", row, stage.line, codes)
        if stage.bits != 3:
            self._row = a.b32("mad.lo.u32", thread, stage.box, self._row)
        # The copy engine's order of pieces follows the address.
        pieces = stage.line // 16
        turned = a.b32("bfe.u32", self._row, 7, pieces.bit_length() - 1)
        self._first = a.b32("shl.b32", a.b32("xor.b32", first, turned), 4)
        self._within = a.b32("shl.b32", thread, 2)

    def of_block(self, block: int, further: int) -> list[list[str]]:
        """Of a row so many further on: of four units what it takes of each, or all of its one."""
        a, stage = self._a, self._stage
        start = a.b32("add.u32", a.b32("xor.b32", self._first, 16 * block), self._row)
        offset = further * stage.line
        if stage.bits == 3:
            start = a.b32("add.u32", start, self._within)
            return [[a.load_shared(1, start, offset + w * stage.box)[0] for w in range(3)]]
        offsets = (offset + 4 * word * stage.box for word in range(stage.bits // 4))
        boxes = (a.load_shared(4, start, each) for each in offsets)
        return [list(unit) for unit in zip(*boxes, strict=True)]


def scales(a: Assembly, count: int, start: str, offset: int) -> list[str]:
    """So many scales that lie side by side, a power of two, as float32."""
    if count == 1:
        word = a.b32("ld.shared.u16", f"[{start}+{offset}]")
        return [a.f32("mov.b32", a.b32("shl.b32", word, 16))]
    found = []
    for both in a.load_shared(count // 2, start, offset):
        found += [a.b32("shl.b32", both, 16), a.b32("and.b32", both, "0xffff0000")]
    return [a.f32("mov.b32", half) for half in found]
