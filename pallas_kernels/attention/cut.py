"""How the work of the prefill kernels is cut for a shape and a device."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._compat import Target

MOST_SPLITS = 32
# Most rows and tokens a step in float32, by head dim: more would not fit into the registers, since
# each operand is held as two halves.
FLOAT32_TILES = {64: (64, 32), 128: (32, 32), 256: (64, 16)}


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
        rows: queries a program, a power of two.
        tile: tokens a step, a power of two.
        num_warps: warps a program.
        num_stages: tiles of keys and values in shared memory, the one in use included.
        splits: programs that share the tokens of one tile of queries.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    splits: int = 1

    def tiles(self, queries: int) -> int:
        """Tiles of rows that hold so many queries."""
        return -(-queries // self.rows)


def cut_for(
    target: Target, q: Any, kv_heads: int, *, most_tile: int = 128, context: int = 0
) -> Cut:
    """A cut for these shapes on this device.

    Args:
        target: the device.
        q: queries [B, T, N, H].
        kv_heads: K.
        most_tile: the longest tile.
        context: where programs may share the tokens of a tile of queries, the most there may be.
    """
    batch, length, heads, width = q.shape
    queries = length * heads // kv_heads
    wide = q.dtype.itemsize > 2
    if wide:
        rows, tile = FLOAT32_TILES[width]
    else:
        rows, tile = 128, 64 if width > 128 else 128
        idle = batch * kv_heads * -(-queries // rows) * 2 <= target.cores
        if queries <= 64 or (idle and not context):
            rows = 64
    tile = min(tile, most_tile)

    def fits(rows: int, tile: int, stages: int) -> bool:
        return shared_bytes(rows, tile, stages, width, wide) <= target.shared_memory

    while not fits(rows, tile, 2) and tile > 32:
        tile //= 2
    while not fits(rows, tile, 2) and rows > 16:
        rows //= 2
    if not (wide or target.spares_registers):
        tile = min(tile, 32)
    stages = 3 if not wide and fits(rows, tile, 3) else 2
    warps = 8 if wide or rows > 64 or not target.spares_registers else 4
    programs = batch * kv_heads * -(-queries // rows)
    splits = max(1, min(target.cores // programs, context // tile, MOST_SPLITS))
    return Cut(rows, tile, warps, stages, splits)


def shared_bytes(rows: int, tile: int, stages: int, width: int, wide: bool) -> int:
    """Most shared memory of a program.

    Checked by compiling: queries and the tiles under way, or the float32 result on its way out.
    Float32 queries take the room of both their halves.
    """
    under_way = (4 if wide else 2) * width * ((2 if wide else 1) * rows + 2 * stages * tile)
    return 256 + max(under_way, 4 * width * rows)
