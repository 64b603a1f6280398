"""Inputs of the experts of few tokens for their benchmark, and the formulas in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dequant_matmul import layout
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.expert_dispatch.shared import SharedExpert
from pallas_kernels.expert_dispatch.specs import Spec

Arrays = tuple[Any, ...]


@functools.partial(jax.jit, static_argnames=("spec", "seed"))
def arguments(spec: Spec, seed: int = 0) -> Arrays:
    """Random x, ids, weights, stacks and shared expert."""
    keys = iter(jax.random.split(jax.random.key(seed), 32))
    scales = {name: 1 / size**0.5 for name, size in (("up", spec.width), ("down", spec.hidden))}

    def drawn(shape: Any, size: float) -> Any:
        if shape is None:
            return None
        if isinstance(shape, QTensor):
            levels = 2**shape.bits / 4
            low, high = 0.5 * size / levels, 1.5 * size / levels
            zero = shape.zero
            if zero is not None:
                zero = jax.random.uniform(next(keys), zero.shape, zero.dtype, 0, 2**shape.bits)
            return dataclasses.replace(
                shape,
                codes=jax.random.bits(next(keys), shape.codes.shape, jnp.uint32),
                scale=jax.random.uniform(
                    next(keys), shape.scale.shape, shape.scale.dtype, low, high
                ),
                zero=zero,
            )
        return size * jax.random.normal(next(keys), shape.shape, shape.dtype)

    x, ids, weights, up, below, shared = spec.arguments()
    if shared is not None:
        parts = ("gate_proj", "up_proj", "down_proj", "gate")
        sizes = dict.fromkeys(parts, scales["up"]) | {"down_proj": spec.shared_hidden**-0.5}
        shared = SharedExpert(**{name: drawn(getattr(shared, name), sizes[name]) for name in parts})
    strengths = jax.nn.softmax(jax.random.normal(next(keys), weights.shape, weights.dtype))
    return (
        drawn(x, 1.0).astype(jnp.bfloat16).astype(x.dtype),
        jnp.zeros(ids.shape, ids.dtype),
        strengths,
        drawn(up, scales["up"]),
        drawn(below, scales["down"]),
        shared,
    )


def routings(spec: Spec, calls: int) -> list[jax.Array]:
    """Experts of so many calls: drawn for each token; of few tokens, all experts in turn."""
    rng = np.random.default_rng(0)
    count = spec.tokens * spec.slots
    if count <= spec.experts // 4:
        turns = -(-calls * count // spec.experts) + 1
        walk = np.concatenate([rng.permutation(spec.experts) for _ in range(turns)])
        found = [walk[call * count : (call + 1) * count] for call in range(calls)]
    else:
        found = [
            np.concatenate(
                [rng.permutation(spec.experts)[: spec.slots] for _ in range(spec.tokens)]
            )
            for _ in range(calls)
        ]
    shape = spec.tokens, spec.slots
    return [jnp.asarray(ids.reshape(shape), jnp.int32) for ids in found]


def exact(weight: Any) -> jax.Array:
    """The numbers of a matrix, or what its codes stand for, in float64."""
    if not isinstance(weight, QTensor):
        return weight.astype(jnp.float64)

    def wide(x: jax.Array) -> jax.Array:
        x = jnp.repeat(x.astype(jnp.float64), weight.group_size, axis=-1)
        return x[..., : weight.inputs]

    values = layout.unpack(weight.codes, weight.inputs).astype(jnp.float64)
    zero = layout.CENTRES[weight.bits] if weight.zero is None else wide(weight.zero)
    return (values - zero) * wide(weight.scale)


@jax.jit
def formula_of_gated(arrays: Arrays) -> tuple[jax.Array, ...]:
    """What the first launch makes, in float64: of slots, the shared expert, and its strength."""
    x, ids, _, stack, _, shared = arrays

    def gated(x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jax.nn.silu(gate @ x) * (up @ x)

    def token(given: Arrays) -> tuple[jax.Array, ...]:
        x, ids = given
        x = x.astype(jnp.float64)
        parts = [jnp.split(exact(stack[ids[slot]]), 2) for slot in range(ids.shape[0])]
        slots = jnp.stack([gated(x, *part) for part in parts])
        if shared is None:
            return (slots,)
        own = gated(x, exact(shared.gate_proj), exact(shared.up_proj))
        return slots, own, jax.nn.sigmoid(exact(shared.gate) @ x)

    slots, *own = jax.lax.map(token, (x, ids))
    return slots.reshape(ids.size, -1), *own


@jax.jit
def formula_of_down(made: tuple[jax.Array, ...], arrays: Arrays) -> jax.Array:
    """What the second launch makes of what the first made, in float64."""
    x, ids, weights, _, stack, shared = arrays
    slots, *own = (each.astype(jnp.float64) for each in made)

    def token(given: Arrays) -> jax.Array:
        slots, ids, weights, *own = given
        total = jnp.zeros(x.shape[1:], jnp.float64)
        for slot in range(ids.shape[0]):
            total += weights[slot].astype(jnp.float64) * (exact(stack[ids[slot]]) @ slots[slot])
        if shared is not None:
            total += own[1][0] * (exact(shared.down_proj) @ own[0])
        return total

    return jax.lax.map(token, (slots.reshape(*ids.shape, -1), ids, weights, *own))


def error_of(found: jax.Array, wanted: jax.Array) -> float:
    """Norm of the difference, as a share of the norm of what is wanted."""
    difference = jnp.linalg.norm(found.astype(jnp.float64) - wanted)
    return float(difference / jnp.linalg.norm(wanted))
