"""What warps do with tiles of codes that lie in shared memory, in PTX: see `stream`.

An instruction of the tensor cores multiplies 16 rows of 16 inputs, of which each thread brings two
pairs of two rows. A thread decodes a whole unit of each row of its own; which inputs meet which is
free, so that a unit's sixteen pairs go into eight instructions, and all four threads of a row
multiply `stream.BLOCK` inputs. Codes are read as a copy engine has left them: pieces of 16 bytes in
another order in each row, so that eight rows are read without conflicts.
"""

from __future__ import annotations

from collections.abc import Callable

from ..assembly import Assembly, braces, float32
from ..dequant_matmul.layout import UNIT
from ..dequant_matmul.pairs_assembly import FACTORS, Decoder
from .silu_assembly import silu
from .stream import BLOCK, ROWS, Stream

ALL_THREADS = 15  # numbers of barriers; groups of warps have others, from `_OF_GROUPS` on
_OF_GROUPS = 8


def setup(stream: Stream, stages: int) -> str:
    """Barriers, zeros, and a list of the rows that have an expert; all threads wait for it.

    An entry is row + 2^16 expert; how many there are is behind the last that there may be. Takes
    the address of the experts of rows, and shared addresses of list, barriers and zeros.
    """
    a = Assembly()
    # XLA may launch this one while the launch before is under way.
    a.do("griddepcontrol.wait")
    thread = a.b32("mov.u32", "%tid.x")
    first = a.holds("eq.u32", thread, 0)
    warps = stream.cut.bands * stream.cut.parts
    for place in range(barriers(stages)):
        count = warps if stages <= place < 2 * stages else 1
        a.do("mbarrier.init.shared.b64", f"[$2+{8 * place}]", count, when=first)
    a.do("fence.mbarrier_init.release.cluster", when=first)
    mine = a.b32("mad.lo.u32", thread, 4, "$3")
    for start in range(0, stream.zeros // 4, stream.threads):
        near = a.holds("lt.u32", thread, stream.zeros // 4 - start)
        a.do("st.shared.b32", f"[{mine}+{4 * start}]", 0, when=near)
    a.do("bra READY", when=a.holds("ge.u32", thread, 32))
    _list_rows(a, stream.slots)
    a.label("READY")
    a.do("bar.sync", ALL_THREADS, stream.threads)
    return str(a)


def barriers(stages: int) -> int:
    """How many: for each stage that it is full, then that it is empty; and of two rows' inputs."""
    return 2 * stages + 2


def _list_rows(a: Assembly, slots: int) -> None:
    """By one warp, 32 rows at a time."""
    lane = a.b32("mov.u32", "%laneid")
    rows, experts = [], []
    for start in range(0, slots, 32):
        row, expert = a.b32("add.u32", lane, start), a.b32("mov.b32", -1)
        near = a.holds("lt.u32", row, slots)
        a.do("ld.global.nc.b32", expert, f"[{a.b64('mad.wide.u32', row, 4, '$0')}]", when=near)
        rows.append(row)
        experts.append(expert)
    count, below = a.b32("mov.b32", 0), a.b32("mov.u32", "%lanemask_lt")
    for row, expert in zip(rows, experts, strict=True):
        filled = a.holds("ge.s32", expert, 0)
        which = a.b32("vote.sync.ballot.b32", filled, "0xffffffff")
        place = a.b32("add.u32", count, a.b32("popc.b32", a.b32("and.b32", which, below)))
        entry = a.b32("or.b32", a.b32("shl.b32", expert, 16), row)
        a.do("st.shared.b32", f"[{a.b32('mad.lo.u32', place, 4, '$1')}]", entry, when=filled)
        count = a.b32("add.u32", count, a.b32("popc.b32", which))
    a.do("st.shared.b32", f"[$1+{4 * slots}]", count)


def multiply(stream: Stream) -> str:
    """One item, by the warps of a group.

    Takes shared addresses of the row's inputs, codes, scales, of a place for the sums of parts, and
    of zeros; the address of the row's slots; the item's first output; the address of results, of a
    slot one behind the other; and the shared address of the barrier that gives the stage back.
    """
    a = Assembly()
    slots = a.registers("b32", ROWS)
    # Asked for now, needed at the end.
    a.do("ld.global.nc.v4.b32", braces(slots), "[$5]")
    place = _Place(a, stream)
    sums = _sums(a, stream, place)
    a.do("bar.warp.sync", "0xffffffff")
    done = a.register("b64")
    a.do("mbarrier.arrive.shared.b64", done, "[$8]", when=a.holds("eq.u32", place.lane, 0))
    if stream.cut.parts > 1:
        sums = _together(a, stream, place, sums)
    sums = [a.f32("mul.f32", each, float32(1 / FACTORS[stream.bits])) for each in sums]
    _store(a, stream, place, slots, sums)
    a.label("DONE")
    return str(a)


class _Place:
    """Where a thread is: two rows of a tile, a unit of each block, a column.

    Attributes:
        lane: thread of its warp.
        quad: eight threads of four: which of the rows, and which column of inputs.
        thread: which of the four.
        band: of the tile.
        part: of the inputs.
        group: of warps.
        row: first row of the tile's; the second one is so many behind it:
        apart: see there.
    """

    def __init__(self, a: Assembly, stream: Stream):
        bands, parts = stream.cut.bands, stream.cut.parts
        self.lane = a.b32("mov.u32", "%laneid")
        self.quad, self.thread = a.b32("shr.u32", self.lane, 2), a.b32("and.b32", self.lane, 3)
        warp = a.b32("shr.u32", a.b32("mov.u32", "%tid.x"), 5)
        self.group = a.b32("div.u32", warp, bands * parts)
        warp = a.b32("rem.u32", warp, bands * parts)
        self.part, self.band = a.b32("div.u32", warp, bands), a.b32("rem.u32", warp, bands)
        # A gate and what is above it are the two rows of one thread.
        size, self.apart = (8, 8 * bands) if stream.gated else (16, 8)
        self.row = a.b32("mad.lo.u32", self.band, size, self.quad)


def _sums(a: Assembly, stream: Stream, place: _Place) -> list[str]:
    """Products of a part of the inputs: of both rows with the slot that is `place.thread`."""
    decoder = Decoder(a, stream.bits)
    read_codes = _codes(a, stream, place)
    read_inputs = _inputs(a, stream, place)
    read_scales = _scales(a, stream, place)
    zero = a.f32("mov.f32", float32(0.0))
    totals = [a.f32("mov.f32", float32(0.0)) for _ in range(4)]
    for block in range(stream.blocks):
        scales = [read_scales(block, row) for row in (0, place.apart)]
        inputs = read_inputs(block)
        first, second = (decoder.pairs(read_codes(block, row)) for row in (0, place.apart))
        chains = [[zero] * 4 for _ in range(stream.cut.chains)]
        for step in range(8):
            values = [pairs[2 * step + half] for half in (0, 1) for pairs in (first, second)]
            chain = chains[step % len(chains)]
            chains[step % len(chains)] = _multiplied(a, values, inputs[2 * step :][:2], chain)
        # Even columns are of a block's first group, odd ones of its second.
        for index, total in enumerate(totals):
            scale = scales[index // 2][index % 2]
            for chain in chains:
                a.do("fma.rn.f32", total, chain[index], scale, total)
    return [a.f32("add.f32", *totals[:2]), a.f32("add.f32", *totals[2:])]


def _multiplied(a: Assembly, codes: list[str], inputs: list[str], start: list[str]) -> list[str]:
    """One instruction of the tensor cores: 16 x 8 sums over 16 inputs."""
    sums = a.registers("f32", 4)
    a.do(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        *map(braces, (sums, codes, inputs, start)),
    )
    return sums


def _codes(a: Assembly, stream: Stream, place: _Place) -> Callable[[int, int], list[str]]:
    """How the words of the thread's unit of a block are read, of one of its two rows."""
    in_line = stream.line // 16
    start = a.b32("mad.lo.u32", place.row, stream.line, "$1")
    start = a.b32("mad.lo.u32", place.thread, 4, start)
    # The copy engine's pattern: 16 bytes change places with the rows of each 1,024 or less.
    order = a.b32("shr.u32", place.quad, (8 // in_line).bit_length() - 1)
    order = a.b32("shl.b32", order, 4)
    if stream.blocks < in_line:
        parts = in_line // stream.blocks
        inside = a.b32("mul.lo.u32", a.b32("rem.u32", place.part, parts), 16 * stream.blocks)
        order = a.b32("xor.b32", order, inside)
        box = a.b32("div.u32", place.part, parts)
    else:
        box = a.b32("mul.lo.u32", place.part, stream.blocks // in_line)
    start = a.b32("mad.lo.u32", box, stream.box, start)

    def read(block: int, row: int) -> list[str]:
        piece = a.b32("xor.b32", order, block % in_line * 16)
        address = a.b32("add.u32", start, piece)
        offset = block // in_line * stream.box + row * stream.line
        return [
            a.load_shared(1, address, offset + word * stream.boxes * stream.box)[0]
            for word in range(stream.bits)
        ]

    return read


def _inputs(a: Assembly, stream: Stream, place: _Place) -> Callable[[int], list[str]]:
    """How inputs of a block are read: sixteen pairs of the slot that is half the column.

    An even column has those of the first two threads' units, an odd one those of the others.
    """
    own = a.b32("mad.lo.u32", a.b32("shr.u32", place.quad, 1), stream.token, "$0")
    own = a.b32("mad.lo.u32", place.thread, 16, own)
    own = a.b32("mad.lo.u32", place.part, stream.blocks * BLOCK * 2, own)
    odd, second = a.b32("and.b32", place.quad, 1), a.b32("shr.u32", place.thread, 1)
    # From the middle of a line on, where no other thread of the eight reads at the time.
    zeros = a.b32("add.u32", "$4", 64)
    start = a.b32("selp.b32", own, zeros, a.holds("eq.u32", odd, second))

    def read(block: int) -> list[str]:
        pieces = (a.load_shared(4, start, block * BLOCK * 2 + 64 * piece) for piece in range(4))
        return [word for piece in pieces for word in piece]

    return read


def _scales(a: Assembly, stream: Stream, place: _Place) -> Callable[[int, int], list[str]]:
    """How the scales of a block's two groups are read, as float32, of one of two rows."""
    of_block = BLOCK // stream.group_size
    start = a.b32("mad.lo.u32", place.row, stream.groups * 2, "$2")
    start = a.b32("mad.lo.u32", place.part, stream.blocks * of_block * 2, start)

    def read(block: int, row: int) -> list[str]:
        offset = row * stream.groups * 2 + block * of_block * 2
        if of_block == 1:
            word = a.b32("ld.shared.u16", f"[{start}+{offset}]")
            return [_bitcast(a, a.b32("shl.b32", word, 16))] * 2
        [both] = a.load_shared(1, start, offset)
        halves = a.b32("shl.b32", both, 16), a.b32("and.b32", both, "0xffff0000")
        return [_bitcast(a, half) for half in halves]

    return read


def _together(a: Assembly, stream: Stream, place: _Place, sums: list[str]) -> list[str]:
    """The sums of all parts, in the first one's threads; those of others are done."""
    bands, parts = stream.cut.bands, stream.cut.parts
    size = 32 * 8 * bands
    mine = a.b32("mad.lo.u32", place.band, 32 * 8, "$3")
    mine = a.b32("mad.lo.u32", place.lane, 8, mine)
    others = a.holds("ne.u32", place.part, 0)
    behind = a.b32("mad.lo.u32", a.b32("sub.u32", place.part, 1), size, mine)
    a.do("st.shared.v2.f32", f"[{behind}]", braces(sums), when=others)
    barrier = a.b32("add.u32", place.group, _OF_GROUPS)
    a.do("bar.sync", barrier, 32 * bands * parts)
    a.do("bra DONE", when=others)
    for part in range(parts - 1):
        more = a.load_shared(2, mine, part * size)
        sums = [
            a.f32("add.f32", own, _bitcast(a, word)) for own, word in zip(sums, more, strict=True)
        ]
    return sums


def _store(a: Assembly, stream: Stream, place: _Place, slots: list[str], sums: list[str]) -> None:
    """Results of the slot that is `place.thread`, if there is one."""
    slot = slots[0]
    for index, each in enumerate(slots[1:], 1):
        slot = a.b32("selp.b32", each, slot, a.holds("eq.u32", place.thread, index))
    filled = a.holds("lt.s32", slot, stream.slots)
    output = a.b32("add.u32", "$6", place.row)
    if not stream.gated:
        index = a.b32("mad.lo.u32", slot, stream.outputs, output)
        address = a.b64("mad.wide.u32", index, 4, "$7")
        for row, total in zip((0, place.apart), sums, strict=True):
            a.do("st.global.f32", f"[{address}+{4 * row}]", total, when=filled)
        return
    rounded = a.register("b16")
    a.do("cvt.rn.bf16.f32", rounded, silu(a, *sums))
    index = a.b32("mad.lo.u32", slot, stream.outputs, _turned(a, output))
    address = a.b64("mad.wide.u32", index, 2, "$7")
    a.do("st.global.b16", f"[{address}]", rounded, when=filled)


def _turned(a: Assembly, column: str) -> str:
    """`stream.TURN.place_of` a column: its unit and its piece of 8 change places in a block."""
    unit, piece = a.b32("bfe.u32", column, 5, 2), a.b32("bfe.u32", column, 3, 2)
    rest = a.b32("and.b32", column, f"0x{0xFFFFFFFF & ~(BLOCK - 8):08X}")
    return a.b32("mad.lo.u32", unit, 8, a.b32("mad.lo.u32", piece, UNIT, rest))


def _bitcast(a: Assembly, word: str) -> str:
    return a.f32("mov.b32", word)
