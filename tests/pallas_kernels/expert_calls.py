"""Random calls of experts of few tokens, and what they must give in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.expert_cases import arguments, routings
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.expert_dispatch import triton
from pallas_kernels.expert_dispatch.api import OPERATION
from pallas_kernels.expert_dispatch.config import FewTokens, SomeTokens
from pallas_kernels.expert_dispatch.shared import SharedExpert
from pallas_kernels.expert_dispatch.specs import Spec
from pallas_kernels.testing import norm_error

SLOTS, EXPERTS = 3, 5
# Sums of codes are less exact than float32. What lies between is rounded to bfloat16.
SUMS = 3e-4
HIDDEN = {"bfloat16": 3e-3, "float32": SUMS}
WHOLE = {"bfloat16": 3e-3, "float32": 2 * SUMS}
# Where weights are rounded to bfloat16 too.
ROUNDED = 4.2e-3


def small(bits: int, down_bits: int, **more: Any) -> Spec:
    """Three tiles or more along each axis, none of them full."""
    sizes = {"experts": EXPERTS, "slots": SLOTS, "width": 600, "hidden": 104, "tokens": 2}
    sizes |= {"shared_hidden": 72}
    return Spec(**(sizes | {"bits": bits, "down_bits": down_bits} | more))


def filled(rng: np.random.Generator, like: Any) -> tuple[Any, np.ndarray]:
    """A matrix or a stack of a spec's shape, and its numbers in float64."""
    if not isinstance(like, QTensor):
        weight = jnp.asarray(rng.standard_normal(like.shape) / like.shape[-1] ** 0.5, like.dtype)
        return weight, np.asarray(weight, np.float64)
    bits, shape = like.bits, (*like.codes.shape[:-2], like.inputs)
    values = rng.integers(0, 2**bits, shape).astype(np.uint8)
    size = 4 / 2**bits / like.inputs**0.5
    scale = rng.uniform(0.5, 1.5, like.scale.shape) * rng.choice((-1, 1), like.scale.shape) * size
    scale, zero = jnp.asarray(scale, like.scale.dtype), None
    if like.zero is not None:
        zero = jnp.asarray(rng.uniform(0, 2**bits, like.zero.shape), like.zero.dtype)
    group = np.arange(like.inputs) // like.group_size
    centre = CENTRES[bits] if zero is None else np.asarray(zero, np.float64)[..., group]
    wide = np.asarray(scale, np.float64)[..., group] * (values - centre)
    codes = jnp.asarray(pack(values, bits))
    return QTensor(codes, scale, zero, None, like.inputs, like.group_size), wide


