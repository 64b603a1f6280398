"""Tensor cores that work beside the group of warps that decodes for them, in PTX: see `stream`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ..assembly import Assembly, braces
from .layout import UNIT
from .pairs_assembly import Decoder

# Outputs of an instruction. Rows of inputs are its columns, eight together.
TILE, COLUMNS = 64, 8
WARPS = 4  # of a group
# Inputs whose words a thread reads together: four units, 16 bytes of each of their words.
BLOCK = 4 * UNIT
# Inputs of a row that lie together, in as many bytes as the tensor cores' order repeats in.
SLAB, SLAB_BYTES = 64, 128
# Inputs of one instruction.
_STEP = 16


class TensorCores:
    """Products that are under way while threads go on.

    Args:
        a: to which instructions are added.
        rows: of inputs, a multiple of `COLUMNS`.
        inputs: shared address of the group's first block, alike in all its threads. Eight rows of
            a slab are 1,024 bytes, in which pieces of 16 bytes have another place in each row.
        used: of the rows, the first so many; all if None.
    """

    def __init__(self, a: Assembly, rows: int, inputs: str, used: int | None = None):
        self._a, self._rows = a, rows
        self._used = rows if used is None else used
        # What describes inputs: where, in 16 bytes; 1,024 from eight rows to the next; 128 in a
        # row, whose pieces of 16 bytes are in another order in each of eight rows.
        self._lower = a.b32("lop3.b32", a.b32("shr.u32", inputs, 4), "0x00003FFF", 1 << 16, "0xEA")
        self._upper = a.b32("mov.b32", 1 << 30 | 1024 >> 4)
        zero = a.b32("mov.b32", 0)
        self._continues = [a.holds(f"{way}.u32", zero, 0) for way in ("ne", "eq")]

    @property
    def sums(self) -> int:
        """How many a thread has."""
        return self._used // 2

    def start(self, sums: list[str], first: int, pairs: list[list[str]], *, anew: bool) -> None:
        """Begins with products of some inputs.

        Args:
            sums: registers of float32.
            first: of the inputs.
            pairs: of them, of both of a thread's outputs.
            anew: whether sums begin with these.
        """
        a = self._a
        a.do("wgmma.fence.sync.aligned")
        for step in range(len(pairs[0]) // 2):
            values = [of_row[2 * step + k] for k in (0, 1) for of_row in pairs]
            slab, within = divmod(first + step * _STEP, SLAB)
            offset = slab * self._rows * SLAB_BYTES + within * 2
            lower = a.b32("add.u32", self._lower, offset >> 4)
            described = a.b64("mov.b64", braces([lower, self._upper]))
            shape = f"m{TILE}n{self._used}k{_STEP}"
            a.do(
                f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16",
                *map(braces, (sums, values)),
                *(described, self._continues[step > 0 or not anew], 1, 1, 0),
            )
        a.do("wgmma.commit_group.sync.aligned")

    def wait(self, left: int) -> None:
        """Until no more than so many products that were begun are under way."""
        self._a.do("wgmma.wait_group.sync.aligned", left)


def of_warps(a: Assembly, number: str) -> str:
    """A number that is alike in a warp, so that the compiler knows it."""
    return a.b32("shfl.sync.idx.b32", number, 0, 31, "0xffffffff")


def multiplied(
    a: Assembly,
    cores: TensorCores,
    span: int,
    decoder: Decoder,
    blocks: Sequence[Callable[[], tuple[list[list[list[str]]], list[list[str]]]]],
    totals: list[str],
) -> list[str]:
    """Sums so far with those of some blocks; while tensor cores have a span, the next is decoded.

    Args:
        a: to which instructions are added.
        cores: that multiply.
        span: inputs that are summed before they meet a scale.
        decoder: of codes.
        blocks: each gives words of units, of both of a thread's outputs; and the scales of each
            span, of four sums: of the first output with an even row and with an odd one, and of
            the second.
        totals: so far.
    """
    both = [a.registers("f32", cores.sums) for _ in range(2)]
    before: tuple[list[str], list[str]] | None = None
    for block, read in enumerate(blocks):
        units, scales = read()
        decoded = [(pair for unit in of_row for pair in decoder.pairs(unit)) for of_row in units]
        for first, numbers in zip(range(0, BLOCK, span), scales, strict=True):
            pairs = [list(itertools.islice(of_row, span // 8)) for of_row in decoded]
            sums, other = both
            both = [other, sums]
            cores.start(sums, block * BLOCK + first, pairs, anew=True)
            if before is not None:
                cores.wait(1)
                totals = _added(a, totals, *before)
            before = sums, numbers
    assert before is not None
    cores.wait(0)
    return _added(a, totals, *before)


def _added(a: Assembly, totals: list[str], sums: list[str], numbers: list[str]) -> list[str]:
    """Totals with a span's sums times scales."""
    return [
        a.f32("fma.rn.f32", each, numbers[index % 4], total)
        for index, (each, total) in enumerate(zip(sums, totals, strict=True))
    ]
