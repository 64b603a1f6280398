"""Tensor cores that work beside the group of warps that decodes for them, in PTX: see `stream`."""

from __future__ import annotations

from ..assembly import Assembly, braces
from .stream import BLOCK, SLAB, SLAB_BYTES, TILE, Stream

# Inputs of one instruction.
_STEP = 16


class TensorCores:
    """Products of spans.

    Args:
        a: to which instructions are added.
        stream: see there.
        group: of warps, which the thread is of.
        x: shared address of the chunk's inputs.
    """

    def __init__(self, a: Assembly, stream: Stream, group: str, x: str):
        self._a, self._stream = a, stream
        self._slab = stream.own_rows * SLAB_BYTES
        of_block = BLOCK // SLAB * self._slab
        # As one number of a warp, so that descriptions are made once for all its threads.
        group = a.b32("shfl.sync.idx.b32", group, 0, 31, "0xffffffff")
        start = a.b32("mad.lo.u32", group, stream.blocks * of_block, x)
        # What describes inputs: where, in 16 bytes; 1,024 from eight rows to the next; 128 in a
        # row, whose pieces of 16 bytes are in another order in each of eight rows.
        self._lower = a.b32("lop3.b32", a.b32("shr.u32", start, 4), "0x00003FFF", 1 << 16, "0xEA")
        self._upper = a.b32("mov.b32", 1 << 30 | 1024 >> 4)
        self._sums = [a.registers("f32", 4 * stream.columns) for _ in range(2)]
        self._turn = 0
        zero = a.b32("mov.b32", 0)
        self._continues = [a.holds(f"{way}.u32", zero, 0) for way in ("ne", "eq")]

    def start(self, block: int, span: int, pairs: list[list[str]]) -> list[str]:
        """Begins with the sums of a span.

        Args:
            block: of the group's, in the chunk.
            span: of the block.
            pairs: of the span, of both of a thread's outputs.
        """
        a, sums = self._a, self._sums[self._turn]
        self._turn = 1 - self._turn
        steps = self._stream.span // _STEP
        a.do("wgmma.fence.sync.aligned")
        for step in range(steps):
            values = [of_row[2 * step + k] for k in (0, 1) for of_row in pairs]
            slab, within = divmod(span * self._stream.span + step * _STEP, SLAB)
            offset = (block * (BLOCK // SLAB) + slab) * self._slab + within * 2
            lower = a.b32("add.u32", self._lower, offset >> 4)
            inputs = a.b64("mov.b64", braces([lower, self._upper]))
            continues = self._continues[step > 0]
            shape = f"m{TILE}n{self._stream.own_rows}k{_STEP}"
            a.do(
                f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16",
                *map(braces, (sums, values)),
                *(inputs, continues, 1, 1, 0),
            )
        a.do("wgmma.commit_group.sync.aligned")
        return sums

    def wait(self, left: int) -> None:
        """Until no more than so many spans are under way."""
        self._a.do("wgmma.wait_group.sync.aligned", left)
