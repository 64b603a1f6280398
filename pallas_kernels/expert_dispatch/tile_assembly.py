"""What warps do with tiles of slots, and stages of codes, in PTX: see `tile_stream`.

Four threads share two rows of the matrix, as in `dequant_matmul.stream_assembly`; where there are
gates, a gate's row and the one above, so that a thread has both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..assembly import Assembly, braces
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.pairs_assembly import Decoder
from ..dequant_matmul.stage_words import Words
from ..dequant_matmul.stages import ALL
from ..dequant_matmul.tensor_cores import BLOCK, TensorCores, of_warps
from .tile_stream import ENTRY, OF_WARP, TileStream

# Inputs that a thread decodes before the tensor cores take them.
SPAN = 64
# Of a thread that asks, and of one that multiplies, of 384: together no more than 168 each.
_REGISTERS = 40, 232
# Selectors of `prmt`: the lower half of a word twice, and the upper.
_LOWER, _UPPER = 0x1010, 0x3232


def list_items(stream: TileStream, programs: int) -> str:
    """Lists the program's items: expert, place of the tile's first slot, how many, first output.

    All threads wait for it. Takes the program's number, addresses of tiles' experts, first places
    and rows, and the shared address of the list.
    """
    a = Assembly()
    thread = a.b32("mov.u32", "%tid.x")
    listed = stream.listed(programs)
    for begin in range(0, listed, stream.threads):
        index = a.b32("add.u32", thread, begin)
        item = a.b32("mad.lo.u32", index, programs, "$0")
        tile = a.b32("div.u32", item, stream.items)
        near = a.register("pred")
        mine = a.holds("lt.u32", index, listed)
        a.do("and.pred", near, mine, a.holds("lt.u32", tile, stream.tiles))
        entry = []
        for array in ("$1", "$2", "$3"):
            word = a.b32("mov.b32", 0)
            address = a.b64("mad.wide.u32", tile, 4, array)
            a.do("ld.global.nc.b32", word, f"[{address}]", when=near)
            entry.append(word)
        number = a.b32("sub.u32", item, a.b32("mul.lo.u32", tile, stream.items))
        entry.append(a.b32("mul.lo.u32", number, stream.item))
        to = a.b32("mad.lo.u32", index, ENTRY, "$4")
        a.do("st.shared.v4.b32", f"[{to}]", braces(entry), when=mine)
    a.do("bar.sync", ALL, stream.threads)
    return str(a)


def registers(stream: TileStream) -> tuple[str, str]:
    """What threads that ask do, and what those that multiply do, so that these have more registers.

    Nothing where they need no more, since they have few sums.
    """
    if stream.strips == 1:
        return "", ""
    fewer, more = _REGISTERS
    a, b = Assembly(), Assembly()
    a.do("setmaxnreg.dec.sync.aligned.u32", fewer)
    b.do("setmaxnreg.inc.sync.aligned.u32", more)
    return str(a), str(b)


def multiply(stream: TileStream, slots: int, block: int) -> str:
    """Sums of an item, of its first slots, with those of one more block of a stage.

    Gives `TileStream.sums` float32, strip by strip; takes shared addresses of the stage's inputs,
    of its codes, and of its scales of the item's first row, and the sums so far.
    """
    a = Assembly()
    count = stream.sums(slots)
    x, codes, numbers, *totals = (f"${count + index}" for index in range(3 + count))
    place = Place(a, stream)
    # They came as threads store, which the tensor cores would not know of.
    a.do("fence.proxy.async.shared::cta")
    cores = TensorCores(a, stream.rows, of_warps(a, x), slots)
    words = Words(a, stream.stage, codes, place.row, place.thread, a.b32("mov.b32", 0))
    scaled = _Scaled(a, stream, place, numbers)
    sums = [a.f32("mov.b32", total) for total in totals]
    for strip in range(stream.strips):
        rows = (strip * stream.strip + further for further in (0, stream.apart))
        own = sums[strip * cores.sums :][: cores.sums]
        decoded = [scaled.pairs(words.of_block(block, row), block, row) for row in rows]
        for first in range(0, BLOCK, SPAN):
            pairs = [list(itertools.islice(of_row, SPAN // 8)) for of_row in decoded]
            cores.start(own, block * BLOCK + first, pairs, anew=False)
            # Whose pairs lie where the next come to.
            cores.wait(1)
    cores.wait(0)
    for index, total in enumerate(sums):
        a.do("mov.b32", f"${index}", total)
    return str(a)


class _Scaled:
    """Codes times scales, rounded to bfloat16.

    Args:
        a: to which instructions are added.
        stream: see there.
        place: of the thread.
        numbers: shared address of the stage's scales of the item's first row.
    """

    def __init__(self, a: Assembly, stream: TileStream, place: Place, numbers: str):
        self._a, self._stream = a, stream
        self._decoder = Decoder(a, stream.bits)
        self._start = a.b32("mad.lo.u32", place.row, stream.scale_groups * 2, numbers)
        self._of_thread = ""
        if (stream.bits, stream.group_size) == (3, UNIT * 2):
            # A thread has one unit of a block's four, so one of two groups.
            upper = a.holds("lt.u32", 1, place.thread)
            self._of_thread = a.b32("selp.b32", _UPPER, _LOWER, upper)

    def pairs(self, units: list[list[str]], block: int, row: int) -> Iterator[str]:
        """Of a block's units, or the one that the thread has, in a row so many further on."""
        for scale, unit in zip(self._scales(len(units), block, row), units, strict=True):
            for pair in self._decoder.pairs(unit):
                yield self._a.b32("mul.rn.bf16x2", pair, scale)

    def _scales(self, units: int, block: int, row: int) -> list[str]:
        """Of so many units, each twice in a word."""
        a, stream = self._a, self._stream
        groups = BLOCK // stream.group_size
        offset = (row * stream.scale_groups + block * groups) * 2
        if groups == 1:
            word = a.b32("ld.shared.u16", f"[{self._start}+{offset}]")
            return [a.b32("prmt.b32", word, word, _LOWER)] * units
        [word] = a.load_shared(1, self._start, offset)
        if self._of_thread:
            return [a.b32("prmt.b32", word, word, self._of_thread)] * units
        lower, upper = (a.b32("prmt.b32", word, word, half) for half in (_LOWER, _UPPER))
        return [lower] * (units // 2) + [upper] * (units // 2)


class Place:
    """Where a thread is.

    Attributes:
        thread: which of the four that share rows.
        row: first one, of the first strip; the other is `TileStream.apart` further on.
    """

    def __init__(self, a: Assembly, stream: TileStream):
        lane = a.b32("mov.u32", "%laneid")
        self.thread = a.b32("and.b32", lane, 3)
        warp = a.b32("shr.u32", a.b32("mov.u32", "%tid.x"), 5)
        rows = OF_WARP // 2 if stream.gated else OF_WARP
        self.row = a.b32("mad.lo.u32", warp, rows, a.b32("shr.u32", lane, 2))
