"""Experts of few tokens: each launch, and both, against float64; empty slots may hold anything."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels._compat import H200, lower_for_cuda, targeting
from pallas_kernels.dequant_matmul.config import SomeRows
from pallas_kernels.dequant_matmul.layout import CENTRES, pack
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.expert_dispatch import down, gate_up, triton
from pallas_kernels.expert_dispatch.config import Cut, FewTokens, SomeTokens, heuristic
from pallas_kernels.expert_dispatch.matrix import matrix_of
from pallas_kernels.expert_dispatch.shared import SharedExpert
from pallas_kernels.expert_dispatch.sharing import rows_of_experts
from pallas_kernels.expert_dispatch.specs import SPECS, Spec
from pallas_kernels.testing import interpreted, norm_error

SLOTS, EXPERTS = 3, 5


def small(bits: int, down_bits: int, **more: Any) -> Spec:
    """Three tiles or more along each axis, none of them full."""
    sizes = {"experts": EXPERTS, "slots": SLOTS, "width": 600, "hidden": 104, "tokens": 2}
    sizes |= {"shared_hidden": 72}
    return Spec(**(sizes | {"bits": bits, "down_bits": down_bits} | more))


FIRST = FewTokens(Cut(16, 8, 1), Cut(16, 4, 1), 4)
SECOND = FewTokens(Cut(16, 4, 1), Cut(8, 8, 1), 8)
CASES = {
    "3 and 4 bits": (small(3, 4), FIRST),
    "4 and 3 bits, abreast": (small(4, 3, x="bfloat16"), dataclasses.replace(FIRST, abreast=True)),
    "4 bits and numbers, zero": (small(4, 32, zero=True, group_size=32, shared_bits=16), SECOND),
    "codes abreast beside numbers": (
        small(4, 8, shared_bits=16, x="bfloat16"),
        dataclasses.replace(SECOND, abreast=True),
    ),
    "numbers and 8 bits": (small(16, 8, shared_hidden=0, x="bfloat16", inner="float32"), FIRST),
}
ON_GPU = CASES | {
    f"{bits} and {down_bits} bits, {shared_bits} shared, {name}": (
        small(bits, down_bits, shared_bits=shared_bits, tokens=7, x=x),
        config,
    )
    for bits, down_bits, shared_bits, x in (
        (3, 3, 8, "float32"),
        (4, 8, 3, "bfloat16"),
        (8, 4, 16, "float32"),
        (32, 16, 4, "float32"),
    )
    for name, config in (
        ("narrow", FewTokens(Cut(8, 32, 1), Cut(8, 64, 2), 2)),
        (
            "wide",
            FewTokens(Cut(8, 64, 2), Cut(8, 128, 4), 2, abreast=x == "bfloat16"),
        ),
    )
}
# Sums of codes are less exact than float32. What lies between is rounded to bfloat16.
SUMS = 3e-4
HIDDEN = {"bfloat16": 3e-3, "float32": SUMS}
WHOLE = {"bfloat16": 3e-3, "float32": 2 * SUMS}


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
    """Silu(gate) * up."""
    made = gate @ x
    return made / (1 + np.exp(-made)) * (up @ x)


def oracle_of_gated(ids: np.ndarray, wide: tuple[Any, ...]) -> list[np.ndarray]:
    """What the first launch makes, but for its rounding; zero for empty slots."""
    x, _, up, _, shared = wide
    slots = np.zeros((ids.size, up.shape[1] // 2))
    for index, expert in enumerate(ids.reshape(-1)):
        if 0 <= expert < EXPERTS:
            slots[index] = gated(x[index // SLOTS], *np.split(up[expert], 2))
    if shared is None:
        return [slots]
    own = [gated(row, shared["gate_proj"], shared["up_proj"]) for row in x]
    return [slots, np.stack(own), 1 / (1 + np.exp(-x @ shared["gate"].T))]


def oracle_of_down(made: list[np.ndarray], ids: np.ndarray, wide: tuple[Any, ...]) -> np.ndarray:
    """What the second launch makes of it."""
    x, weights, _, below, shared = wide
    result = np.zeros(x.shape)
    for m, a in np.ndindex(*ids.shape):
        if 0 <= ids[m, a] < EXPERTS:
            result[m] += weights[m, a] * (below[ids[m, a]] @ made[0][m * SLOTS + a])
    return result if shared is None else result + made[2] * (made[1] @ shared["down_proj"].T)


def check(spec: Spec, config: FewTokens | SomeTokens) -> None:
    """Both launches, each from what it is given."""
    (x, ids, weights, up, below, shared), wide = drawn(spec)
    numbers, inner = np.asarray(ids), jnp.dtype(spec.inner)
    empty = jnp.asarray((numbers < 0) | (numbers >= EXPERTS))
    first = jax.jit(gate_up.gated, static_argnums=(4, 5, 6))
    slots, *own = first(x, ids, up, shared, inner, config, matrix_of(below))
    plain, holes = slots, empty.reshape(-1, 1)
    if isinstance(below, QTensor) and inner == jnp.bfloat16:
        # From the order in which codes meet them, and back: 8 values of each unit in turn.
        count, units = config.down.units, -(-spec.hidden // 32)
        wide_slots = slots.reshape(spec.tokens, -1, 4, count, 8).transpose(0, 1, 3, 2, 4)
        wide_slots = wide_slots.reshape(spec.tokens, -1)[:, : SLOTS * units * 32]
        plain = wide_slots.reshape(-1, units * 32)[:, : spec.hidden]
        holes = jnp.repeat(empty, units * 32, axis=1)
        holes = jnp.pad(holes, ((0, 0), (0, slots.shape[1] - holes.shape[1])))
        holes = holes.reshape(spec.tokens, -1, count, 4, 8).transpose(0, 1, 3, 2, 4)
        holes = holes.reshape(slots.shape)
    made = [jnp.where(empty.reshape(-1, 1), 0, plain), *own]
    for found, wanted in zip(made, oracle_of_gated(numbers, wide), strict=True):
        assert norm_error(found, wanted) < HIDDEN[spec.inner]

    spoilt = (jnp.where(holes, jnp.nan, slots), *own)
    lost = jnp.where(empty, jnp.nan, weights)
    second = jax.jit(down.summed, static_argnums=(6, 7))
    residual = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)
    y = second(spoilt, ids, lost, below, shared, residual, jnp.dtype("float32"), config.down)
    wanted = oracle_of_down([np.asarray(each, np.float64) for each in made], numbers, wide)
    assert norm_error(y, wanted + np.asarray(residual)) < SUMS
    padding = ~wanted.any(axis=1)
    np.testing.assert_array_equal(y[padding], residual[padding])


def check_whole(spec: Spec, config: FewTokens | SomeTokens) -> None:
    """Both launches together."""
    arrays, wide = drawn(spec)
    run = functools.partial(triton.expert_dispatch, config=config, **spec.settings())
    numbers = np.asarray(arrays[1])
    made = oracle_of_gated(numbers, wide)
    wanted = oracle_of_down(made, numbers, wide)
    assert norm_error(jax.jit(run)(*arrays), wanted) < WHOLE[spec.inner]
    if arrays[-1] is None:
        return
    # The first token leaves the shared expert out, the second has a strength given.
    logit = np.full((spec.tokens, 1), np.nan, np.float32)
    logit[:2, 0] = -np.inf, 0.5
    made[2][:2, 0] = 0, 1 / (1 + np.exp(-0.5))
    shared = dataclasses.replace(arrays[-1], logit=jnp.asarray(logit))
    wanted = oracle_of_down(made, numbers, wide)
    assert norm_error(jax.jit(run)(*arrays[:-1], shared), wanted) < WHOLE[spec.inner]


@pytest.mark.parametrize(
    "name", [*list(CASES)[:-1], pytest.param(list(CASES)[-1], marks=pytest.mark.slow)]
)
def test_both_launches_equal_the_formula(name):
    with interpreted():
        check(*CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_both_launches_on_a_gpu(name):
    check(*ON_GPU[name])
    check_whole(*ON_GPU[name])


# Of most experts more slots than a row holds, of one none; in three tiles or more, none full.
SOME = SomeTokens(
    SomeRows(4, 32, blocks=2), SomeRows(4, 32), SomeRows(8, 32), SomeRows(16, 32, blocks=2)
)
TOGETHER = {
    "3 and 4 bits": small(3, 4, tokens=37, group_size=128, width=420),
    "4 and 3 bits, zero": small(4, 3, tokens=19, zero=True, group_size=32, width=420),
    "3 and 8 bits, alone": small(3, 8, tokens=19, shared_hidden=0, hidden=128, width=420),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_tokens_that_share_experts(name):
    with interpreted():
        check_whole(TOGETHER[name], SOME)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("name", TOGETHER)
def test_tokens_that_share_experts_on_a_gpu(name, bits):
    check_whole(dataclasses.replace(TOGETHER[name], shared_bits=bits), SOME)


def test_rows_of_experts():
    """Every filled slot is in one row, of its expert and behind its first slot."""
    ids = np.random.default_rng(0).integers(-1, EXPERTS + 1, (23, SLOTS)).astype(np.int32)
    experts, slots = map(np.asarray, rows_of_experts(jnp.asarray(ids), EXPERTS, 4))
    flat, seen = ids.reshape(-1), []
    for first in np.flatnonzero(experts >= 0):
        row = slots[first][slots[first] < ids.size]
        assert (flat[row] == experts[first]).all()
        assert row[0] == first
        seen += row.tolist()
    assert sorted(seen) == np.flatnonzero((flat >= 0) & (flat < EXPERTS)).tolist()


@pytest.mark.parametrize("name", ["1 token", "8 tokens, bf16", "1 token, groups of 32, zero"])
def test_lowers_for_cuda(name):
    spec = SPECS[name]
    run = functools.partial(triton.expert_dispatch, **spec.settings())
    assert lower_for_cuda(run, *spec.arguments()).count("xla.gpu.triton") == 2


def test_tokens_that_share_experts_lower_for_cuda():
    """Both products, and their sum."""
    run = functools.partial(triton.expert_dispatch, **SPECS["32 tokens"].settings())
    text = lower_for_cuda(run, *SPECS["32 tokens"].arguments())
    assert text.count("xla.gpu.triton") == 3


@pytest.mark.parametrize(
    ("spec", "kind", "abreast"),
    [
        (Spec(1), FewTokens, False),
        (Spec(8), FewTokens, True),
        (Spec(8, shared_bits=16), FewTokens, False),
        (Spec(12), SomeTokens, None),
        (Spec(64, down_bits=8, shared_hidden=0), SomeTokens, None),
        (Spec(64, bits=4, group_size=32), SomeTokens, None),
        (Spec(64, down_bits=4, group_size=32), SomeTokens, None),
        (Spec(64, bits=16), FewTokens, False),
        (Spec(64, shared_bits=16), FewTokens, False),
    ],
)
def test_which_tokens_share_tiles(spec, kind, abreast):
    x, ids, _, up, below, shared = spec.arguments()
    with targeting(H200):
        config = triton.chosen(x, ids, up, below, shared, jnp.bfloat16)
    assert type(config) is kind
    assert getattr(config, "abreast", None) is abreast
    if kind is SomeTokens:
        assert config.gate_up.rows == config.down.rows
        # Tensor cores take eight columns or more; of two blocks of 32, sums leave the registers.
        for cut, weight in ((config.gate_up, up), (config.down, below)):
            copies = 128 // weight.group_size if weight.bits == 3 else 1
            assert 8 <= cut.rows * copies <= 32 // cut.blocks


def test_what_was_measured_counts_for_the_same_shared_expert_alone():
    """Tensor cores, and inputs abreast, are for codes."""
    several = [Spec(8, shared_bits=bits) for bits in (3, 8, 16)] + [Spec(8, shared_hidden=0)]
    with targeting(H200), tuning.listening() as heard:
        for spec in several:
            x, ids, _, up, below, shared = spec.arguments()
            triton.chosen(x, ids, up, below, shared, jnp.bfloat16)
    assert len(heard) == len(several)


@pytest.mark.parametrize(
    ("call", "units", "cut"),
    [
        ((1, 8, 2048, 512), (64, 16), FewTokens(Cut(8, 64, 2), Cut(8, 128, 4), 2)),
        ((1, 8, 256, 64), (8, 2), FewTokens(Cut(4, 8, 1), Cut(2, 16, 1), 4)),
    ],
    ids=["qwen3.6-35b-a3b", "small"],
)
def test_a_program_takes_many_outputs_if_there_is_work_for_all_multiprocessors(call, units, cut):
    assert heuristic(132, *call, *units) == cut
