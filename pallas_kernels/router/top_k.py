"""The largest scores of each row, found and weighted by one warp a row.

The logits may come in parts, which are added here, so that nothing else has to be launched for it.

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
from .row import Row

# Below the key of every number: of an expert that must not be chosen, or no more.
CLOSED = -(2**31)
# Above all: of an expert that must be chosen.
FIRST = 2**31 - 1


def top_k(
    parts: Float[Array, "P M E"],
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
) -> tuple[Int[Array, "M A"], Float[Array, "M A"], Float[Array, "M E"]]:
    """Ids, weights and logits, of which `parts` are to be added; see `api.router` for the rest."""
    count, rows, experts = parts.shape
    given = {"bias": bias, "mask": mask, "valid": valid, "limit": limit}
    given |= {"temperature": temperature, "forced": forced, "scale": scale, "part": part}
    given = {name: array for name, array in given.items() if array is not None}
    out_shape = [jax.ShapeDtypeStruct((rows, slots), jnp.int32)]
    out_shape.append(jax.ShapeDtypeStruct((rows, slots), jnp.float32))
    if count > 1:
        out_shape.append(jax.ShapeDtypeStruct((rows, experts), jnp.float32))

    def kernel(parts_ref: Any, *refs: Any) -> None:
        row = Row(parts_ref, dict(zip(given, refs, strict=False)), pl.program_id(0))
        outputs = refs[len(given) :]
        logits_ref = outputs[2] if count > 1 else None
        _store(row, outputs, *_chosen(row, logits_ref, slots=slots, renormalise=renormalise))

    ids, weights, *logits = triton_call(
        kernel,
        num_warps=1,
        num_stages=1,
        name="router_top_k",
        grid=(rows,),
        out_shape=out_shape,
    )(parts, *given.values())
    return ids, weights, logits[0] if logits else parts.reshape(rows, experts)


def _chosen(
    row: Row, logits_ref: Any, *, slots: int, renormalise: bool
) -> tuple[Int[Array, " a"], Int[Array, " a"], Float[Array, " a"], Bool[Array, " a"]]:
    """Where the slots of a row come, their ids, their weights, and which of them are filled.

    Writes the logits where there is a reference for them.
    """
    experts = row.parts.shape[2]
    block = pl.next_power_of_2(experts)
    expert = jax.lax.iota(jnp.int32, block)
    slot = jax.lax.iota(jnp.int32, pl.next_power_of_2(slots))
    inside = None if block == experts else expert < experts
    logits = row.logits(expert, inside)
    if logits_ref is not None:
        at = jnp.full(expert.shape, row.index, jnp.int32), expert
        plt.store(logits_ref.at[at], logits, mask=inside)
    keys, first = _ranked(row, logits, expert, inside)
    ids, found = _largest(first, expert, slot, slots)
    filled = found > CLOSED
    if "limit" in row.options:
        filled &= slot < row.of_row("limit")
    if "valid" in row.options:
        filled &= row.of_row("valid")
    place = slot
    if "forced" in row.options:
        own = row.score(row.logits(ids, filled), ids, filled)
        found = _keys(jnp.where(filled, own, -jnp.inf))
        place = _places(found, jnp.where(filled, ids, experts + slot))
    weights = _weights(found, keys, filled, renormalise=renormalise)
    if "scale" in row.options:
        weights *= row.of_experts("scale", ids, filled)
    return place, ids, weights, filled


def _ranked(
    row: Row, logits: Float[Array, " e"], expert: Int[Array, " e"], inside: Any
) -> tuple[Int[Array, " e"], Int[Array, " e"]]:
    """Keys of the scores, and those by which slots are filled."""
    scores = row.score(logits, expert, inside)
    may = inside
    if "mask" in row.options:
        may = row.of_experts("mask", expert, inside)
    if may is not None:
        scores = jnp.where(may, scores, -jnp.inf)
    keys = _keys(scores)
    if "forced" not in row.options:
        return keys, keys
    forced = row.of_experts("forced", expert, inside)
    return keys, jnp.where(forced if may is None else forced & may, FIRST, keys)


def _weights(
    found: Int[Array, " a"], keys: Int[Array, " e"], filled: Bool[Array, " a"], *, renormalise: bool
) -> Float[Array, " a"]:
    """Of slots with the keys `found`, among themselves or among all; anything where not filled."""
    largest = _number(jnp.max(found if renormalise else keys))
    strength = jnp.exp(_number(found) - largest)
    if renormalise:
        among = jnp.where(filled, strength, 0.0)
    else:
        among = jnp.exp(_number(keys) - largest)
    return strength / jnp.sum(among)


def _store(
    row: Row,
    outputs: tuple[Any, ...],
    place: Int[Array, " a"],
    ids: Int[Array, " a"],
    weights: Float[Array, " a"],
    filled: Bool[Array, " a"],
) -> None:
    """Write the slots of a row; an empty one has id E and weight 0."""
    experts, slots = row.parts.shape[2], outputs[0].shape[1]
    at = jnp.full(place.shape, row.index, jnp.int32), place
    exists = None if place.shape[0] == slots else place < slots
    plt.store(outputs[0].at[at], jnp.where(filled, ids, experts), mask=exists)
    plt.store(outputs[1].at[at], jnp.where(filled, weights, 0.0), mask=exists)


def _keys(scores: Float[Array, " e"]) -> Int[Array, " e"]:
    """Integers in the order of the scores; NaN counts as infinity, and -infinity is closed."""
    number = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))
    bits = jax.lax.bitcast_convert_type(number, jnp.int32)
    return jnp.where(scores == -jnp.inf, CLOSED, bits ^ ((bits >> 31) & 0x7FFFFFFF))


def _number(key: Int[Array, "..."]) -> Float[Array, "..."]:
    """The number of a key; -infinity of one that is closed."""
    number = jax.lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)
    return jnp.where(key == CLOSED, -jnp.inf, number)


def _places(keys: Int[Array, " a"], ids: Int[Array, " a"]) -> Int[Array, " a"]:
    """Where each slot comes in order of falling keys; of equals the lower id first."""
    earlier = (keys[None, :] == keys[:, None]) & (ids[None, :] < ids[:, None])
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
