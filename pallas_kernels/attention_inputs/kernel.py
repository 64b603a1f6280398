"""The body of the Triton kernel: some tokens of one head.

Programs with a number below N take a query head, the others a key head with its values.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from ..attention.rows import load_rows, store_rows
from ..attention.scales import quantise


class Refs(NamedTuple):
    """Arrays of the kernel as matrices of rows; None where the call has none, or writes none.

    Letters: tokens are all B * T, `key` and `value` the pool, or what is returned without one.
    """

    q: Any  # [BTN, H or 2 H]
    k: Any  # [BTK, H]
    v: Any
    cos: Any  # [BT, R / 2]
    sin: Any
    q_weight: Any  # [H]
    k_weight: Any
    table: Any  # [B, W]
    positions: Any  # [BT]
    key: Any  # [PKZ, H]
    value: Any
    key_scale: Any  # [PKZ]
    value_scale: Any
    key_base: Any  # [PK, H]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes of a call: B * T, T, N, K, H, R / 2, P, Z, W."""

    tokens: int
    length: int
    query_heads: int
    kv_heads: int
    width: int
    half: int
    blocks: int
    block_size: int
    columns: int
    eps: float
    zero_centred: bool
    tile: int

    @property
    def slots(self) -> int:
        """Programs that share the same tokens, N + K."""
        return self.query_heads + self.kv_heads


class _Places(NamedTuple):
    """Where a program's tokens go.

    Attributes:
        written: whether they go anywhere.
        block: row of the bases that belongs to the token's block.
        row: row of the pool. Tokens that are not written get rows of the scratch block, since the
            interpreter writes old values back there.
        offset: place in the block.
    """

    written: Bool[Array, " t"]
    block: Int[Array, " t"]
    row: Int[Array, " t"]
    offset: Int[Array, " t"]


def work(shape: Shape, read: Refs, written: Refs) -> None:
    """One program. What it reads from pools, no other program of the launch writes."""
    program = pl.program_id(0)
    slot = program % shape.slots
    token = program // shape.slots * shape.tile + jnp.arange(shape.tile, dtype=jnp.int32)
    exists = token < shape.tokens

    @pl.when(slot < shape.query_heads)
    def _() -> None:
        row = token * shape.query_heads + slot
        turned = _prepared(shape, read, read.q, read.q_weight, row, token, exists)
        store_rows(written.q, row, exists, turned)

    @pl.when(slot >= shape.query_heads)
    def _() -> None:
        head = slot - shape.query_heads
        # Loads are issued in this order: places of tokens wait for positions, and nothing else
        # should wait with them.
        at = None
        if read.positions is not None:
            at = plt.load(read.positions.at[token], mask=exists, other=-1)
        row = token * shape.kv_heads + head
        value = load_rows(read.v, row, exists)
        key = _prepared(shape, read, read.k, read.k_weight, row, token, exists)
        if at is None:
            store_rows(written.key, row, exists, key)
            store_rows(written.value, row, exists, value)
            return
        places = _places(shape, read, token, at, head)
        if read.key_base is None:
            store_rows(written.key, places.row, places.written, key)
            store_rows(written.value, places.row, places.written, value)
        else:
            base = _base(shape, read, places, token, at, head)
            _store_codes(written, places, key, value, base)


def _prepared(
    shape: Shape,
    read: Refs,
    ref: Any,
    weight_ref: Any,
    row: Int[Array, " t"],
    token: Int[Array, " t"],
    wanted: Bool[Array, " t"],
) -> Float[Array, "t H"]:
    """Rows of projections, normalised and rotated in float32; zero where not wanted."""
    half, dtype = shape.half, ref.dtype
    column = jnp.arange(shape.width, dtype=jnp.int32)
    turns, ahead = column < 2 * half, column < half
    partner = jnp.where(ahead, column + half, jnp.where(turns, column - half, column))
    x = load_rows(ref, row, wanted, column).astype(jnp.float32)
    # Values cannot be shuffled in a kernel, so those of the other half are loaded once more.
    other = load_rows(ref, row, wanted, partner, turns).astype(jnp.float32)
    angle = jnp.where(ahead, column, jnp.where(turns, column - half, 0))
    cos = load_rows(read.cos, token, wanted, angle, turns, otherwise=1)
    sin = load_rows(read.sin, token, wanted, angle, turns)
    if weight_ref is not None:
        factor = jax.lax.rsqrt(jnp.sum(x * x, axis=1) / shape.width + shape.eps)[:, None]
        more = 1.0 if shape.zero_centred else 0.0

        def normal(x: Array, column: Array) -> Array:
            weight = plt.load(weight_ref.at[column]).astype(jnp.float32) + more
            return x * factor * weight[None, :]

        x, other = normal(x, column), normal(other, partner)
    turned = x * cos + jnp.where(ahead[None, :], -other, other) * sin
    return turned.astype(dtype)


def _places(
    shape: Shape, read: Refs, token: Int[Array, " t"], at: Int[Array, " t"], head: Array
) -> _Places:
    column, offset = at // shape.block_size, at % shape.block_size
    inside = (at >= 0) & (column < shape.columns)
    sequence = jnp.where(inside, token // shape.length, 0)
    column = jnp.where(inside, column, 0)
    block = plt.load(read.table.at[sequence, column], mask=inside, other=-1)
    written = inside & (block >= 0) & (block < shape.blocks)
    block = jnp.where(written, block, 0) * shape.kv_heads + head
    offset = jnp.where(written, offset, 0)
    return _Places(written, block, block * shape.block_size + offset, offset)


def _base(
    shape: Shape,
    read: Refs,
    places: _Places,
    token: Int[Array, " t"],
    at: Int[Array, " t"],
    head: Array,
) -> Float[Array, "t H"]:
    """The base of each token's key, float32.

    A block's base is written by the program of its first token, so that one is not read in the same
    launch: the key of a first token that is among the new ones is computed once more.
    """
    here = places.written & (token % shape.length >= places.offset)
    first = jnp.where(here, token - places.offset, token)
    here &= plt.load(read.positions.at[first], mask=here, other=-1) == at - places.offset
    row = first * shape.kv_heads + head
    new = _prepared(shape, read, read.k, read.k_weight, row, first, here)
    old = load_rows(read.key_base, places.block, places.written & ~here)
    return jnp.where(here[:, None], new, old).astype(jnp.float32)


def _store_codes(
    written: Refs,
    places: _Places,
    key: Float[Array, "t H"],
    value: Float[Array, "t H"],
    base: Float[Array, "t H"],
) -> None:
    codes, scale = quantise(key.astype(jnp.float32) - base)
    store_rows(written.key, places.row, places.written, codes)
    plt.store(written.key_scale.at[places.row], scale, mask=places.written)
    codes, scale = quantise(value.astype(jnp.float32))
    store_rows(written.value, places.row, places.written, codes)
    plt.store(written.value_scale.at[places.row], scale, mask=places.written)
    first = places.written & (places.offset == 0)
    store_rows(written.key_base, jnp.where(first, places.block, 0), first, key)
