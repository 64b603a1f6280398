"""The pass over the chunks of a sequence with the state, one after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float, Int

from .._compat import triton_call
from .chunk_inputs import Inputs
from .chunk_overlap import Overlap
from .config import PassConfig
from .parts import product, split
from .rule import CHUNK


def pass_chunks(
    inputs: Inputs,
    solution: BFloat16[Array, "n B M S c"],
    overlap: Overlap,
    delta_state: Float[Array, "P M Q R"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    slots: Int[Array, " B"] | None,
    *,
    length: int,
    dtype: Any,
    config: PassConfig,
) -> tuple[Float[Array, "B T M R"], Float[Array, "P M Q R"]]:
    """Read-outs of all tokens, and the state after each sequence's last one, updated in place.

    One program carries columns t * tile to (t + 1) * tile - 1 of the state of a value head
    through the chunks. Columns do not mix, so programs share nothing that is written. Read-outs are
    zero at padding.

    All is computed transposed, with value columns first: so the state and what is computed from it
    are always left operands, which tensor cores take from the registers where the product before
    left them; what comes from memory are the right ones.

    Args:
        inputs: queries, keys and values.
        solution: (I + A)^-1 diag(beta) of each chunk, from `invert_chunks`.
        overlap: the chunks' other matrices and decays.
        delta_state: the state before; taken as zero where `start` is zero.
        start: tokens that each sequence has seen before.
        lengths: real tokens of each sequence.
        slots: row of the state of each sequence that has tokens; None for its own number.
        length: T.
        dtype: of the read-outs.
        config: how the work is cut.
    """
    parts, batch, key_heads, tokens, _ = inputs.keys.shape
    _, heads, _, value_width = delta_state.shape
    tile = config.tile
    tiles = value_width // tile

    def kernel(*refs: Any) -> None:
        queries, keys, values, solution, attention, since, until, state, start, lengths = refs[:10]
        mixed, new_state = refs[-2:]
        part, item = pl.program_id(0) % tiles, pl.program_id(0) // tiles
        row, head = item // heads, item % heads
        key_head = head // (heads // key_heads)
        columns = pl.ds(part * tile, tile)
        slot = row if slots is None else refs[10][row]

        def store(number: Array, read: Array) -> None:
            column = part * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, CHUNK), 0)
            token = number * CHUNK + jax.lax.broadcasted_iota(jnp.int32, (tile, CHUNK), 1)
            line = (row * length + token) * heads + head
            plt.store(mixed.at[line, column], read.astype(mixed.dtype), mask=token < length)

        def chunk(number: Array, state: Array) -> Array:
            rows = pl.ds(number * CHUNK, CHUNK)
            # Each load is where its value is used, so that few take shared memory at a time where
            # nothing is loaded ahead.
            k = [keys[i, row, key_head, rows, :] for i in range(parts)]
            decay, later = since[row, head, rows], until[row, head, rows]
            whole = since[row, head, number * CHUNK + CHUNK - 1]

            before = split(state, parts)
            predicted = product(before, [x.T for x in k])
            q = [queries[i, row, key_head, rows, :] for i in range(parts)]
            read = product(before, [x.T for x in q]) * decay[None, :]
            missing = values[row, head, columns, rows] - predicted * decay[None, :]
            solve = [solution[i, row, head, rows, :] for i in range(parts)]
            written = product(split(missing, parts), [x.T for x in solve])
            attend = [attention[i, row, head, rows, :] for i in range(parts)]
            store(number, product(split(written, parts), [x.T for x in attend], read))
            state = product(split(written * later[None, :], parts), k, state * whole)
            return state

        chunks = (lengths[row] + CHUNK - 1) // CHUNK
        before = state[slot, head, :, columns].astype(jnp.float32).T
        before = jnp.where(start[row] == 0, 0.0, before)
        after = jax.lax.fori_loop(0, chunks, chunk, before)

        def clear(number: Array, _: None) -> None:
            store(number, jnp.zeros((tile, CHUNK), jnp.float32))

        jax.lax.fori_loop(chunks, tokens // CHUNK, clear, None)

        @pl.when(chunks > 0)
        def _() -> None:
            new_state[slot, head, :, columns] = after.T.astype(new_state.dtype)

    arrays = (*inputs, solution, overlap.attention, overlap.since, overlap.until)
    arrays += (delta_state, start, lengths)
    arrays += () if slots is None else (slots,)
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
        input_output_aliases={7: 1},
    )(*arrays)
    return mixed.reshape(batch, length, heads, value_width), state
