"""The pass over the chunks of a sequence with the state, one after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from .chunk_overlap import Dot, Overlap
from .config import PassConfig
from .rule import CHUNK


def pass_chunks(
    qk: Float[Array, "B 2 K S Q"],
    v: Float[Array, "B M S R"],
    solution: Float[Array, "B M S c"],
    overlap: Overlap,
    delta_state: Float[Array, "B M Q R"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    length: int,
    dtype: Any,
    dot: Dot,
    config: PassConfig,
) -> tuple[Float[Array, "B T M R"], Float[Array, "B M Q R"]]:
    """Read-outs of all tokens, and the state after each sequence's last one, updated in place.

    One program carries columns t * tile to (t + 1) * tile - 1 of the state of a value head
    through the chunks. Columns do not mix, so programs share nothing that is written. Read-outs are
    zero at padding.

    Args:
        qk: as in `overlap_chunks`.
        v: float32 values.
        solution: (I + A)^-1 diag(beta) of each chunk, from `invert_chunks`.
        overlap: the chunks' other matrices and decays.
        delta_state: the state before; taken as zero where `start` is zero.
        start: tokens that each sequence has seen before.
        lengths: real tokens of each sequence.
        length: T.
        dtype: of the read-outs.
        dot: matrix product of two values in the kernel.
        config: how the work is cut.
    """
    batch, _, key_heads, tokens, _ = qk.shape
    _, heads, key_width, value_width = delta_state.shape
    slab, tile = min(64, key_width), config.tile
    tiles = value_width // tile

    def kernel(*refs: Any) -> None:
        qk, v, solution, attention, coarse, fine, state, start, lengths, mixed, new_state = refs
        part, item = pl.program_id(0) % tiles, pl.program_id(0) // tiles
        row, head = item // heads, item % heads
        key_head = head // (heads // key_heads)
        columns = pl.ds(part * tile, tile)
        slabs = [pl.ds(first, slab) for first in range(0, key_width, slab)]

        def store(number: Array, read: Array) -> None:
            token = number * CHUNK + jax.lax.broadcasted_iota(jnp.int32, (CHUNK, tile), 0)
            column = part * tile + jax.lax.broadcasted_iota(jnp.int32, (CHUNK, tile), 1)
            line = (row * length + token) * heads + head
            plt.store(mixed.at[line, column], read.astype(mixed.dtype), mask=token < length)

        def chunk(number: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            rows = pl.ds(number * CHUNK, CHUNK)
            last = number * CHUNK + CHUNK - 1
            g_coarse, g_fine = coarse[row, head, rows], fine[row, head, rows]
            predicted = jnp.zeros((CHUNK, tile), jnp.float32)
            for at, s in zip(slabs, state, strict=True):
                predicted += dot(qk[row, 1, key_head, rows, at], s)
            since = jnp.exp(g_coarse + g_fine)[:, None]
            written = v[row, head, rows, columns] - predicted * since
            written = dot(solution[row, head, rows, :], written)
            read = jnp.zeros((CHUNK, tile), jnp.float32)
            for at, s in zip(slabs, state, strict=True):
                read += dot(qk[row, 0, key_head, rows, at], s)
            read = read * since + dot(attention[row, head, rows, :], written)
            store(number, read)
            last_coarse, last_fine = coarse[row, head, last], fine[row, head, last]
            written *= jnp.exp((last_coarse - g_coarse) + (last_fine - g_fine))[:, None]
            decay = jnp.exp(last_coarse + last_fine)
            return tuple(
                s * decay + dot(qk[row, 1, key_head, rows, at].T, written)
                for at, s in zip(slabs, state, strict=True)
            )

        chunks = (lengths[row] + CHUNK - 1) // CHUNK
        before = tuple(state[row, head, at, columns].astype(jnp.float32) for at in slabs)
        before = tuple(jnp.where(start[row] == 0, 0.0, s) for s in before)
        after = jax.lax.fori_loop(0, chunks, chunk, before)

        def clear(number: Array, _: None) -> None:
            store(number, jnp.zeros((CHUNK, tile), jnp.float32))

        jax.lax.fori_loop(chunks, tokens // CHUNK, clear, None)

        @pl.when(chunks > 0)
        def _() -> None:
            for at, s in zip(slabs, after, strict=True):
                new_state[row, head, at, columns] = s.astype(new_state.dtype)

    inputs = (qk, v, solution, overlap.attention, overlap.coarse, overlap.fine)
    mixed, state = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        name="delta_rule_pass",
        grid=(batch * heads * tiles,),
        out_shape=(
            jax.ShapeDtypeStruct((batch * length * heads, value_width), dtype),
            jax.ShapeDtypeStruct(delta_state.shape, delta_state.dtype),
        ),
        input_output_aliases={6: 1},
    )(*inputs, delta_state, start, lengths)
    return mixed.reshape(batch, length, heads, value_width), state
