"""Inputs of the experts of many tokens for their benchmark, and the error against float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.expert_cases import exact
from pallas_kernels.dequant_matmul import layout
from pallas_kernels.dequant_matmul.qtensor import QTensor

CHECKED_TOKENS = 16
Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Bits 16 are numbers in bfloat16.

    Attributes:
        tokens: M.
        bits: of a code.
        group_size: inputs a group.
        zero: whether groups have zero points.
        experts: E.
        slots: A.
        width: D.
        hidden: F.
        crowded: whether all tokens go to the same experts.
    """

    tokens: int
    bits: int = 3
    group_size: int = 64
    zero: bool = False
    experts: int = 256
    slots: int = 8
    width: int = 2048
    hidden: int = 512
    crowded: bool = False


# Of qwen3.6-35b-a3b, unless they say otherwise.
CASES = {
    "512 tokens": Case(512),
    "8192 tokens": Case(8192),
    "2048 tokens": Case(2048),
    "65 tokens": Case(65),
    "128 tokens": Case(128),
    "8192 tokens, bfloat16": Case(8192, 16),
    "512 tokens, bfloat16": Case(512, 16),
    "512 tokens, groups of 32, zero": Case(512, 3, 32, True),
    "8192 tokens, groups of 32, zero": Case(8192, 3, 32, True),
    "512 tokens, 8 bits, groups of 128": Case(512, 8, 128),
    "2048 tokens, all to 8 experts": Case(2048, crowded=True),
    "515 tokens, 60 experts of 1000x328": Case(515, 4, 64, True, 60, 4, 1000, 328),
}


def matrices(case: Case, outputs: int, inputs: int, key: jax.Array) -> jax.Array | QTensor:
    """Random matrices of all experts."""
    keys = jax.random.split(key, 3)
    if case.bits == 16:
        shape = case.experts, outputs, inputs
        return jax.random.normal(keys[0], shape, jnp.bfloat16) * jnp.bfloat16(inputs**-0.5)
    words = case.experts, outputs, case.bits, layout.unit_count(inputs)
    groups = case.experts, outputs, layout.group_count(inputs, case.group_size)
    scale = jax.random.uniform(keys[1], groups, jnp.bfloat16, 0.5, 1.5)
    scale *= jnp.bfloat16(4 / 2**case.bits / inputs**0.5)
    zero = None
    if case.zero:
        zero = jax.random.uniform(keys[2], groups, jnp.bfloat16, 0, 2**case.bits)
    codes = jax.random.bits(keys[0], words, jnp.uint32)
    return QTensor(codes, scale, zero, None, inputs, case.group_size)


@functools.partial(jax.jit, static_argnames="case")
def arguments(case: Case) -> Arrays:
    """Random x, ids, weights and the two stacks; every token's experts are different ones."""
    keys = jax.random.split(jax.random.key(case.tokens), 5)
    x = jax.random.normal(keys[0], (case.tokens, case.width), jnp.bfloat16)
    order = jax.random.uniform(keys[1], (case.tokens, case.experts))
    ids = jax.lax.top_k(order, case.slots)[1].astype(jnp.int32)
    if case.crowded:
        ids = jnp.broadcast_to(ids[:1], ids.shape)
    weights = jax.nn.softmax(jax.random.normal(keys[2], ids.shape))
    up = matrices(case, 2 * case.hidden, case.width, keys[3])
    return x, ids, weights, up, matrices(case, case.width, case.hidden, keys[4])


@functools.partial(jax.jit, static_argnames="case")
def error(case: Case, arrays: Arrays, result: jax.Array) -> jax.Array:
    """Norm of the difference from float64 over the norm of the result, at some tokens."""
    x, ids, weights, up, down = arrays
    tokens = jnp.linspace(0, case.tokens - 1, CHECKED_TOKENS).astype(jnp.int32)

    def of_slot(x: jax.Array, slot: tuple[jax.Array, jax.Array]) -> jax.Array:
        gate, value = jnp.split(exact(up[slot[0]]) @ x, 2)
        return slot[1] * (exact(down[slot[0]]) @ (jax.nn.silu(gate) * value))

    def of_token(token: jax.Array) -> jax.Array:
        row = x[token].astype(jnp.float64)
        slots = ids[token], weights[token].astype(jnp.float64)
        return jnp.sum(jax.lax.map(functools.partial(of_slot, row), slots), axis=0)

    expected = jax.lax.map(of_token, tokens)
    difference = result[tokens].astype(jnp.float64) - expected
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected)
