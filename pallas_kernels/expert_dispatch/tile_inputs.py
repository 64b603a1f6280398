"""How a tile's inputs come into a stage, in PTX: see `tile_stream`."""

from __future__ import annotations

from ..assembly import Assembly
from ..dequant_matmul.stages import PRODUCERS
from ..dequant_matmul.tensor_cores import BLOCK, SLAB, SLAB_BYTES
from .tile_stream import TileStream

# Bytes of a copy, and how many make a slab of a row.
_PIECE, _PIECES = 16, 8


def ask(stream: TileStream, block: int) -> str:
    """Asks for a block of a stage's inputs of a tile, and arrives at a barrier when they are there.

    Rows that the tile has not are those of its last slot, or nothing where no product takes them.
    By all threads behind those that multiply.

    Takes the address of inputs, that of numbers of slots by place, the tile's first place and how
    many it has, bytes of a row before the stage's inputs, and shared addresses of those, of the
    item's numbers of slots, which come with its first block, and of the barrier.
    """
    a = Assembly()
    thread = a.b32("sub.u32", a.b32("mov.u32", "%tid.x"), stream.consumers)
    piece, first = a.b32("and.b32", thread, _PIECES - 1), a.b32("shr.u32", thread, 3)
    # Rows of a thread are alike in their last three bits, and so is where their pieces go.
    turned = a.b32("xor.b32", piece, a.b32("and.b32", first, 7))
    to = a.b32("mad.lo.u32", first, SLAB_BYTES, a.b32("mad.lo.u32", turned, _PIECE, "$5"))
    offset = a.b32("mad.lo.u32", piece, _PIECE, "$4")
    last = a.b32("sub.u32", "$3", 1)
    at_once = PRODUCERS // _PIECES
    smallest = stream.sizes[0]
    more = a.holds("lt.u32", smallest, "$3")
    for begin in range(0, stream.rows, at_once):
        needed = None if begin < smallest else more
        row = a.b32("min.u32", a.b32("add.u32", first, begin), last)
        given = a.b32("add.u32", row, "$2")
        if stream.slots_of_token is not None:
            number = a.register("b32")
            a.do("ld.global.nc.b32", number, f"[{a.b64('mad.wide.u32', given, 4, '$1')}]")
            given = a.b32("div.u32", number, stream.slots_of_token)
        start = a.b64("mad.wide.u32", given, stream.inputs * 2, "$0")
        start = a.b64("mad.wide.u32", offset, 1, start)
        for slab in range(block * BLOCK // SLAB, (block + 1) * BLOCK // SLAB):
            place = (slab * stream.rows + begin) * SLAB_BYTES
            source = f"[{start}+{slab * SLAB_BYTES}]"
            a.do("cp.async.cg.shared.global", f"[{to}+{place}]", source, _PIECE, when=needed)
    if stream.numbers and block == 0:
        row = a.b32("add.u32", a.b32("min.u32", thread, last), "$2")
        beginning = a.register("pred")
        mine = a.holds("lt.u32", thread, stream.rows)
        a.do("and.pred", beginning, mine, a.holds("eq.u32", "$4", 0))
        to = a.b32("mad.lo.u32", thread, 4, "$6")
        source = a.b64("mad.wide.u32", row, 4, "$1")
        a.do("cp.async.ca.shared.global", f"[{to}]", f"[{source}]", 4, when=beginning)
    a.do("cp.async.mbarrier.arrive.noinc.shared.b64", "[$7]")
    return str(a)
