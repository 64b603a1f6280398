"""How the work of the Triton kernel is cut for a shape and a device."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from .._compat import Target
from ..tuning import decide, varied

MOST_SPLITS = 128
TILE_BYTES = 64 * 1024
PROGRAMS_PER_CORE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        tile: tokens a step, a power of two.
        ahead: tiles of keys and values that are on their way while one is worked on.
        programs: about how many programs share the tokens of all sequences.
        splits: most programs that share one sequence and head, a power of two; how many they are
            is decided on the device, by the lengths.
        num_warps: warps a program.
    """

    tile: int
    ahead: int
    programs: int
    splits: int
    num_warps: int


def config_for(target: Target, q: Any, key_blocks: Any, block_table: Any) -> Config:
    """A configuration for these shapes on this device."""
    config = heuristic(target, q, key_blocks, block_table)

    def others() -> list[Config]:
        block_size = key_blocks.shape[2]
        near = varied(
            config,
            tile=(config.tile // 2, config.tile * 2),
            ahead=(config.ahead - 1, config.ahead + 1),
            splits=(config.splits // 2, config.splits * 2),
            num_warps=(4, 8),
        )
        longest = block_size if key_blocks.dtype.itemsize == 1 else max(block_size, 32)
        return [
            each
            for each in near
            if 16 <= each.tile <= longest
            and each.ahead >= 1
            and 1 <= each.splits <= MOST_SPLITS
            and shared_bytes(each, q, key_blocks) <= target.shared_memory
        ]

    key = _key(q, key_blocks, block_table)
    return decide("block_attention", target, key, config, others)


def heuristic(target: Target, q: Any, key_blocks: Any, block_table: Any) -> Config:
    """As many tokens a program as its share of shared memory holds, and programs for all cores."""
    batch, length, query_heads, width = q.shape
    _, kv_heads, block_size, _ = key_blocks.shape
    rows = rows_for(length * query_heads // kv_heads)
    wide, coded = q.dtype.itemsize > 2, key_blocks.dtype.itemsize == 1
    # Float32 queries make float32 of codes, and split that in registers.
    row_bytes = 2 * width * (q if wide else key_blocks).dtype.itemsize
    # Besides tiles, a program needs some room to exchange products between its warps.
    exchange = rows * width * (12 if wide else 2) + 4096
    room = target.shared_memory // PROGRAMS_PER_CORE - exchange
    fitting = max(16, min(TILE_BYTES, room) // row_bytes)
    # A tile of codes has one base, that of its block.
    tile = min(1 << (fitting.bit_length() - 1), block_size if coded else max(block_size, 32))
    ahead = max(1, min(3, room // (tile * row_bytes)))
    programs = PROGRAMS_PER_CORE * target.cores
    tiles = -(-block_table.shape[1] * block_size // tile)
    splits = max(1, min(2 * programs // (batch * kv_heads), tiles, MOST_SPLITS))
    return Config(
        tile,
        ahead,
        programs,
        1 << (splits.bit_length() - 1),
        8 if wide or rows > 32 else 4,
    )


def shared_bytes(config: Config, q: Any, key_blocks: Any) -> int:
    """Most shared memory of a program, for these queries and a pool of this dtype.

    Checked by compiling: queries, the tiles under way, and what the products exchange. Float32 ones
    take the room of both halves of queries, and of the tile that is worked on once more; codes, on
    compute capability 9.0, that of what they become.
    """
    _, length, query_heads, width = q.shape
    rows = rows_for(length * query_heads // key_blocks.shape[1])
    size, wide = q.dtype.itemsize, q.dtype.itemsize > 2
    # Each token has a scale for its key and one for its value, if it is coded.
    tiles = 2 * config.ahead * config.tile * (width * key_blocks.dtype.itemsize + 4)
    exchange = 2 * config.tile * width * size if wide else rows * config.tile * size
    if not wide and key_blocks.dtype.itemsize == 1:
        exchange += config.tile * width * size
    return rows * width * size * (2 if wide else 1) + tiles + exchange + 2048


def _key(q: Any, key_blocks: Any, block_table: Any) -> str:
    """What entries of `tuning_data` are found by.

    Room is the tokens that the table has, up to a power of two: caches are as long as prompt and
    generation ask for, and an entry for one length alone would hardly ever count. Over the same
    codes, queries of float32 take more shared memory than those of bfloat16.
    """
    batch, length, query_heads, width = q.shape
    _, kv_heads, block_size, _ = key_blocks.shape
    room = pl.next_power_of_2(block_table.shape[1] * block_size)
    return (
        f"batch={batch} new={length} heads={query_heads}/{kv_heads} width={width} "
        f"block={block_size} room={room} {q.dtype} {key_blocks.dtype}"
    )


def rows_for(used: int) -> int:
    """Rows of a program: the tensor cores want 16 at least."""
    return max(16, pl.next_power_of_2(used))
