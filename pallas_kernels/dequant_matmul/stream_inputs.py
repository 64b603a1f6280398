"""How a program's rows of inputs come into shared memory, in PTX: see `stream`."""

from __future__ import annotations

from ..assembly import Assembly, braces
from .stages import CONSUMERS
from .stream import Stream
from .tensor_cores import BLOCK, SLAB, SLAB_BYTES

# Eight inputs, which are two steps of one thread at the tensor cores; so many make a slab of a row.
_PIECE, _PIECES = 8, 8
# How many pieces a thread has under way at once.
_AHEAD = 16


def spread(stream: Stream) -> str:
    """Brings rows of inputs into the order in which tensor cores read them.

    Eight rows of a slab are 1,024 bytes, in which pieces of 16 bytes have another place in each
    row. What belongs to rows that there are none of is not written: it is a column of its own.

    Takes the address of the program's part of the inputs, its first row, and a shared address.
    """
    a = Assembly()
    rows, at_once = stream.own_rows, stream.consumers // (_PIECES * stream.own_rows)
    thread = a.b32("mov.u32", "%tid.x")
    odd, owner = a.b32("and.b32", thread, 1), a.b32("bfe.u32", thread, 1, 2)
    place = a.b32("shr.u32", thread, 3)
    slab, row = a.b32("div.u32", place, rows), a.b32("rem.u32", place, rows)
    given = a.b32("add.u32", row, "$1")
    there = a.register("pred")
    a.do("and.pred", there, a.holds("lt.u32", given, stream.rows), a.holds("lt.u32", slab, at_once))

    of_odd, of_owner = _strides(stream)
    offset = a.b32("mul.lo.u32", given, stream.inputs * 2)
    offset = a.b32("mad.lo.u32", a.b32("shr.u32", slab, 1), BLOCK * 2, offset)
    offset = a.b32("mad.lo.u32", a.b32("and.b32", slab, 1), 2 * of_odd, offset)
    offset = a.b32("mad.lo.u32", odd, of_odd, offset)
    offset = a.b32("mad.lo.u32", owner, of_owner, offset)
    start = a.b64("mad.wide.u32", offset, 1, "$0")

    to = a.b32("mad.lo.u32", slab, rows * SLAB_BYTES, "$2")
    to = a.b32("mad.lo.u32", row, SLAB_BYTES, to)
    to = a.b32("mad.lo.u32", owner, 4, to)
    first = a.b32("xor.b32", a.b32("shl.b32", odd, 2), a.b32("and.b32", row, 7))
    # A word is a pair of inputs, and each pair of a piece is of another half of a step.
    places = [a.b32("mad.lo.u32", a.b32("xor.b32", first, word), 16, to) for word in range(4)]

    slabs = range(0, stream.own // SLAB, at_once)
    for begin in range(0, len(slabs), _AHEAD):
        pieces = [(each, a.registers("b32", 4)) for each in slabs[begin : begin + _AHEAD]]
        for each, words in pieces:
            block, half = divmod(each, 2)
            address = f"[{start}+{block * BLOCK * 2 + half * 2 * of_odd}]"
            a.do("ld.global.nc.v4.b32", braces(words), address, when=there)
        for each, words in pieces:
            for at, word in zip(places, words, strict=True):
                a.do("st.shared.b32", f"[{at}+{each * rows * SLAB_BYTES}]", word, when=there)
    a.do("fence.proxy.async.shared::cta")
    a.do("bar.sync", CONSUMERS, stream.consumers)
    return str(a)


def _strides(stream: Stream) -> tuple[int, int]:
    """Bytes from a thread's piece of a block to its next one, and to the next thread's.

    At 3 bits a thread has a whole unit, else a piece of each.
    """
    of_unit, of_units = 2 * _PIECE, 2 * BLOCK // 4
    return (of_unit, of_units) if stream.bits == 3 else (of_units, of_unit)
