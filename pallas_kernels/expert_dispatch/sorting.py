"""Slots sorted by expert and cut into tiles of one expert each, in two launches.

The first counts the experts of each block of slots. In the second each block knows from these
counts where its slots of every expert begin, and places them in their order; it also writes its
share of the list of tiles. Nothing is added to by two programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int

from .._compat import triton_call
from ..dequant_matmul.operands import iota, load

# Slots a program.
BLOCK = 512
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
    """

    slot: Int[Array, " S"]
    expert: Int[Array, " t"]
    first: Int[Array, " t"]
    rows: Int[Array, " t"]


def tile_count(slots: int, experts: int, rows: int) -> int:
    """Most tiles of so many rows that the slots can make."""
    return slots // rows + min(experts, slots)


def sort(ids: Int[Array, "M A"], experts: int, rows: int) -> Tiles:
    """Tiles of at most so many rows; ids outside 0..experts - 1 are left out."""
    slots = ids.size
    blocks, tiles = pl.cdiv(slots, BLOCK), tile_count(slots, experts, rows)
    flat = ids.reshape(slots)
    counts = _counts(flat, experts, blocks)
    whole = jax.ShapeDtypeStruct((slots,), jnp.int32)
    of_tile = jax.ShapeDtypeStruct((tiles,), jnp.int32)
    share = pl.cdiv(tiles, blocks)

    def kernel(ids_ref: Any, counts_ref: Any, slot_ref: Any, *tile_refs: Any) -> None:
        block = pl.program_id(0)
        all_slots, before = _sums(counts_ref, block, blocks)
        last = jnp.cumsum(all_slots, dtype=jnp.int32)
        _place(ids_ref, slot_ref, block * BLOCK, slots, experts, last - all_slots + before)
        _write_tiles(tile_refs, block * share, share, tiles, rows, all_slots, last)

    return Tiles(
        *triton_call(
            kernel,
            num_warps=WARPS,
            num_stages=1,
            name="expert_dispatch_sort",
            grid=(blocks,),
            out_shape=(whole, of_tile, of_tile, of_tile),
        )(flat, counts)
    )


def _counts(flat: Int[Array, " S"], experts: int, blocks: int) -> Int[Array, "b e"]:
    """Slots of each expert in each block; experts are filled up to a power of two."""
    wide = _power_of_two(experts)
    chunk = _chunk(wide)

    def kernel(ids_ref: Any, counts_ref: Any) -> None:
        block = pl.program_id(0)
        counts = jnp.zeros((chunk, wide), jnp.int32)
        for start in range(0, BLOCK, chunk):
            index = block * BLOCK + start + iota((chunk, 1), 0)
            expert = _experts(ids_ref, index, flat.size, experts)
            counts += (expert == iota((chunk, wide), 1)).astype(jnp.int32)
        row = jnp.full((wide,), block, jnp.int32)
        plt.store(counts_ref.at[row, jax.lax.iota(jnp.int32, wide)], jnp.sum(counts, axis=0))

    return triton_call(
        kernel,
        num_warps=WARPS,
        num_stages=1,
        name="expert_dispatch_count",
        grid=(blocks,),
        out_shape=jax.ShapeDtypeStruct((blocks, wide), jnp.int32),
    )(flat)


def _experts(ids_ref: Any, index: Int[Array, "..."], slots: int, experts: int) -> Int[Array, "..."]:
    """Experts of slots; -1 for empty ones and behind the last."""
    ids = plt.load(ids_ref.at[index], mask=index < slots, other=-1)
    filled = (ids >= 0) & (ids < experts)
    return jnp.where(filled, ids, -1).astype(jnp.int32)


def _sums(counts_ref: Any, block: Any, blocks: int) -> tuple[Int[Array, " e"], Int[Array, " e"]]:
    """For each expert: slots of all blocks, and of those before this one."""
    wide = counts_ref.shape[1]
    size = min(_chunk(wide), _power_of_two(blocks)), wide

    def add(step: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        row = step * size[0] + iota(size, 0)
        counts = load(counts_ref, row, iota(size, 1), mask=row < blocks)
        return sums[0] + counts, sums[1] + jnp.where(row < block, counts, 0)

    nothing = jnp.zeros(size, jnp.int32)
    sums = jax.lax.fori_loop(0, pl.cdiv(blocks, size[0]), add, (nothing, nothing))
    return jnp.sum(sums[0], axis=0), jnp.sum(sums[1], axis=0)


def _place(
    ids_ref: Any, slot_ref: Any, first: Any, slots: int, experts: int, place: Int[Array, " e"]
) -> None:
    """Write the slots of a block where they belong.

    Args:
        ids_ref: experts of all slots.
        slot_ref: slots by place.
        first: slot of the block.
        slots: number of all.
        experts: E.
        place: of the block's first slot of each expert.
    """
    (wide,) = place.shape
    chunk = _chunk(wide)

    def step(index: Any, place: Array) -> Array:
        start = first + index * chunk
        slot, other = start + iota((chunk, 1), 0), start + iota((1, chunk), 1)
        expert = _experts(ids_ref, slot, slots, experts)
        others = _experts(ids_ref, other, slots, experts)
        rank = jnp.sum(((expert == others) & (other < slot)).astype(jnp.int32), axis=1)
        own = expert == iota((chunk, wide), 1)
        at = jnp.sum(jnp.where(own, place[None, :], 0), axis=1) + rank
        filled = jnp.sum(own.astype(jnp.int32), axis=1) > 0
        plt.store(
            slot_ref.at[jnp.where(filled, at, slots)],
            start + jax.lax.iota(jnp.int32, chunk),
            mask=filled,
        )
        return place + jnp.sum(own.astype(jnp.int32), axis=0)

    jax.lax.fori_loop(0, BLOCK // chunk, step, place)


def _write_tiles(
    refs: tuple[Any, ...],
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
    chunk = min(_chunk(wide), _power_of_two(share))
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
    """Slots that are compared with so many experts at once."""
    return max(16, min(64, AT_ONCE // wide))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
