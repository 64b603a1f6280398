"""What warps do with chunks of codes that lie in shared memory, in PTX: see `stream`.

An instruction of the tensor cores multiplies 64 outputs, which four warps decoded into registers,
by all rows of 16 inputs, which it reads from shared memory. Of each of two outputs a thread brings
two pairs of inputs. Four threads share an output: of each unit a thread takes eight inputs, or at 3
bits of each four units one.
"""

from __future__ import annotations

import itertools
import struct

from ..assembly import Assembly
from .pairs_assembly import FACTORS, Decoder
from .stream import BLOCK, COLUMNS, CONSUMERS, WARPS, Stream
from .tensor_cores import TensorCores

# Number of the barrier of all threads.
_ALL = 15


def setup(stream: Stream, stages: int) -> str:
    """Barriers: of each stage that it is full, then that it is empty; all threads wait for it.

    Takes their shared address.
    """
    a = Assembly()
    # XLA may launch this one while the launch before is under way.
    a.do("griddepcontrol.wait")
    thread = a.b32("mov.u32", "%tid.x")
    first = a.holds("eq.u32", thread, 0)
    for place in range(2 * stages):
        count = 1 if place < stages else stream.consumers // 32
        a.do("mbarrier.init.shared.b64", f"[$0+{8 * place}]", count, when=first)
    a.do("fence.mbarrier_init.release.cluster", when=first)
    a.do("bar.sync", _ALL, stream.threads)
    return str(a)


def sums_of(stream: Stream) -> int:
    """How many a thread has of a tile."""
    return 4 * stream.columns


