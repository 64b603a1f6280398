"""How an item's results are stored, in PTX: see `tile_stream`."""

from __future__ import annotations

from ..assembly import Assembly, braces, float32
from ..dequant_matmul.pairs_assembly import FACTORS
from ..dequant_matmul.tensor_cores import COLUMNS
from ..dequant_matmul.turn import THREADS, Turn
from .silu_assembly import silu
from .tile_assembly import Place, sums_of
from .tile_stream import OF_WARP, TileStream

# Slots that a warp stores at once.
_AT_ONCE = 16


def store_gated(stream: TileStream) -> str:
    """Stores silu(gate) * up by place, outputs in the order of the next product.

    Takes the item's first output, the tile's first place and how many slots it has, the address of
    results, and a thread's sums.
    """
    a = Assembly()
    first, place_of_tile, filled, out, *sums = (f"${i}" for i in range(4 + sums_of(stream)))
    place, turn = Place(a, stream), stream.turn
    assert turn is not None
    sums = _scaled(a, stream, sums)
    output = _turned(a, turn, a.b32("add.u32", first, place.row))
    for element in range(stream.rows // 4):
        column, odd = divmod(element, 2)
        slot = a.b32("mad.lo.u32", place.thread, 2, COLUMNS * column + odd)
        near = a.holds("lt.u32", slot, filled)
        row = a.b32("add.u32", place_of_tile, slot)
        index = a.b32("mad.lo.u32", row, stream.outputs, output)
        address = a.b64("mad.wide.u32", index, 2, out)
        rounded = a.register("b16")
        gate, above = (sums[4 * column + 2 * half + odd] for half in (0, 1))
        a.do("cvt.rn.bf16.f32", rounded, silu(a, gate, above))
        a.do("st.global.b16", f"[{address}]", rounded, when=near)
    return str(a)


def store_by_slot(stream: TileStream) -> str:
    """Stores down projections by slot: through shared memory, so that whole sectors are written.

    Takes the item's first output, how many slots the tile has, shared addresses of their numbers
    and of memory of `TileStream.turned` bytes, the address of results, and a thread's sums.
    """
    a = Assembly()
    first, filled, numbers, memory, out, *sums = (f"${i}" for i in range(5 + sums_of(stream)))
    sums = _scaled(a, stream, sums)
    lane = a.b32("mov.u32", "%laneid")
    warp = a.b32("shr.u32", a.b32("mov.u32", "%tid.x"), 5)
    mine = a.b32("mad.lo.u32", warp, stream.rows * OF_WARP * 2, memory)
    # Four squares of eight: two of outputs, of eight slots and of the next eight.
    row, square = a.b32("and.b32", lane, 7), a.b32("shr.u32", lane, 3)
    row = a.b32("mad.lo.u32", a.b32("shr.u32", square, 1), 8, row)
    to = _piece(a, mine, row, a.b32("and.b32", square, 1))
    slot, piece = a.b32("shr.u32", lane, 1), a.b32("and.b32", lane, 1)
    at = _piece(a, mine, slot, piece)
    first = a.b32("mad.lo.u32", warp, OF_WARP, first)
    first = a.b32("mad.lo.u32", piece, 8, first)
    number = a.b32("mad.lo.u32", slot, 4, numbers)
    rounds = range(0, stream.rows, _AT_ONCE)
    # What was there before has been read.
    a.do("bar.warp.sync", "0xffffffff")
    for begin in rounds:
        values = sums[begin // 2 :][: _AT_ONCE // 2]
        words = [_pair(a, *values[2 * k :][:2]) for k in range(4)]
        place = f"[{to}+{begin * OF_WARP * 2}]"
        a.do("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", place, braces(words))
    a.do("bar.warp.sync", "0xffffffff")
    for begin in rounds:
        words = a.load_shared(4, at, begin * OF_WARP * 2)
        [row] = a.load_shared(1, number, begin * 4)
        near = a.holds("lt.u32", a.b32("add.u32", slot, begin), filled)
        index = a.b32("mad.lo.u32", row, stream.outputs, first)
        address = a.b64("mad.wide.u32", index, 2, out)
        a.do("st.global.v4.b32", f"[{address}]", braces(words), when=near)
    return str(a)


def _scaled(a: Assembly, stream: TileStream, sums: list[str]) -> list[str]:
    """Sums of codes as they are, not of what is decoded."""
    factor = float32(1 / FACTORS[stream.bits])
    return [a.f32("mul.f32", each, factor) for each in sums]


def _piece(a: Assembly, start: str, row: str, piece: str) -> str:
    """Where one of two pieces of eight outputs lies: eight rows are in all banks."""
    turned = a.b32("xor.b32", piece, a.b32("bfe.u32", row, 2, 1))
    return a.b32("mad.lo.u32", turned, 16, a.b32("mad.lo.u32", row, OF_WARP * 2, start))


def _pair(a: Assembly, lower: str, upper: str) -> str:
    """Two numbers, rounded to bfloat16."""
    return a.b32("cvt.rn.bf16x2.f32", upper, lower)


def _turned(a: Assembly, turn: Turn, output: str) -> str:
    """Where `Turn.turned` brings an output: powers of two all along."""
    run, width = turn.run, turn.width
    within = a.b32("and.b32", output, THREADS * width - 1)
    thread = a.b32("shr.u32", within, width.bit_length() - 1)
    pair = a.b32("shr.u32", a.b32("and.b32", within, width - 1), run.bit_length() - 1)
    to = a.b32("mad.lo.u32", pair, THREADS * run, a.b32("and.b32", within, run - 1))
    to = a.b32("mad.lo.u32", thread, run, to)
    return a.b32("add.u32", a.b32("sub.u32", output, within), to)
