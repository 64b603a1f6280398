"""The largest scores of each row, found and weighted by one warp a row.

Float32 numbers are compared as integers of the same order, whose greatest among a warp's threads
one instruction finds; another finds the lowest id that has it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int

from .._compat import triton_call

# Below the key of every number: of an expert that must not be chosen, or no more.
CLOSED = -(2**31)
# Above all: of an expert that must be chosen.
FIRST = 2**31 - 1


def top_k(
    logits: Float[Array, "M E"],
    bias: Float[Array, "R E"] | None,
    mask: Bool[Array, "Q E"] | None,
    valid: Bool[Array, " M"] | None,
    limit: Int[Array, " M"] | None,
    temperature: Float[Array, " M"] | None,
    forced: Bool[Array, "F E"] | None,
    scale: Float[Array, "S E"] | None,
    part: Int[Array, "1"] | None,
    *,
    slots: int,
    renormalise: bool,
) -> tuple[Int[Array, "M A"], Float[Array, "M A"]]:
    """Ids and weights; see `api.router`."""
    rows, experts = logits.shape
    block, width = pl.next_power_of_2(experts), pl.next_power_of_2(slots)
    given = {"bias": bias, "mask": mask, "valid": valid, "limit": limit}
    given |= {"temperature": temperature, "forced": forced, "scale": scale, "part": part}
    given = {name: array for name, array in given.items() if array is not None}

    def kernel(logits_ref: Any, *refs: Any) -> None:
        optional = dict(zip(given, refs, strict=False))
        row = pl.program_id(0)
        expert, slot = jax.lax.iota(jnp.int32, block), jax.lax.iota(jnp.int32, width)
        inside = None if block == experts else expert < experts

        def option_row(ref: Any) -> Any:
            if "part" in optional:
                return optional["part"][0] * rows + row
            return row if ref.shape[0] > 1 else 0

        def read(ref: Any, column: Array, exists: Any) -> Array:
            """A number of each expert in the columns: of this row, or of the only one."""
            index = row if ref is logits_ref else option_row(ref)
            at = jnp.full(column.shape, index, jnp.int32), column
            other = False if ref.dtype == jnp.bool_ else 0.0
            return plt.load(ref.at[at], mask=exists, other=None if exists is None else other)

        def score(column: Array, exists: Any) -> Array:
            """Of the experts in the columns, whatever the mask says."""
            found = read(logits_ref, column, exists)
            if "bias" in optional:
                found += read(optional["bias"], column, exists)
            if "temperature" in optional:
                found /= optional["temperature"][row]
            return found

        scores = score(expert, inside)
        may = read(optional["mask"], expert, inside) if "mask" in optional else inside
        if may is not None:
            scores = jnp.where(may, scores, -jnp.inf)
        keys = first = _keys(scores)
        if "forced" in optional:
            forced = read(optional["forced"], expert, inside)
            first = jnp.where(forced if may is None else forced & may, FIRST, keys)
        ids, found = _largest(first, expert, slot, slots)
        filled = found > CLOSED
        if "limit" in optional:
            filled &= slot < optional["limit"][row]
        if "valid" in optional:
            filled &= optional["valid"][row]
        place = slot
        if "forced" in optional:
            found = _keys(jnp.where(filled, score(ids, filled), -jnp.inf))
            place = _places(found, slot)
        largest = _number(jnp.max(found if renormalise else keys))
        strength = jnp.exp(_number(found) - largest)
        among = (
            jnp.where(filled, strength, 0.0) if renormalise else jnp.exp(_number(keys) - largest)
        )
        weights = strength / jnp.sum(among)
        if "scale" in optional:
            weights *= read(optional["scale"], ids, filled)
        at = jnp.full((width,), row, jnp.int32), place
        exists = None if width == slots else place < slots
        plt.store(refs[-2].at[at], jnp.where(filled, ids, experts), mask=exists)
        plt.store(refs[-1].at[at], jnp.where(filled, weights, 0.0), mask=exists)

    shape = rows, slots
    return tuple(
        triton_call(
            kernel,
            num_warps=1,
            num_stages=1,
            name="router_top_k",
            grid=(rows,),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)],
        )(logits, *given.values())
    )


def _keys(scores: Float[Array, " e"]) -> Int[Array, " e"]:
    """Integers in the order of the scores; NaN counts as infinity, and -infinity is closed."""
    number = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))
    bits = jax.lax.bitcast_convert_type(number, jnp.int32)
    return jnp.where(scores == -jnp.inf, CLOSED, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _number(key: Int[Array, "..."]) -> Float[Array, "..."]:
    """The number of a key; -infinity of one that is closed."""
    number = jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)
    return jnp.where(key == CLOSED, -jnp.inf, number)


def _places(keys: Int[Array, " a"], slot: Int[Array, " a"]) -> Int[Array, " a"]:
    """Where each slot comes in order of falling keys; of equals the earlier first."""
    earlier = (keys[None, :] == keys[:, None]) & (slot[None, :] < slot[:, None])
    before = (keys[None, :] > keys[:, None]) | earlier
    return jnp.sum(before.astype(jnp.int32), axis=1)


def _largest(
    keys: Int[Array, " e"], expert: Int[Array, " e"], slot: Int[Array, " a"], slots: int
) -> tuple[Int[Array, " a"], Int[Array, " a"]]:
    """Ids and keys of the largest, in falling order; what is not closed is chosen once."""

    def choose(index: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        keys, ids, found = carry
        best = jnp.max(keys)
        chosen = jnp.min(jnp.where(keys == best, expert, keys.shape[0]))
        here = slot == index
        keys = jnp.where(expert == chosen, CLOSED, keys)
        return keys, jnp.where(here, chosen, ids), jnp.where(here, best, found)

    start = keys, jnp.zeros_like(slot), jnp.full_like(slot, CLOSED)
    return jax.lax.fori_loop(0, slots, choose, start)[1:]