def multiply(stream: Stream) -> str:
    """Sums of a tile with those of one more chunk.

    Gives `sums_of` float32; takes shared addresses of the chunk's inputs, of the stage, and of the
    chunk's scales of the tile's first output, and the sums so far.
    """
    a = Assembly()
    count = sums_of(stream)
    x, codes, scales, *totals = (f"${count + index}" for index in range(3 + count))
    place = _Place(a)
    cores = TensorCores(a, stream, place.group, x)
    decoder = Decoder(a, stream.bits)
    words = _Words(a, stream, place, codes)
    # While tensor cores have one span, warps decode the next.
    before: tuple[list[str], list[str]] | None = None
    for block in range(stream.blocks):
        units = [words.of_block(block, row) for row in (0, 8)]
        numbers = [_scales(a, stream, place, scales, block, row) for row in (0, 8)]
        decoded = [(pair for unit in of_row for pair in decoder.pairs(unit)) for of_row in units]
        for span in range(BLOCK // stream.span):
            pairs = [list(itertools.islice(of_row, stream.span // 8)) for of_row in decoded]
            sums = cores.start(block, span, pairs)
            if before is not None:
                cores.wait(1)
                totals = _added(a, totals, *before)
            before = sums, [of_row[span] for of_row in numbers]
    assert before is not None
    cores.wait(0)
    for index, total in enumerate(_added(a, totals, *before)):
        a.do("mov.b32", f"${index}", total)
    return str(a)


def _added(a: Assembly, totals: list[str], sums: list[str], numbers: list[str]) -> list[str]:
    """Totals with a span's sums times the scales of a thread's outputs."""
    return [
        a.f32("fma.rn.f32", each, numbers[index // 2 % 2], total)
        for index, (each, total) in enumerate(zip(sums, totals, strict=True))
    ]


def finish(stream: Stream, size: int) -> str:
    """Adds up the sums of all groups of warps, and stores a tile's results.

    Of what a thread has of eight rows of inputs, each group finishes a part, so that all store.

    Takes a shared address for sums, the tile's first output, the program's first row, the address
    of results and how many outputs they have a row, and a thread's sums.

    Args:
        stream: see there.
        size: bytes of a result: float32 or bfloat16.
    """
    a = Assembly()
    here, first, first_row, out, width, *sums = (f"${i}" for i in range(5 + sums_of(stream)))
    place, groups = _Place(a), stream.groups
    part = 4 // groups
    of_column = WARPS * 32 * 4 * part
    of_group = stream.columns * of_column
    thread = a.b32("and.b32", a.b32("mov.u32", "%tid.x"), WARPS * 32 - 1)
    mine = a.b32("mad.lo.u32", thread, 4 * part, here)
    columns = [sums[4 * column :][:4] for column in range(stream.columns)]
    turned = [_turned(a, each, place.group, part) for each in columns]
    # What was there before has been read.
    a.do("bar.sync", CONSUMERS, stream.consumers)
    for ahead in range(1, groups):
        to = a.b32("and.b32", a.b32("add.u32", place.group, ahead), groups - 1)
        to = a.b32("mad.lo.u32", to, of_group, mine)
        for column, values in enumerate(turned):
            offset = (ahead - 1) * groups * of_group + column * of_column
            a.store_shared(values[ahead * part :][:part], to, offset)
    a.do("bar.sync", CONSUMERS, stream.consumers)
    at = a.b32("mad.lo.u32", place.group, of_group, mine)
    for column, values in enumerate(turned):
        totals = values[:part]
        for ahead in range(1, groups):
            offset = (ahead - 1) * groups * of_group + column * of_column
            both = zip(totals, a.load_shared(part, at, offset), strict=True)
            totals = [a.f32("add.f32", total, other) for total, other in both]
        for index, total in enumerate(totals):
            element = a.b32("mad.lo.u32", place.group, part, index)
            output = a.b32("mad.lo.u32", a.b32("shr.u32", element, 1), 8, place.row)
            output = a.b32("add.u32", first, output)
            row = a.b32("mad.lo.u32", place.thread, 2, a.b32("and.b32", element, 1))
            row = a.b32("add.u32", a.b32("add.u32", row, COLUMNS * column), first_row)
            to = a.b32("mad.lo.u32", row, width, output)
            number = a.f32("mul.f32", total, _float(1 / FACTORS[stream.bits]))
            near = a.holds("lt.u32", row, stream.rows)
            _store(a, number, a.b64("mad.wide.u32", to, size, out), size, near)
    return str(a)


def _store(a: Assembly, number: str, address: str, size: int, near: str) -> None:
    """A result, as float32 or rounded to bfloat16."""
    if size == 4:
        a.do("st.global.f32", f"[{address}]", number, when=near)
        return
    rounded = a.register("b16")
    a.do("cvt.rn.bf16.f32", rounded, number)
    a.do("st.global.b16", f"[{address}]", rounded, when=near)


def _turned(a: Assembly, values: list[str], group: str, part: int) -> list[str]:
    """Values of a thread, from those on that its group finishes."""
    distance = 4 // 2
    while distance >= part:
        far = a.holds("ne.u32", a.b32("and.b32", group, distance // part), 0)
        moved = values[distance:] + values[:distance]
        both = zip(moved, values, strict=True)
        values = [a.b32("selp.b32", other, own, far) for other, own in both]
        distance //= 2
    return values


class _Place:
    """Where a thread is: two outputs of a tile, eight apart.

    Attributes:
        thread: which of the four that share them.
        group: of warps.
        row: first output.
    """

    def __init__(self, a: Assembly):
        lane = a.b32("mov.u32", "%laneid")
        self.thread = a.b32("and.b32", lane, 3)
        warp = a.b32("shr.u32", a.b32("mov.u32", "%tid.x"), 5)
        self.group = a.b32("shr.u32", warp, WARPS.bit_length() - 1)
        band = a.b32("and.b32", warp, WARPS - 1)
        self.row = a.b32("mad.lo.u32", band, 16, a.b32("shr.u32", lane, 2))


class _Words:
    """A thread's words of a stage.

    Args:
        a: to which instructions are added.
        stream: see there.
        place: of the thread.
        codes: shared address of the stage.
    """

    def __init__(self, a: Assembly, stream: Stream, place: _Place, codes: str):
        self._a, self._stream = a, stream
        self._row = a.b32("mad.lo.u32", place.row, stream.line, codes)
        if stream.bits != 3:
            self._row = a.b32("mad.lo.u32", place.thread, stream.box, self._row)
        # The copy engine's order of pieces follows the address.
        pieces = stream.line // 16
        turned = a.b32("bfe.u32", self._row, 7, pieces.bit_length() - 1)
        first = a.b32("mul.lo.u32", place.group, stream.blocks)
        self._first = a.b32("shl.b32", a.b32("xor.b32", first, turned), 4)
        self._within = a.b32("shl.b32", place.thread, 2)

    def of_block(self, block: int, row: int) -> list[list[str]]:
        """Of one of its outputs: of four units what it takes of each, or all of its one."""
        a, stream = self._a, self._stream
        start = a.b32("add.u32", a.b32("xor.b32", self._first, 16 * block), self._row)
        offset = row * stream.line
        if stream.bits == 3:
            start = a.b32("add.u32", start, self._within)
            return [[a.load_shared(1, start, offset + w * stream.box)[0] for w in range(3)]]
        boxes = (
            a.load_shared(4, start, offset + 4 * w * stream.box) for w in range(stream.bits // 4)
        )
        return [list(unit) for unit in zip(*boxes, strict=True)]


def slot(stream: Stream, word: int) -> int:
    """Which box has a word of all units: those that four threads read at once are neighbours."""
    if stream.bits != 8:
        return word
    return word // 2 + 4 * (word % 2)


def _scales(
    a: Assembly, stream: Stream, place: _Place, scales: str, block: int, row: int
) -> list[str]:
    """Of all spans of a block, of one of two outputs, as float32."""
    count, spans = BLOCK // stream.group_size, stream.group_size // stream.span
    start = a.b32("mad.lo.u32", place.row, stream.scale_groups * 2, scales)
    start = a.b32("mad.lo.u32", place.group, stream.blocks * count * 2, start)
    offset = row * stream.scale_groups * 2 + block * count * 2
    if count == 1:
        word = a.b32("ld.shared.u16", f"[{start}+{offset}]")
        return [a.f32("mov.b32", a.b32("shl.b32", word, 16))] * spans
    found = []
    for both in a.load_shared(count // 2, start, offset):
        found += [a.b32("shl.b32", both, 16), a.b32("and.b32", both, "0xffff0000")]
    return [a.f32("mov.b32", half) for half in found]


def _float(number: float) -> str:
    """As PTX writes a float32 exactly."""
    return f"0f{struct.unpack('>I', struct.pack('>f', number))[0]:08X}"
