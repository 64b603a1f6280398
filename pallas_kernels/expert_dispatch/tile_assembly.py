"""What warps do with tiles of slots, and stages of codes, in PTX: see `tile_stream`.

Four threads share two rows of the matrix, as in `dequant_matmul.stream_assembly`; where there are
gates, a gate's row and the one above, so that a thread has both.
"""

from __future__ import annotations

import functools
import struct

from ..assembly import Assembly
from ..dequant_matmul.pairs_assembly import FACTORS, Decoder
from ..dequant_matmul.stage_words import Words, scales
from ..dequant_matmul.stages import ALL
from ..dequant_matmul.tensor_cores import BLOCK, TensorCores, multiplied, of_warps
from .tile_stream import ENTRY, TileStream

# As float32: -log2(e).
_MINUS_LOG2_E = "0fBFB8AA3B"


def list_tiles(stream: TileStream, programs: int) -> str:
    """Lists the program's tiles: expert, place of the first slot, how many; and clears inputs.

    All threads wait for it. Takes the number of the program's first tile, addresses of tiles'
    experts, first places and rows, and shared addresses of the list and of inputs.
    """
    a = Assembly()
    thread = a.b32("mov.u32", "%tid.x")
    tile = a.b32("add.u32", thread, "$0")
    near = a.register("pred")
    mine = a.holds("lt.u32", thread, stream.listed(programs))
    a.do("and.pred", near, mine, a.holds("lt.u32", tile, stream.tiles))
    entry = []
    for array in ("$1", "$2", "$3"):
        word = a.b32("mov.b32", 0)
        address = a.b64("mad.wide.u32", tile, 4, array)
        a.do("ld.global.nc.b32", word, f"[{address}]", when=near)
        entry.append(word)
    entry.append(a.b32("mov.b32", 0))
    to = a.b32("mad.lo.u32", thread, ENTRY, "$4")
    a.do("st.shared.v4.b32", f"[{to}]", f"{{{', '.join(entry)}}}", when=mine)
    if stream.copies > 1:
        zeros = [a.b32("mov.b32", 0)] * 4
        to = a.b32("mad.lo.u32", thread, 16, "$5")
        consumer = a.holds("lt.u32", thread, stream.consumers)
        for start in range(0, stream.held, 16 * stream.consumers):
            a.do("st.shared.v4.b32", f"[{to}+{start}]", f"{{{', '.join(zeros)}}}", when=consumer)
    a.do("bar.sync", ALL, stream.threads)
    return str(a)


def sums_of(stream: TileStream) -> int:
    """How many a thread has of an item."""
    return 4 * stream.columns


def multiply(stream: TileStream) -> str:
    """Sums of an item with those of one more stage.

    Gives `sums_of` float32; takes shared addresses of the stage's inputs, of its codes, and of its
    scales of the item's first row, and the sums so far.
    """
    a = Assembly()
    count = sums_of(stream)
    x, codes, numbers, *totals = (f"${count + index}" for index in range(3 + count))
    place = Place(a, stream)
    cores = TensorCores(a, stream.own_rows, stream.span, of_warps(a, x))
    words = Words(a, stream.stage, codes, place.row, place.thread, a.b32("mov.b32", 0))
    groups = BLOCK // stream.group_size
    start = a.b32("mad.lo.u32", place.row, stream.scale_groups * 2, numbers)

    def of(block: int) -> tuple[list[list[list[str]]], list[list[str]]]:
        both = []
        for row in (0, stream.apart):
            offset = row * stream.scale_groups * 2 + block * groups * 2
            both.append(scales(a, groups, start, offset))
        return [words.of_block(block, row) for row in (0, stream.apart)], _by_span(stream, *both)

    blocks = [functools.partial(of, block) for block in range(stream.stage.blocks)]
    totals = multiplied(a, cores, Decoder(a, stream.bits), blocks, totals)
    for index, total in enumerate(totals):
        a.do("mov.b32", f"${index}", total)
    return str(a)


