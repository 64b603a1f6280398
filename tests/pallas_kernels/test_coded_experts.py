"""`expert_dispatch` with experts in codes: against float64, and never all of them as numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dequant_matmul.layout import CENTRES, group_count, pack, unit_count
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.expert_dispatch import expert_dispatch
from pallas_kernels.expert_dispatch.reference import GATHER_TOKENS

run = jax.jit(expert_dispatch)

WIDTH, HIDDEN, EXPERTS, SLOTS = 72, 40, 6, 3
RNG = np.random.default_rng(0)


def stack(outputs, inputs, bits, group_size, *, zero=False, input_scale=False):
    """Random experts in codes, and the numbers that they stand for in float64."""
    values = RNG.integers(0, 2**bits, (EXPERTS, outputs, inputs)).astype(np.uint8)
    groups = (EXPERTS, outputs, group_count(inputs, group_size))
    scale = RNG.uniform(0.5, 1.5, groups).astype(np.float32) / 2**bits / inputs**0.5
    zeros = RNG.uniform(0, 2**bits, groups).astype(np.float32) if zero else None
    factor = None
    if input_scale:
        factor = RNG.uniform(0.5, 2, (EXPERTS, inputs)).astype(np.float32)
    group = np.arange(inputs) // group_size
    centre = CENTRES[bits] if zeros is None else zeros[..., group].astype(np.float64)
    wide = scale[..., group].astype(np.float64) * (values - centre)
    if factor is not None:
        wide = wide * factor[:, None, :]
    arrays = [None if a is None else jnp.asarray(a) for a in (scale, zeros, factor)]
    return QTensor(jnp.asarray(pack(values, bits)), *arrays, inputs, group_size), wide


def routed(tokens):
    ids = np.stack([RNG.permutation(EXPERTS)[:SLOTS] for _ in range(tokens)]).astype(np.int32)
    ids[0, 1] = -1
    x = RNG.standard_normal((tokens, WIDTH)).astype(np.float32)
    return x, ids, RNG.random((tokens, SLOTS), np.float32)


def oracle(x, ids, weights, up, down):
    result = np.zeros(x.shape)
    for m, a in np.ndindex(*ids.shape):
        if ids[m, a] >= 0:
            gate, value = np.split(up[ids[m, a]] @ x[m].astype(np.float64), 2)
            result[m] += weights[m, a] * (down[ids[m, a]] @ (gate / (1 + np.exp(-gate)) * value))
    return result


@pytest.mark.parametrize(
    ("tokens", "bits"),
    [(1, (3, 4)), (GATHER_TOKENS, (8, 3)), (GATHER_TOKENS + 1, (3, 4))],
)
def test_codes_match_the_loop(tokens, bits):
    up, wide_up = stack(2 * HIDDEN, WIDTH, bits[0], 64, zero=bits[0] == 8, input_scale=True)
    down, wide_down = stack(WIDTH, HIDDEN, bits[1], 32, zero=bits[1] == 4)
    given = routed(tokens)
    wanted = oracle(*given, wide_up, wide_down)

    actual = np.asarray(run(*given, up, down))

    assert np.abs(actual - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("tokens", "array"), [(2, "up"), (70, "down")])
def test_one_stack_of_the_two_may_be_an_array(tokens, array):
    up, wide_up = stack(2 * HIDDEN, WIDTH, 3, 32)
    down, wide_down = stack(WIDTH, HIDDEN, 4, 32, input_scale=True)
    given = routed(tokens)
    wanted = oracle(*given, wide_up, wide_down)
    if array == "up":
        up = wide_up.astype(np.float32)
    else:
        down = wide_down.astype(np.float32)
    actual = np.asarray(run(*given, up, down))
    assert np.abs(actual - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("tokens", [1, 512])
def test_the_experts_are_never_numbers_all_at_once(tokens):
    """Beside its arguments the program holds what is routed, whatever the number of experts."""
    width, hidden, experts, slots = 128, 64, 128, 8

    def abstract(outputs, inputs):
        of = jax.ShapeDtypeStruct
        codes = of((experts, outputs, 3, unit_count(inputs)), jnp.uint32)
        scale = of((experts, outputs, group_count(inputs, 64)), jnp.bfloat16)
        return QTensor(codes, scale, None, None, inputs, 64)

    of = jax.ShapeDtypeStruct
    shapes = (
        of((tokens, width), jnp.float32),
        of((tokens, slots), jnp.int32),
        of((tokens, slots), jnp.float32),
        abstract(2 * hidden, width),
        abstract(width, hidden),
    )
    one_expert = 3 * width * hidden
    compiled = jax.jit(expert_dispatch).lower(*shapes).compile()
    held = compiled.memory_analysis().temp_size_in_bytes / 4
    routed = slots * one_expert if tokens == 1 else 2 * tokens * width + 4 * slots * tokens
    assert held < routed + 4 * one_expert
    assert held < experts * one_expert / 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale": np.ones((EXPERTS, WIDTH, 1), np.float32)}, "down_proj: scale is float32"),
        ({"codes": np.ones((EXPERTS, WIDTH, 3, 1), np.uint32)}, "down_proj: codes is uint32"),
        ({"codes": np.ones((EXPERTS, WIDTH, 5, 2), np.uint32)}, "codes have 5 words"),
        ({"codes": np.ones((EXPERTS, WIDTH, 3, 2), np.int32)}, "down_proj: codes is int32"),
        ({"zero": np.ones((1, WIDTH, 2), np.float32)}, "down_proj: zero is float32"),
        ({"input_scale": np.ones(HIDDEN, np.float32)}, "down_proj: input_scale is float32"),
        ({"group_size": 48}, "groups of 48"),
        ({"inputs": 39}, "gate_up_proj has 80 rows"),
    ],
)
def test_codes_that_contradict_one_another_are_refused(changes, reason):
    up, _ = stack(2 * HIDDEN, WIDTH, 3, 32)
    down, _ = stack(WIDTH, HIDDEN, 3, 32)
    changes = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in changes.items()}
    with pytest.raises(ExceptionGroup) as error:
        expert_dispatch(*map(jnp.asarray, routed(2)), up, dataclasses.replace(down, **changes))
    assert reason in str(error.value)


def test_the_width_is_held_against_the_tokens():
    up, _ = stack(2 * HIDDEN, 64, 3, 32)
    down, _ = stack(WIDTH, HIDDEN, 3, 32)
    with pytest.raises(ExceptionGroup, match="but D is 72 in x"):
        expert_dispatch(*map(jnp.asarray, routed(2)), up, down)
