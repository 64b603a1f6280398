"""The 32 codes of a unit as pairs of bfloat16, in PTX: two consecutive values a register.

A field is masked into the mantissa of 128, at bit b of it: 128 + 2^b code. Times 2^(1 - b), less
2^(8 - b) + 2 centre, that is twice the code less its centre, an odd integer that bfloat16 holds
exactly, as it does all numbers on the way: one instruction makes two. At 8 bits the lower seven are
raised so, and -256 comes on top, of which the highest bit takes half away: that is the code less
its centre. See `layout` for the fields, and `pairs` for the same in Triton's terms.
"""

from __future__ import annotations

import numpy as np

from ..assembly import Assembly
from .layout import CENTRES

BITS = (3, 4, 8)
# By bits: what `pairs` makes is so many times a code less its centre.
FACTORS = {3: 2.0, 4: 2.0, 8: 1.0}
_RAISED = 0x43004300  # 128, twice
_LOWERED = 0xC380C380  # -256, twice; without bit 7, -128
_LAST = 15  # the bit of halves of which three words together make a unit's last two values


class Decoder:
    """Makes pairs of the words of units of one format.

    Args:
        assembly: to which instructions are added; first the constants.
        bits: of a code.
    """

    def __init__(self, assembly: Assembly, bits: int):
        self._assembly, self._bits = assembly, bits
        self._raised = assembly.b32("mov.b32", f"0x{_RAISED:08X}")
        # At which bits fields are taken, with what belongs to each.
        places = {3: (1, 4), 4: (1,), 8: ()}[bits]
        self._constants = {place: self._of_place(place) for place in places}
        if bits == 8:
            self._lowered = assembly.b32("mov.b32", f"0x{_LOWERED:08X}")
            self._one = assembly.b32("mov.b32", _twice(1.0))

    def pairs(self, words: list[str]) -> list[str]:
        """Registers in the order of values: sixteen of a unit.

        Args:
            words: of the unit, as many as a code has bits; but at 3 bits, some of them will do.
        """
        if self._bits == 4:
            return [self._pair(word, first, 1) for word in words for first in (0, 4, 8, 12)]
        if self._bits == 8:
            return [self._byte(word, first) for word in words for first in (0, 8)]
        found: list[str] = []
        for word in words:
            # Two fields come to their places at once.
            low, middle, high = (self._moved(word, first, 1) for first in (0, 6, 12))
            found += [self._at(low, 1), self._at(low, 4), self._at(middle, 1)]
            found += [self._at(middle, 4), self._at(high, 1)]
        return [*found, self._last(words)]

    def _last(self, words: list[str]) -> str:
        """The pair whose bits are in three words."""
        found = self._raised
        for index, word in enumerate(words):
            moved = self._moved(word, _LAST, 4 + index)
            found = self._assembly.masked(moved, 0x10001 << 4 + index, found)
        return self._finished(found, 4)

    def _byte(self, word: str, first: int) -> str:
        """The bytes at a bit of halves."""
        moved = self._moved(word, first, 0)
        raised = self._assembly.masked(moved, 0x7F007F, self._raised)
        added = self._assembly.b32("lop3.b32", moved, "0x00800080", self._lowered, "0x6A")
        return self._assembly.b32("fma.rn.bf16x2", raised, self._one, added)

    def _pair(self, word: str, first: int, place: int) -> str:
        return self._at(self._moved(word, first, place), place)

    def _moved(self, word: str, first: int, place: int) -> str:
        """With what begins at a bit of halves at another one; other bits become anything."""
        if first == place:
            return word
        if first < place:
            return self._assembly.b32("shl.b32", word, place - first)
        return self._assembly.b32("shr.u32", word, first - place)

    def _at(self, word: str, place: int) -> str:
        mask = (2**self._bits - 1) * 0x10001 << place
        return self._finished(self._assembly.masked(word, mask, self._raised), place)

    def _finished(self, raised: str, place: int) -> str:
        return self._assembly.b32("fma.rn.bf16x2", raised, *self._constants[place])

    def _of_place(self, place: int) -> tuple[str, str]:
        """What raised fields are multiplied by, and what is added."""
        factor = 2.0 ** (1 - place)
        numbers = factor, -(128 * factor + FACTORS[self._bits] * CENTRES[self._bits])
        first, second = (self._assembly.b32("mov.b32", _twice(number)) for number in numbers)
        return first, second


def _twice(number: float) -> str:
    """Two numbers of bfloat16, as one word."""
    # Its bits are the upper half of a float32's.
    [bits] = np.asarray([number], np.float32).view(np.uint32)
    assert bits & 0xFFFF == 0, f"{number} is no bfloat16"
    return f"0x{int(bits) | int(bits) >> 16:08X}"