def _by_span(stream: TileStream, first: list[str], second: list[str]) -> list[list[str]]:
    """Scales of a block's groups, of both rows, as `multiplied` takes them."""
    spans = BLOCK // stream.span
    if stream.copies == 2:
        # A slot's first column has the block's first group.
        return [[*first, *second]] * spans
    each = spans // len(first)
    both = [pair for pair in zip(first, second, strict=True) for _ in range(each)]
    return [[one, one, other, other] for one, other in both]


def finish(stream: TileStream) -> str:
    """Stores an item's results: silu(gate) * up by place, or down projections by slot.

    Takes the item's first output, the tile's first place and how many slots it has, the shared
    address of their numbers, the address of results, and a thread's sums.
    """
    a = Assembly()
    first, place_of_tile, filled, numbers, out, *sums = (
        f"${i}" for i in range(5 + sums_of(stream))
    )
    place = Place(a, stream)
    output = a.b32("add.u32", first, place.row)
    for slot, pair in _of_slots(a, stream, place, sums):
        near = a.holds("lt.u32", slot, filled)
        one, other = (a.f32("mul.f32", each, _float(1 / FACTORS[stream.bits])) for each in pair)
        if stream.gated:
            row = a.b32("add.u32", place_of_tile, slot)
            results = [(0, _silu(a, one, other))]
        else:
            row = a.b32("ld.shared.b32", f"[{a.b32('mad.lo.u32', slot, 4, numbers)}]")
            results = [(0, one), (stream.apart, other)]
        index = a.b32("mad.lo.u32", row, stream.outputs, output)
        address = a.b64("mad.wide.u32", index, 2, out)
        for further, number in results:
            rounded = a.register("b16")
            a.do("cvt.rn.bf16.f32", rounded, number)
            a.do("st.global.b16", f"[{address}+{2 * further}]", rounded, when=near)
    return str(a)


def _of_slots(
    a: Assembly, stream: TileStream, place: Place, sums: list[str]
) -> list[tuple[str, tuple[str, str]]]:
    """A thread's slots of the tile, with the sums of both its rows."""
    found = []
    for column in range(stream.columns):
        above, below = sums[4 * column :][:2], sums[4 * column + 2 :][:2]
        if stream.copies == 2:
            slot = a.b32("add.u32", place.thread, 4 * column)
            found.append((slot, (a.f32("add.f32", *above), a.f32("add.f32", *below))))
            continue
        for odd, pair in enumerate(zip(above, below, strict=True)):
            slot = a.b32("mad.lo.u32", place.thread, 2, 8 * column + odd)
            found.append((slot, pair))
    return found


def _silu(a: Assembly, gate: str, up: str) -> str:
    """Of a gate, times what is above."""
    power = a.f32("ex2.approx.f32", a.f32("mul.f32", gate, _MINUS_LOG2_E))
    opened = a.f32("rcp.approx.f32", a.f32("add.f32", power, _float(1.0)))
    return a.f32("mul.f32", a.f32("mul.f32", gate, opened), up)


class Place:
    """Where a thread is: two rows of a stage, so far apart.

    Attributes:
        thread: which of the four that share them.
        row: first one; where there are gates, which of an item's outputs, too.
    """

    def __init__(self, a: Assembly, stream: TileStream):
        lane = a.b32("mov.u32", "%laneid")
        self.thread = a.b32("and.b32", lane, 3)
        warp = a.b32("shr.u32", a.b32("mov.u32", "%tid.x"), 5)
        # Eight outputs of a warp with gates, and sixteen without: of groups one behind the other.
        rows = 8 if stream.gated else 16
        self.row = a.b32("mad.lo.u32", warp, rows, a.b32("shr.u32", lane, 2))


def _float(number: float) -> str:
    """As PTX writes a float32 exactly."""
    return f"0f{struct.unpack('>I', struct.pack('>f', number))[0]:08X}"
