"""Slots sorted by expert and cut into tiles of one expert each, in three launches.

The first counts the experts of each block of slots, and ranks each slot among those of its expert
and block. The second sums the counts: where each block's slots of each expert begin, and the list
of tiles. The third places the slots. Nothing is added to by two programs, and no program waits for
more than a few steps of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Int

from .._compat import triton_call
from ..dequant_matmul.operands import iota, load

# Slots a program: few while there are few programs, and no more than are compared with each other.
SMALLEST_BLOCK, LARGEST_BLOCK = 128, 512
BLOCKS = 128
# Numbers that a program compares at once.
AT_ONCE = 8192
WARPS = 8


class Tiles(NamedTuple):
    """Slots by expert, and tiles of them.

    Slots of an expert lie one behind the other, each expert's behind those of the one before. What
    is behind all filled slots is undefined.

    Attributes:
        slot: which slot is at each place.
        expert: of each tile; 0 for those that are left over.
        first: place of the tile's first slot.
        rows: how many places a tile has, from the first on; 0 for those that are left over.
        total: of tiles that are not left over.
    """

    slot: Int[Array, " S"]
    expert: Int[Array, " t"]
    first: Int[Array, " t"]
    rows: Int[Array, " t"]
    total: Int[Array, "1"]


def tile_count(slots: int, experts: int, rows: int) -> int:
    """Most tiles of so many rows that the slots can make."""
    return slots // rows + min(experts, slots)


def sort(ids: Int[Array, "M A"], experts: int, rows: int) -> Tiles:
    """Tiles of at most so many rows; ids outside 0..experts - 1 are left out."""
    flat = ids.reshape(ids.size)
    block = block_size(flat.size)
    counts, rank = _counts(flat, experts, block)
    begin, *tiles = _sums(counts, flat.size, experts, rows)
    return Tiles(_placed(flat, begin, rank, experts, block), *tiles)


def block_size(slots: int) -> int:
    """Slots a program."""
    return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, pl.next_power_of_2(pl.cdiv(slots, BLOCKS))))


def _counts(
    flat: Int[Array, " S"], experts: int, block: int
) -> tuple[Int[Array, "b e"], Int[Array, " S"]]:
    """Slots of each expert in each block, and how many of them are before each slot.

    Experts are filled up to a power of two.
    """
    slots, wide = flat.size, pl.next_power_of_2(experts)
    chunk = max(1, min(block, AT_ONCE // max(wide, block)))

    def kernel(ids_ref: Any, counts_ref: Any, rank_ref: Any) -> None:
        first = pl.program_id(0) * block
        own = first + iota((block, 1), 0)
        expert, _ = _experts(ids_ref, own, slots, experts)

        def step(index: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            start = first + index * chunk
            one, _ = _experts(ids_ref, start + iota((chunk, 1), 0), slots, experts)
            counts = sums[0] + (one == iota((chunk, wide), 1)).astype(jnp.int32)
            slot = start + iota((1, chunk), 1)
            other, _ = _experts(ids_ref, slot, slots, experts)
            before = (expert == other) & (slot < own)
            return counts, sums[1] + before.astype(jnp.int32)

        nothing = jnp.zeros((chunk, wide), jnp.int32), jnp.zeros((block, chunk), jnp.int32)
        counts, before = jax.lax.fori_loop(0, block // chunk, step, nothing)
        row = jnp.full((wide,), pl.program_id(0), jnp.int32)
        plt.store(counts_ref.at[row, jax.lax.iota(jnp.int32, wide)], jnp.sum(counts, axis=0))
        slot = first + jax.lax.iota(jnp.int32, block)
        plt.store(rank_ref.at[slot], jnp.sum(before, axis=1), mask=slot < slots)

    blocks = pl.cdiv(slots, block)
    return triton_call(
        kernel,
        num_warps=WARPS,
        num_stages=1,
        name="expert_dispatch_count",
        grid=(blocks,),
        out_shape=(
            jax.ShapeDtypeStruct((blocks, wide), jnp.int32),
            jax.ShapeDtypeStruct((slots,), jnp.int32),
        ),
    )(flat)


def _sums(
    counts: Int[Array, "b e"], slots: int, experts: int, rows: int
) -> tuple[Int[Array, "..."], ...]:
    """Places of each block's first slot of each expert [b, e]; then what `Tiles` has of tiles."""
    blocks, wide = counts.shape
    tiles = tile_count(slots, experts, rows)
    share = pl.cdiv(tiles, blocks)

    def kernel(counts_ref: Any, begin_ref: Any, *refs: Any) -> None:
        block = pl.program_id(0)
        *tile_refs, total_ref = refs
        all_slots, before = _all_and_before(counts_ref, block, blocks)
        last = jnp.cumsum(all_slots, dtype=jnp.int32)
        row = jnp.full((wide,), block, jnp.int32)
        begin = last - all_slots + before
        plt.store(begin_ref.at[row, jax.lax.iota(jnp.int32, wide)], begin)
        _write_tiles(tile_refs, block * share, share, tiles, rows, all_slots, last)

        @pl.when(block == 0)
        def _() -> None:
            total_ref[0] = jnp.sum((all_slots + (rows - 1)) // rows)

    of_tile = jax.ShapeDtypeStruct((tiles,), jnp.int32)
    return triton_call(
        kernel,
        num_warps=WARPS,
        num_stages=1,
        name="expert_dispatch_tiles",
        grid=(blocks,),
        out_shape=(
            jax.ShapeDtypeStruct((blocks, wide), jnp.int32),
            *(of_tile, of_tile, of_tile),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ),
    )(counts)


def _placed(
    flat: Int[Array, " S"],
    begin: Int[Array, "b e"],
    rank: Int[Array, " S"],
    experts: int,
    block: int,
) -> Int[Array, " S"]:
    """Slots by place.

    Args:
        flat: experts of slots.
        begin: places of each block's first slot of each expert.
        rank: of each slot among those of its block and expert.
        experts: E.
        block: slots of a block.
    """
    slots = flat.size

    def kernel(ids_ref: Any, begin_ref: Any, rank_ref: Any, slot_ref: Any) -> None:
        slot = pl.program_id(0) * SMALLEST_BLOCK + jax.lax.iota(jnp.int32, SMALLEST_BLOCK)
        expert, filled = _experts(ids_ref, slot, slots, experts)
        row = jax.lax.div(slot, jnp.int32(block))
        place = load(begin_ref, row, expert, mask=filled) + load(rank_ref, slot, mask=filled)
        # What is not stored needs an index of its own: the interpreter writes what was there.
        plt.store(slot_ref.at[jnp.where(filled, place, slots)], slot, mask=filled)

    return triton_call(
        kernel,
        num_warps=SMALLEST_BLOCK // 32,
        num_stages=1,
        name="expert_dispatch_place",
        grid=(pl.cdiv(slots, SMALLEST_BLOCK),),
        out_shape=jax.ShapeDtypeStruct((slots,), jnp.int32),
    )(flat, begin, rank)


def _experts(
    ids_ref: Any, slot: Int[Array, "..."], slots: int, experts: int
) -> tuple[Int[Array, "..."], Bool[Array, "..."]]:
    """Experts of slots, -1 for empty ones and behind the last; and which are not."""
    ids = plt.load(ids_ref.at[slot], mask=slot < slots, other=-1)
    filled = (ids >= 0) & (ids < experts)
    return jnp.where(filled, ids, -1).astype(jnp.int32), filled


def _all_and_before(
    counts_ref: Any, block: Any, blocks: int
) -> tuple[Int[Array, " e"], Int[Array, " e"]]:
    """For each expert: slots of all blocks, and of those before this one."""
    wide = counts_ref.shape[1]
    size = min(_chunk(wide), pl.next_power_of_2(blocks)), wide

    def add(step: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        row = step * size[0] + iota(size, 0)
        counts = load(counts_ref, row, iota(size, 1), mask=row < blocks)
        return sums[0] + counts, sums[1] + jnp.where(row < block, counts, 0)

    nothing = jnp.zeros(size, jnp.int32)
    sums = jax.lax.fori_loop(0, pl.cdiv(blocks, size[0]), add, (nothing, nothing))
    return jnp.sum(sums[0], axis=0), jnp.sum(sums[1], axis=0)


def _write_tiles(
    refs: Sequence[Any],
    first: Any,
    share: int,
    tiles: int,
    rows: int,
    counts: Int[Array, " e"],
    last: Int[Array, " e"],
) -> None:
    """Write a share of the tiles.

    Args:
        refs: of experts, first places and rows.
        first: tile of the share.
        share: number of them.
        tiles: number of all.
        rows: most of a tile.
        counts: slots of each expert.
        last: sums of them.
    """
    (wide,) = counts.shape
    chunk = min(_chunk(wide), pl.next_power_of_2(share))
    own = (counts + (rows - 1)) // rows
    last_tile = jnp.cumsum(own, dtype=jnp.int32)

    def step(index: Any, nothing: Any) -> Any:
        offset = index * chunk + jax.lax.iota(jnp.int32, chunk)
        tile = first + offset
        behind = jnp.broadcast_to(tile[:, None], (chunk, wide)) - (last_tile - own)[None, :]
        chosen = (behind >= 0) & (behind < own[None, :])

        def of_expert(x: Array) -> Array:
            return jnp.sum(jnp.where(chosen, x, 0), axis=1)

        inside = (offset < share) & (tile < tiles)
        done = behind * rows
        numbers = (
            of_expert(iota((chunk, wide), 1)),
            of_expert((last - counts)[None, :] + done),
            of_expert(jnp.minimum(counts[None, :] - done, rows)),
        )
        for ref, number in zip(refs, numbers, strict=True):
            plt.store(ref.at[tile], number, mask=inside)
        return nothing

    jax.lax.fori_loop(0, pl.cdiv(share, chunk), step, jnp.int32(0))


def _chunk(wide: int) -> int:
    """Rows that are compared with so many experts at once."""
    return max(16, min(64, AT_ONCE // wide))
