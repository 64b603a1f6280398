"""The cache of a whole model: one block table, and one entry a layer."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..config import QwenConfig
from ..errors import RequestError
from ..pytree import pytree
from ..whole_number import check_whole
from .blocks import (
    SCRATCH,
    BlockTable,
    KVBlocks,
    count_references,
    drop_rows,
    empty_blocks,
    empty_pool,
)
from .recurrent import RecurrentState, copy_rows, empty_recurrent

LayerCache = KVBlocks | RecurrentState

BLOCK_SIZE = 64
INT8 = "int8"


@pytree
class Cache:
    """Everything that a model remembers of B sequences.

    Pass it on, donate it, never read an old one again.

    Attributes:
        blocks: lengths, block table and free blocks.
        layers: per layer a `KVBlocks` (attention) or a `RecurrentState` (gated delta net).
        block_size: tokens a block, Z.
    """

    blocks: BlockTable
    layers: tuple[LayerCache, ...]
    block_size: int = dataclasses.field(metadata={"static": True})

    @property
    def length(self) -> Array:
        """int32 [B], tokens of each sequence in the cache."""
        return self.blocks.length

    @property
    def overflow(self) -> Array:
        """Bool [B], True where a sequence found no free block; it has taken no token since."""
        return self.blocks.overflow


def init_cache(
    config: QwenConfig,
    batch_size: int,
    max_length: int,
    *,
    block_size: int = BLOCK_SIZE,
    num_blocks: int | None = None,
    kv_cache_dtype: str | None = None,
) -> Cache:
    """An empty cache.

    Args:
        config: the model's.
        batch_size: rows, B.
        max_length: most tokens, prompt and generation together, of one sequence.
        block_size: tokens a block, Z.
        num_blocks: blocks in the pool that sequences share; enough for every row at `max_length`
            if None. One scratch block comes on top.
        kv_cache_dtype: "int8" keeps keys and values as int8 codes with a scale a token and head, in
            about half the memory; None keeps them in the model's dtype.

    Raises:
        RequestError: a size that is not a whole number, or below 1, or another `kv_cache_dtype`.
    """
    check_kv_cache_dtype(kv_cache_dtype)
    per_sequence = -(-max_length // block_size) if block_size > 0 else 0
    num_blocks = batch_size * per_sequence if num_blocks is None else num_blocks
    sizes = {
        "batch_size": batch_size,
        "max_length": max_length,
        "block_size": block_size,
        "num_blocks": num_blocks,
    }
    for name, size in sizes.items():
        check_whole(f"init_cache: {name}", size, 1)
    pool = (num_blocks + 1, config.num_key_value_heads, block_size, config.head_dim)

    def layer(kind: str) -> LayerCache:
        if kind == "linear_attention":
            return empty_recurrent(config, batch_size)
        return empty_pool(pool, config.dtype, int8=kv_cache_dtype == INT8)

    return Cache(
        empty_blocks(batch_size, per_sequence, num_blocks + 1),
        tuple(layer(kind) for kind in config.layer_types),
        block_size,
    )


def check_kv_cache_dtype(value: str | None) -> None:
    """Raise `RequestError` unless `init_cache` takes this `kv_cache_dtype`."""
    if value not in (None, INT8):
        raise RequestError(
            f"kv_cache_dtype is {value!r}; accepted are {INT8!r}, and None for the model's own"
        )


def release(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    """Empty the given rows, and lift their overflow flags.

    Blocks that no other row holds become free.

    Args:
        cache: the cache.
        rows: True at the rows to empty.

    Raises:
        RequestError: `rows` is no mask of the cache's rows, but numbers of rows, say.
    """
    if rows.dtype != jnp.bool_ or rows.shape != cache.length.shape:
        raise RequestError(
            f"release: rows has shape {rows.shape} and dtype {rows.dtype}; accepted is a bool mask "
            f"of shape {cache.length.shape}"
        )
    return dataclasses.replace(cache, blocks=drop_rows(cache.blocks, rows))


def fork(cache: Cache, source: Int[Array, " B"]) -> Cache:
    """Row b becomes a copy of what row source[b] was before the call.

    A row stays as it is if source[b] is b or no row at all (outside 0..B-1). Full blocks are
    shared, and only a partly filled last block and the recurrent state are copied. What an
    overwritten row held before is released. A row for which no block is free for the copy ends
    empty, with its overflow flag set.

    Raises:
        RequestError: `source` does not have one entry a row.
    """
    if source.shape != cache.length.shape:
        raise RequestError(
            f"fork: source has shape {source.shape}; accepted is {cache.length.shape}, the row to "
            "copy for each row"
        )
    rows = jnp.arange(source.shape[0], dtype=jnp.int32)
    source = jnp.where((source >= 0) & (source < source.shape[0]), source, rows)
    blocks, last, copy = _fork_table(cache.blocks, source, cache.block_size)

    def layer(entry: LayerCache) -> LayerCache:
        if isinstance(entry, RecurrentState):
            return copy_rows(entry, source)
        # With int8, a copied block takes its scales and its base along.
        return jax.tree.map(lambda pool: pool.at[copy].set(pool[last]), entry)

    layers = tuple(layer(entry) for entry in cache.layers)
    return dataclasses.replace(cache, blocks=blocks, layers=layers)


def _fork_table(
    blocks: BlockTable, source: Int[Array, " B"], block_size: int
) -> tuple[BlockTable, Int[Array, " B"], Int[Array, " B"]]:
    """The table after a fork, and per row the block to copy and the block to copy it to.

    Both are scratch in a row that copies none.
    """
    rows, num_blocks = jnp.arange(source.shape[0], dtype=jnp.int32), blocks.free.shape[0]
    changed = source != rows
    length, table = blocks.length[source], blocks.table[source]
    partial = changed & (length % block_size != 0)
    entry = jnp.maximum(length - 1, 0) // block_size
    last = jnp.where(partial, jnp.take_along_axis(table, entry[:, None], axis=1)[:, 0], SCRATCH)

    # A block beyond the last token, reserved but not yet written, stays with its first owner.
    used = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :] < (length // block_size)[:, None]
    shared = jnp.where(used, table, SCRATCH)
    gained = count_references(shared, changed, num_blocks)
    held = dataclasses.replace(blocks, references=blocks.references + gained)
    after = drop_rows(held, changed)

    rank = jnp.cumsum(partial, dtype=jnp.int32) - 1
    granted = partial & (rank < after.num_free)
    copy = after.free.at[after.num_free - 1 - rank].get(mode="clip")
    copy = jnp.where(granted, copy, SCRATCH)
    failed = partial & ~granted
    column = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :] == entry[:, None]
    shared = jnp.where(column & granted[:, None], copy[:, None], shared)
    taken = jnp.where(granted, copy, num_blocks)
    forked = dataclasses.replace(
        after,
        table=jnp.where(changed[:, None], shared, after.table),
        length=jnp.where(changed, length, after.length),
        references=after.references.at[taken].set(1, mode="drop"),
        num_free=after.num_free - jnp.sum(granted, dtype=jnp.int32),
        overflow=jnp.where(changed, blocks.overflow[source], after.overflow),
    )
    forked = drop_rows(forked, failed)
    overflow = forked.overflow | failed
    return dataclasses.replace(forked, overflow=overflow), jnp.where(granted, last, SCRATCH), copy
