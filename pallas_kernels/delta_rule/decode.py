"""One token a sequence in one launch: convolution, SiLU, norms, gates, state update, read-out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from .._compat import triton_call
from .config import DecodeConfig
from .reference import DeltaRuleOutput


def decode(
    qkv: Float[Array, "B 1 C"],
    b: Float[Array, "B 1 M"],
    a: Float[Array, "B 1 M"],
    conv_weight: Float[Array, "C W"],
    a_log: Float[Array, " M"],
    dt_bias: Float[Array, " M"],
    conv_state: Float[Array, "P C W"],
    delta_state: Float[Array, "P M Q R"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    slots: Int[Array, " B"] | None,
    *,
    config: DecodeConfig,
) -> DeltaRuleOutput:
    """`api.gated_delta_rule` for T = 1, both states updated in place.

    Program (row, m, t) computes columns t * tile to (t + 1) * tile - 1 of value head m. For that it
    needs the convolution of its own value channels and of all channels of its key head, which it
    shares with the other tiles and with the other value heads of that key head. Nothing is handed
    from one program to another: what they share they compute alike.

    Why that does not race, though the ring of the convolution is read and written in one launch:
    programs need its columns of earlier positions only, and the one column that is written, of this
    position, they take from `qkv`. They load that column too, may see its old or its new value, and
    select it away. Each element has one writer: value channels and the state their own program,
    query and key channels the program of tile 0 of the first value head that reads them. A program
    reads its part of the state before it writes it, and no other program touches it.

    Args:
        qkv: see `api.gated_delta_rule`.
        b: see there.
        a: see there.
        conv_weight: see there.
        a_log: see there.
        dt_bias: see there.
        conv_state: see there.
        delta_state: see there.
        start: see there.
        lengths: see there.
        slots: see there.
        config: how the work is cut.
    """
    batch, _, channels = qkv.shape
    held, heads, key_width, value_width = delta_state.shape
    inputs = (qkv, b, a, conv_weight, a_log, dt_bias, conv_state, delta_state, start, lengths)
    inputs += () if slots is None else (slots,)
    taps, tile = conv_state.shape[-1], config.tile
    key_heads = (channels - heads * value_width) // (2 * key_width)

    def kernel(*refs: Any) -> None:
        qkv, b, a, conv_weight, a_log, dt_bias, ring, state, start, lengths = refs[:10]
        mixed, new_ring, new_state = refs[-3:]
        row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        key_head = head // (heads // key_heads)
        columns = pl.ds(part * tile, tile)
        position, real, slot = start[row], lengths[row] > 0, row
        if slots is not None:
            slot = refs[10][row]
            real &= (slot >= 0) & (slot < held)
            slot = jnp.clip(slot, 0, held - 1)

        def channels_from(first: Array, width: int) -> tuple[Array, list[Array], list[Array]]:
            """Newest inputs, all columns of the ring, and taps of some channels.

            All columns, and not those that `start` names: these loads would wait for that one.
            """
            at = pl.ds(first, width)
            columns = range(taps) if taps > 1 else ()
            return (
                qkv[row, 0, at],
                [ring[slot, at, column] for column in columns],
                [conv_weight[at, tap].astype(jnp.float32) for tap in range(taps)],
            )

        def convolved(new: Array, old: list[Array], weights: list[Array]) -> Float[Array, " width"]:
            """SiLU of the convolution."""
            total = new.astype(jnp.float32) * weights[-1]
            for distance in range(1, taps):
                column = (position + taps - distance) % taps
                past = old[0]
                for number in range(1, taps):
                    past = jnp.where(column == number, old[number], past)
                past = jnp.where(position >= distance, past.astype(jnp.float32), 0.0)
                total += past * weights[-1 - distance]
            return total * jax.lax.logistic(total)

        def own_state(part: Any) -> Array:
            """The state before, or anything where there is none."""
            if slots is None:
                return part[...]
            # The load waits for the slot as it is, and may as well wait for the position.
            return plt.load(part, mask=jnp.full((key_width, tile), position > 0), other=0.0)

        # All loads first: none can be moved up past a store, or past a branch around one.
        key_dim = key_heads * key_width
        q_at, k_at = key_head * key_width, key_dim + key_head * key_width
        v_at = 2 * key_dim + head * value_width + part * tile
        s = own_state(state.at[slot, head, :, columns]).astype(jnp.float32)
        of_q = channels_from(q_at, key_width)
        of_k = channels_from(k_at, key_width)
        of_v = channels_from(v_at, tile)
        beta = jax.lax.logistic(b[row, 0, head].astype(jnp.float32))
        step = jax.nn.softplus(a[row, 0, head].astype(jnp.float32) + dt_bias[head])
        decay = jnp.exp(-jnp.exp(a_log[head]) * step)

        q, k, v = convolved(*of_q), convolved(*of_k), convolved(*of_v)
        q_scale = jax.lax.rsqrt(jnp.sum(q * q) + 1e-6) * key_width**-0.5
        k *= jax.lax.rsqrt(jnp.sum(k * k) + 1e-6)

        # S^T q after the update is S^T q before it plus (k . q) times what is written: so both
        # sums over the state are taken at once. The scale of q comes last: on the vector it would
        # cost the register that lets a fourth program onto a multiprocessor.
        s *= decay
        s = jnp.where(position == 0, 0.0, s) if slots is None else s
        predicted = jnp.sum(s * k[:, None], axis=0)
        written = (v - predicted) * beta
        read = (jnp.sum(s * q[:, None], axis=0) + jnp.sum(k * q) * written) * q_scale
        mixed[row, 0, head, columns] = jnp.where(real, read, 0.0).astype(mixed.dtype)

        @pl.when(real)
        def _() -> None:
            updated = s + k[:, None] * written[None, :]
            new_state[slot, head, :, columns] = updated.astype(new_state.dtype)
            new_ring[slot, pl.ds(v_at, tile), position % taps] = of_v[0].astype(new_ring.dtype)

        @pl.when(real & (head % (heads // key_heads) == 0) & (part == 0))
        def _() -> None:
            for at, new in ((q_at, of_q[0]), (k_at, of_k[0])):
                new_ring[slot, pl.ds(at, key_width), position % taps] = new.astype(new_ring.dtype)

    out = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=1,
        name="delta_rule_decode",
        grid=(batch, heads, value_width // tile),
        out_shape=(
            jax.ShapeDtypeStruct((batch, 1, heads, value_width), qkv.dtype),
            jax.ShapeDtypeStruct(conv_state.shape, conv_state.dtype),
            jax.ShapeDtypeStruct(delta_state.shape, delta_state.dtype),
        ),
        input_output_aliases={6: 1, 7: 2},
    )(*inputs)
    return DeltaRuleOutput(*out)