@functools.cache
def drawn(spec: Spec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The call's arrays, and all but ids in float64.

    The second token's first slot is empty. Without a shared expert it is a token of padding.
    """
    rng = np.random.default_rng(spec.bits)
    x, _, _, *stacks, shared = spec.arguments()
    x = jnp.asarray(rng.standard_normal(x.shape), x.dtype)
    ids = np.stack([rng.permutation(EXPERTS)[:SLOTS] for _ in range(spec.tokens)])
    ids[1, 0] = EXPERTS
    if shared is None:
        x, ids[1] = x.at[1].set(jnp.nan), (-1, EXPERTS, 2**31 - 1)
    weights = rng.random(ids.shape, np.float32)
    (up, wide_up), (below, wide_below) = (filled(rng, stack) for stack in stacks)
    wide_shared = None
    if shared is not None:
        names = ("gate_proj", "up_proj", "down_proj", "gate")
        parts = {name: filled(rng, getattr(shared, name)) for name in names}
        shared = SharedExpert(**{name: weight for name, (weight, _) in parts.items()})
        wide_shared = {name: wide for name, (_, wide) in parts.items()}
    arrays = x, jnp.asarray(ids, jnp.int32), jnp.asarray(weights), up, below, shared
    wide = np.asarray(x, np.float64), weights.astype(np.float64), wide_up, wide_below, wide_shared
    return arrays, wide


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Silu(gate) * up, of rows."""
    made = x @ gate.T
    return made / (1 + np.exp(-made)) * (x @ up.T)


def oracle_of_gated(ids: np.ndarray, wide: tuple[Any, ...]) -> list[np.ndarray]:
    """What the first launch makes, but for its rounding; zero for empty slots."""
    x, _, up, _, shared = wide
    slots = np.zeros((ids.size, up.shape[1] // 2))
    for expert in range(EXPERTS):
        mine = np.flatnonzero(ids == expert)
        slots[mine] = gated(x[mine // SLOTS], *np.split(up[expert], 2))
    if shared is None:
        return [slots]
    own = gated(x, shared["gate_proj"], shared["up_proj"])
    return [slots, own, 1 / (1 + np.exp(-x @ shared["gate"].T))]


def oracle_of_down(made: list[np.ndarray], ids: np.ndarray, wide: tuple[Any, ...]) -> np.ndarray:
    """What the second launch makes of it."""
    x, weights, _, below, shared = wide
    result = np.zeros(x.shape)
    for expert in range(EXPERTS):
        # A token has an expert in one slot at most.
        token, slot = np.nonzero(ids == expert)
        down = made[0][token * SLOTS + slot] @ below[expert].T
        result[token] += weights[token, slot][:, None] * down
    return result if shared is None else result + made[2] * (made[1] @ shared["down_proj"].T)


def check_whole(spec: Spec, config: FewTokens | SomeTokens, *, given: bool = True) -> None:
    """See `check_call`."""
    run = functools.partial(triton.expert_dispatch, config=config, **spec.settings())
    check_call(spec, run, given=given)


def check_call(
    spec: Spec, run: Callable[..., Any], *, given: bool = True, rounded: bool = False
) -> None:
    """All launches together.

    Args:
        spec: of the call.
        run: takes its arrays.
        given: also with strengths of the shared expert that are given.
        rounded: whether weights are rounded to bfloat16.
    """
    arrays, wide = drawn(spec)
    numbers = np.asarray(arrays[1])
    if rounded:
        _check(spec, run, arrays, wide, ROUNDED)
        wide = *wide[:2], *jax.tree.map(_in_bfloat16, wide[2:])
    made = _check(spec, run, arrays, wide, WHOLE[spec.inner])
    if arrays[-1] is None or not given:
        return
    # The first token leaves the shared expert out, the second has a strength given.
    logit = np.full((spec.tokens, 1), np.nan, np.float32)
    logit[:2, 0] = -np.inf, 0.5
    made[2][:2, 0] = 0, 1 / (1 + np.exp(-0.5))
    shared = dataclasses.replace(arrays[-1], logit=jnp.asarray(logit))
    wanted = oracle_of_down(made, numbers, wide)
    assert norm_error(jax.jit(run)(*arrays[:-1], shared), wanted) < WHOLE[spec.inner]


def _check(
    spec: Spec, run: Callable[..., Any], arrays: tuple[Any, ...], wide: tuple[Any, ...], bar: float
) -> list[np.ndarray]:
    """What a call gives; returns what lies between its products in float64."""
    numbers = np.asarray(arrays[1])
    made = oracle_of_gated(numbers, wide)
    error = norm_error(jax.jit(run)(*arrays), oracle_of_down(made, numbers, wide))
    assert error < bar, f"{error} of {spec}"
    return made


def _in_bfloat16(weight: np.ndarray) -> np.ndarray:
    return weight.astype(jnp.bfloat16).astype(np.float64)


def check_many_items(spec: Spec, bar: float) -> None:
    """Calls of real size, whose multiprocessors have many more items each than stages.

    They follow each other without a pause, with weights that are in no cache.
    """
    sets = [arguments(spec, seed) for seed in range(3)]
    routed = routings(spec, 6)
    exactly = spec.settings() | {"inner_dtype": jnp.dtype("float32")}
    reference = jax.jit(functools.partial(OPERATION, implementation="reference", **exactly))

    @jax.jit
    def in_a_row(x: Any, routed: Any, sets: Any) -> list[Any]:
        results = []
        for index, ids in enumerate(routed):
            _, _, *others = sets[index % len(sets)]
            y = OPERATION(x, ids, *others, implementation="mosaic_gpu", **spec.settings())
            results.append(y)
            x = x + (0 * y).astype(x.dtype)
        return results

    x = sets[0][0]
    streamed = in_a_row(x, routed, sets)
    for index, ids in enumerate(routed):
        _, _, *others = sets[index % len(sets)]
        with jax.default_matmul_precision("highest"):
            wanted = np.asarray(reference(x, ids, *others), np.float64)
        error = norm_error(streamed[index], wanted)
        assert error < bar, f"{error} of {spec}"
    for _ in range(50):
        for found, each in zip(in_a_row(x, routed, sets), streamed, strict=True):
            assert jnp.array_equal(found, each)
