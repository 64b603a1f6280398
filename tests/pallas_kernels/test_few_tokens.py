"""Experts of few tokens: each launch, and both, against float64; empty slots may hold anything."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.expert_dispatch import down, gate_up, triton
from pallas_kernels.expert_dispatch.config import Cut, FewTokens, heuristic
from pallas_kernels.expert_dispatch.matrix import matrix_of
from pallas_kernels.expert_dispatch.specs import SPECS, Spec
from pallas_kernels.testing import interpreted, norm_error
from tests.pallas_kernels.expert_calls import (
    EXPERTS,
    HIDDEN,
    SLOTS,
    SUMS,
    check_whole,
    drawn,
    oracle_of_down,
    oracle_of_gated,
    small,
)

FIRST = FewTokens(Cut(16, 8, 1, awaited=True), Cut(16, 4, 1), 4)
SECOND = FewTokens(Cut(16, 4, 1), Cut(8, 8, 1, awaited=True), 8)
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
            FewTokens(
                Cut(8, 64, 2, awaited=True),
                Cut(8, 128, 4, awaited=True),
                2,
                abreast=x == "bfloat16",
            ),
        ),
    )
}


def check(spec: Spec, config: FewTokens) -> None:
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


@pytest.mark.parametrize("name", ["1 token", "8 tokens, bf16", "1 token, groups of 32, zero"])
def test_lowers_for_cuda(name):
    spec = SPECS[name]
    run = functools.partial(triton.expert_dispatch, **spec.settings())
    assert lower_for_cuda(run, *spec.arguments()).count("xla.gpu.triton") == 2


def test_awaited_codes_lower_for_cuda():
    """Both kernels count the bits of all that they read."""
    spec, config = (
        SPECS["1 token"],
        FewTokens(Cut(8, awaited=True), Cut(8, 128, 4, awaited=True), 2),
    )
    run = functools.partial(triton.expert_dispatch, config=config, **spec.settings())
    text = lower_for_cuda(run, *spec.arguments())
    kernels = [part for part in text.split("xla.gpu.triton")[1:] if "popc.b32" in part]
    assert len(kernels) == 2


@pytest.mark.parametrize(
    ("call", "units", "cut"),
    [
        ((1, 8, 2048, 512), (64, 16), FewTokens(Cut(8, 64, 2, True), Cut(8, 128, 4), 2)),
        ((1, 8, 256, 64), (8, 2), FewTokens(Cut(4, 8, 1, True), Cut(2, 16, 1), 4)),
    ],
    ids=["qwen3.6-35b-a3b", "small"],
)
def test_a_program_takes_many_outputs_if_there_is_work_for_all_multiprocessors(call, units, cut):
    assert heuristic(132, *call, *units, bits=3) == cut


@pytest.mark.parametrize(
    ("tokens", "bits", "awaited"),
    [(1, 3, True), (1, 4, True), (1, 8, False), (1, 0, False), (2, 3, False)],
)
def test_gates_of_one_token_await_all_codes(tokens, bits, awaited):
    assert heuristic(132, tokens, 8, 2048, 512, 64, 16, bits=bits).gate_up.awaited is awaited
