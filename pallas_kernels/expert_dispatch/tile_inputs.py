"""How a tile's inputs come into shared memory, in PTX: see `tile_stream`."""

from __future__ import annotations

from ..assembly import Assembly, braces
from ..dequant_matmul.stages import CONSUMERS
from ..dequant_matmul.tensor_cores import BLOCK, SLAB, SLAB_BYTES
from .tile_stream import ROWS, TileStream

# Eight inputs, which are two steps of one thread at the tensor cores; so many make a slab of a row.
_PIECE, _PIECES = 8, 8
# How many pieces a thread has under way at once.
_AHEAD = 16


def spread(stream: TileStream) -> str:
    """Brings the inputs of a tile's slots into the order in which tensor cores read them.

    As in `dequant_matmul.stream_inputs`, but that a slot may have two columns, of which each has
    the pieces of two threads; the others are zeros, and stay. Waits for all threads that multiply
    before and after.

    Takes the address of inputs, that of numbers of the tile's slots, their first place and how
    many there are, and shared addresses of inputs and of numbers of slots.
    """
    a = Assembly()
    at_once = stream.consumers // (_PIECES * ROWS)
    thread = a.b32("mov.u32", "%tid.x")
    odd, owner = a.b32("and.b32", thread, 1), a.b32("bfe.u32", thread, 1, 2)
    place = a.b32("shr.u32", thread, 3)
    slab, row = a.b32("div.u32", place, ROWS), a.b32("rem.u32", place, ROWS)
    there = a.holds("lt.u32", row, "$3")
    number = a.b32("mov.b32", 0)
    address = a.b64("mad.wide.u32", row, 4, "$1")
    a.do("ld.global.nc.b32", number, f"[{address}]", when=there)
    # What is not there is read as well, from where something is: registers that a thread may leave
    # as they were would have to be kept from tile to tile.
    given = a.b32("selp.b32", a.b32("add.u32", row, "$2"), "$2", there)
    if stream.gated:
        given = a.b32("div.u32", number, stream.slots_of_token)

    of_odd, of_owner = _strides(stream)
    start = a.b64("mad.wide.u32", given, stream.inputs * 2, "$0")
    offset = a.b32("mul.lo.u32", a.b32("shr.u32", slab, 1), BLOCK * 2)
    offset = a.b32("mad.lo.u32", a.b32("and.b32", slab, 1), 2 * of_odd, offset)
    offset = a.b32("mad.lo.u32", odd, of_odd, offset)
    offset = a.b32("mad.lo.u32", owner, of_owner, offset)
    start = a.b64("mad.wide.u32", offset, 1, start)
    column = row
    if stream.copies == 2:
        column = a.b32("mad.lo.u32", row, 2, a.b32("shr.u32", owner, 1))
    to = a.b32("mad.lo.u32", slab, stream.own_rows * SLAB_BYTES, "$4")
    to = a.b32("mad.lo.u32", column, SLAB_BYTES, to)
    to = a.b32("mad.lo.u32", owner, 4, to)
    first = a.b32("xor.b32", a.b32("shl.b32", odd, 2), a.b32("and.b32", column, 7))
    # A word is a pair of inputs, and each pair of a piece is of another half of a step.
    places = [a.b32("mad.lo.u32", a.b32("xor.b32", first, word), 16, to) for word in range(4)]
    slabs = range(0, stream.inputs // SLAB, at_once)
    for begin in range(0, len(slabs), _AHEAD):
        pieces = [(each, a.registers("b32", 4)) for each in slabs[begin : begin + _AHEAD]]
        for each, words in pieces:
            block, half = divmod(each, 2)
            at = f"[{start}+{block * BLOCK * 2 + half * 2 * of_odd}]"
            a.do("ld.global.nc.v4.b32", braces(words), at)
        if begin == 0:
            # What was there before has been multiplied.
            a.do("bar.sync", CONSUMERS, stream.consumers)
        for each, words in pieces:
            for at, word in zip(places, words, strict=True):
                to = f"[{at}+{each * stream.own_rows * SLAB_BYTES}]"
                a.do("st.shared.b32", to, word, when=there)
    beginning = a.register("pred")
    leading = a.holds("eq.u32", a.b32("and.b32", thread, _PIECES - 1), 0)
    a.do("and.pred", beginning, leading, a.holds("eq.u32", slab, 0))
    a.do("st.shared.b32", f"[{a.b32('mad.lo.u32', row, 4, '$5')}]", number, when=beginning)
    a.do("fence.proxy.async.shared::cta")
    a.do("bar.sync", CONSUMERS, stream.consumers)
    return str(a)


def _strides(stream: TileStream) -> tuple[int, int]:
    """Bytes from a thread's piece of a block to its next one, and to the next thread's."""
    of_unit, of_units = 2 * _PIECE, 2 * BLOCK // 4
    return (of_unit, of_units) if stream.bits == 3 else (of_units, of_unit)
