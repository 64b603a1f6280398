"""How an item's results are stored, in PTX: see `tile_stream`."""

from __future__ import annotations

from ..assembly import Assembly, braces, float32
from ..dequant_matmul.pairs_assembly import FACTORS
from ..dequant_matmul.stages import CONSUMERS
from ..dequant_matmul.tensor_cores import COLUMNS
from ..dequant_matmul.turn import THREADS, Turn
from .silu_assembly import silu
from .tile_assembly import Place
from .tile_stream import OF_WARP, TURNED, TileStream

# Slots that a warp stores at once.
_AT_ONCE = 16


def store_gated(stream: TileStream, slots: int) -> str:
    """Stores silu(gate) * up by place, outputs in the order of the next product.

    Through shared memory, some slots at once, so that whole lines are written.

    Takes the item's first output, the tile's first place and how many slots it has, the shared
    address of memory of `TileStream.turned` bytes, the address of results, and a thread's sums.
    """
    a = Assembly()
    first, place_of_tile, filled, memory, out, *sums = (
        f"${i}" for i in range(5 + stream.sums(slots))
    )
    sums = _scaled(a, stream, sums)
    mine = _Gated(a, stream, memory)
    start = a.b64("mad.wide.u32", place_of_tile, stream.outputs * 2, out)
    start = a.b64("mad.wide.u32", first, 2, start)
    for begin in range(0, slots, TURNED):
        count = min(TURNED, slots - begin)
        # All have read what was there before.
        a.do("bar.sync", CONSUMERS, stream.consumers)
        for strip in range(stream.strips):
            own = sums[(strip * slots + begin) // 2 :][: count // 2]
            mine.write(strip, own)
        a.do("bar.sync", CONSUMERS, stream.consumers)
        mine.store(begin, count, filled, start)
    return str(a)


class _Gated:
    """A thread's part of gated results in shared memory, and of what is read there again.

    Args:
        a: to which instructions are added.
        stream: see there.
        memory: shared address: a line for each of some slots, pieces of 16 bytes in another order.
    """

    def __init__(self, a: Assembly, stream: TileStream, memory: str):
        self._a, self._stream, self._memory = a, stream, memory
        self._line = stream.item * 2
        place, turn = Place(a, stream), stream.turn
        assert turn is not None
        lines = a.b32("mad.lo.u32", place.thread, 2 * self._line, memory)
        turned = self._turn(a.b32("shl.b32", place.thread, 1))
        self._own = []
        for strip in range(stream.strips):
            output = a.b32("add.u32", place.row, strip * stream.strip)
            byte = a.b32("shl.b32", _turned(a, turn, output), 1)
            self._own.append(a.b32("add.u32", a.b32("xor.b32", byte, turned), lines))

    def _turn(self, slot: str) -> str:
        """What is done to the place of a slot's pieces, so that few are in the same banks."""
        return self._a.b32("shl.b32", self._a.b32("bfe.u32", slot, 1, 1), 6)

    def write(self, strip: int, sums: list[str]) -> None:
        """Silu(gate) * up of some slots."""
        a = self._a
        for element in range(len(sums) // 2):
            column, odd = divmod(element, 2)
            gate, above = (sums[4 * column + 2 * half + odd] for half in (0, 1))
            rounded = a.register("b16")
            a.do("cvt.rn.bf16.f32", rounded, silu(a, gate, above))
            to = f"[{self._own[strip]}+{(COLUMNS * column + odd) * self._line}]"
            a.do("st.shared.b16", to, rounded)

    def store(self, begin: int, count: int, filled: str, start: str) -> None:
        """So many slots, from one on, of those that the tile has."""
        a, stream = self._a, self._stream
        pieces = self._line // 16
        limit = a.b32("min.u32", filled, begin + count)
        thread = a.b32("mov.u32", "%tid.x")
        piece = a.b32("shl.b32", a.b32("and.b32", thread, pieces - 1), 4)
        at_once = stream.consumers // pieces
        for further in range(0, count, at_once):
            line = a.b32("add.u32", a.b32("div.u32", thread, pieces), further)
            at = a.b32("xor.b32", piece, self._turn(line))
            at = a.b32("add.u32", a.b32("mad.lo.u32", line, self._line, at), self._memory)
            slot = a.b32("add.u32", line, begin)
            near = a.holds("lt.u32", slot, limit)
            words = a.registers("b32", 4)
            a.do("ld.shared.v4.b32", braces(words), f"[{at}]", when=near)
            to = a.b64("mad.wide.u32", slot, stream.outputs * 2, start)
            to = a.b64("mad.wide.u32", piece, 1, to)
            a.do("st.global.v4.b32", f"[{to}]", braces(words), when=near)


def store_by_slot(stream: TileStream, slots: int) -> str:
    """Stores down projections by slot: through shared memory, so that whole sectors are written.

    Takes the item's first output, how many slots the tile has, shared addresses of their numbers
    and of memory of `TileStream.turned` bytes, the address of results, and a thread's sums.
    """
    a = Assembly()
    first, filled, numbers, memory, out, *sums = (f"${i}" for i in range(5 + stream.sums(slots)))
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
    rounds = range(0, slots, _AT_ONCE)
    for strip in range(stream.strips):
        # What was there before has been read.
        a.do("bar.warp.sync", "0xffffffff")
        for begin in rounds:
            values = sums[(strip * slots + begin) // 2 :][: _AT_ONCE // 2]
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
            offset = strip * stream.strip * 2
            a.do("st.global.v4.b32", f"[{address}+{offset}]", braces(words), when=near)
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
