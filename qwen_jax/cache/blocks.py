"""Blocks of keys and values, and the table that says which blocks hold which sequence.

Block 0 is scratch: it belongs to nobody, and an unused table entry points at it. All functions are
pure and work under jit. Blocks are counted by reference, so sequences may share them; a block is
free when the last sequence that holds it lets go.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.block_attention import BlockScales

from ..pytree import pytree

SCRATCH = 0


@pytree
class BlockTable:
    """Who owns which block; shared by all attention layers, since they all hold the same tokens.

    Attributes:
        table: int32 [B, W], blocks of each sequence in order; 0 (scratch) where there is none.
        length: int32 [B], tokens in the cache.
        references: int32 [P], sequences that hold each block; the scratch block has 1 for ever.
        free: int32 [P], a stack of free blocks of which the first `num_free` entries count.
        num_free: int32 [].
        overflow: bool [B], set when a sequence could not get its blocks. It stays set, and the
            sequence takes no more tokens, until the row is released. Drivers raise `CacheFullError`
            on it.
    """

    table: Array
    length: Array
    references: Array
    free: Array
    num_free: Array
    overflow: Array


@pytree
class KVBlocks:
    """The pool of one attention layer; `pallas_kernels.attention_inputs` writes new tokens to it.

    Attributes:
        key: [P, K, Z, H], rotated keys; the tokens of one block and head are contiguous. In the
            model's dtype, or int8 codes.
        value: [P, K, Z, H], likewise.
        scales: what the codes stand for; None unless int8.
    """

    key: Array
    value: Array
    scales: BlockScales | None = None


def empty_blocks(batch: int, blocks_per_sequence: int, num_blocks: int) -> BlockTable:
    """A table without sequences over a pool of `num_blocks` blocks, scratch included."""
    return BlockTable(
        table=jnp.zeros((batch, blocks_per_sequence), jnp.int32),
        length=jnp.zeros((batch,), jnp.int32),
        references=jnp.zeros((num_blocks,), jnp.int32).at[SCRATCH].set(1),
        free=(num_blocks - 1 - jnp.arange(num_blocks, dtype=jnp.int32)),
        num_free=jnp.asarray(num_blocks - 1, jnp.int32),
        overflow=jnp.zeros((batch,), jnp.bool_),
    )


def empty_pool(shape: tuple[int, int, int, int], dtype: str, *, int8: bool) -> KVBlocks:
    """A pool [P, K, Z, H] of zeros, in this dtype or as int8 codes of it."""
    if not int8:
        return KVBlocks(jnp.zeros(shape, jnp.dtype(dtype)), jnp.zeros(shape, jnp.dtype(dtype)))
    blocks, heads, _, width = shape
    scales = BlockScales(
        jnp.zeros(shape[:3], jnp.float32),
        jnp.zeros(shape[:3], jnp.float32),
        jnp.zeros((blocks, heads, width), jnp.dtype(dtype)),
    )
    return KVBlocks(jnp.zeros(shape, jnp.int8), jnp.zeros(shape, jnp.int8), scales)


def allocate(blocks: BlockTable, new_tokens: Int[Array, " B"], block_size: int) -> BlockTable:
    """Reserve blocks for `new_tokens` more tokens of each sequence.

    A sequence gets all it needs or nothing. Free blocks are granted in row order: when they run
    out, the row that does not fit and the rows behind it that need blocks in the same call are
    flagged in `overflow`; rows that need none go on.

    Args:
        blocks: the table before.
        new_tokens: tokens about to be appended; lengths themselves do not change here.
        block_size: tokens a block, Z.
    """
    owned = jnp.sum(blocks.table != SCRATCH, axis=1, dtype=jnp.int32)
    # Compared with the room, since the sum with the length could pass the largest int32.
    too_long = new_tokens > blocks.table.shape[1] * block_size - blocks.length
    total = blocks.length + new_tokens
    need = jnp.maximum((total + block_size - 1) // block_size - owned, 0)
    need = jnp.where(blocks.overflow | too_long, 0, need)
    none_left = (need > 0) & (jnp.cumsum(need, dtype=jnp.int32) > blocks.num_free)
    granted = jnp.where(none_left, 0, need)
    table, taken = _hand_out(blocks, owned, granted)
    return dataclasses.replace(
        blocks,
        table=table,
        references=blocks.references.at[taken].set(1, mode="drop"),
        num_free=blocks.num_free - jnp.sum(granted, dtype=jnp.int32),
        overflow=blocks.overflow | too_long | none_left,
    )


def _hand_out(
    blocks: BlockTable, owned: Int[Array, " B"], granted: Int[Array, " B"]
) -> tuple[Int[Array, "B W"], Int[Array, "B W"]]:
    """Blocks from the top of the stack into the table.

    Also returns those blocks alone, with P (out of range) at untouched entries.
    """
    entry = jnp.arange(blocks.table.shape[1], dtype=jnp.int32)[None, :] - owned[:, None]
    new = (entry >= 0) & (entry < granted[:, None])
    before = jnp.cumsum(granted, dtype=jnp.int32) - granted
    depth = jnp.where(new, before[:, None] + entry, 0)
    block = blocks.free.at[blocks.num_free - 1 - depth].get(mode="clip")
    return jnp.where(new, block, blocks.table), jnp.where(new, block, blocks.free.shape[0])


def count_references(
    table: Int[Array, "B W"], rows: Bool[Array, " B"], num_blocks: int
) -> Int[Array, " P"]:
    """How often each block stands in the given rows; scratch is not counted."""
    held = rows[:, None] & (table != SCRATCH)
    where = jnp.where(held, table, num_blocks)
    return jnp.zeros((num_blocks,), jnp.int32).at[where].add(1, mode="drop")


def drop_rows(blocks: BlockTable, rows: Bool[Array, " B"]) -> BlockTable:
    """Let go of the rows' blocks; those that nobody holds any more go back on the free stack."""
    num_blocks = blocks.free.shape[0]
    references = blocks.references - count_references(blocks.table, rows, num_blocks)
    freed = (references == 0) & (blocks.references > 0)
    place = jnp.where(freed, blocks.num_free + jnp.cumsum(freed, dtype=jnp.int32) - 1, num_blocks)
    return BlockTable(
        table=jnp.where(rows[:, None], SCRATCH, blocks.table),
        length=jnp.where(rows, 0, blocks.length),
        references=references,
        free=blocks.free.at[place].set(jnp.arange(num_blocks, dtype=jnp.int32), mode="drop"),
        num_free=blocks.num_free + jnp.sum(freed, dtype=jnp.int32),
        overflow=blocks.overflow & ~rows,
    )
