"""What warps do with chunks of codes that lie in shared memory, in PTX: see `stream`.

An instruction of the tensor cores multiplies 64 outputs, which four warps decoded into registers,
by all rows of 16 inputs, which it reads from shared memory. Of each of two outputs a thread brings
two pairs of inputs. Four threads share an output: of each unit a thread takes eight inputs, or at 3
bits of each four units one.
"""

from __future__ import annotations

import functools

from ..assembly import Assembly, float32
from .pairs_assembly import FACTORS, Decoder
from .stage_words import Words, scales
from .stages import CONSUMERS
from .stream import Stream
from .tensor_cores import BLOCK, COLUMNS, WARPS, TensorCores, multiplied, of_warps


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
    x, codes, numbers_here, *totals = (f"${count + index}" for index in range(3 + count))
    place = _Place(a)
    of_block = BLOCK * stream.own_rows * 2
    inputs = a.b32("mad.lo.u32", of_warps(a, place.group), stream.blocks * of_block, x)
    cores = TensorCores(a, stream.own_rows, inputs)
    first = a.b32("mul.lo.u32", place.group, stream.blocks)
    words = Words(a, stream.stage, codes, place.row, place.thread, first)
    numbers = _Scales(a, stream, place, numbers_here)

    def of(block: int) -> tuple[list[list[list[str]]], list[list[str]]]:
        return [words.of_block(block, row) for row in (0, 8)], numbers.of_block(block)

    blocks = [functools.partial(of, block) for block in range(stream.blocks)]
    totals = multiplied(a, cores, stream.span, Decoder(a, stream.bits), blocks, totals)
    for index, total in enumerate(totals):
        a.do("mov.b32", f"${index}", total)
    return str(a)


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
            number = a.f32("mul.f32", total, float32(1 / FACTORS[stream.bits]))
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


class _Scales:
    """Of a thread's two outputs.

    Args:
        a: to which instructions are added.
        stream: see there.
        place: of the thread.
        scales: shared address of the chunk's, of the tile's first output.
    """

    def __init__(self, a: Assembly, stream: Stream, place: _Place, scales: str):
        self._a, self._stream = a, stream
        self._count = BLOCK // stream.group_size
        row = a.b32("mad.lo.u32", place.row, stream.scale_groups * 2, scales)
        self._start = a.b32("mad.lo.u32", place.group, stream.blocks * self._count * 2, row)

    def of_block(self, block: int) -> list[list[str]]:
        """See `multiplied`."""
        stream = self._stream
        both = []
        for row in (0, 8):
            offset = row * stream.scale_groups * 2 + block * self._count * 2
            both.append(scales(self._a, self._count, self._start, offset))
        spans = stream.group_size // stream.span
        pairs = [pair for pair in zip(*both, strict=True) for _ in range(spans)]
        return [[first, first, second, second] for first, second in pairs]
