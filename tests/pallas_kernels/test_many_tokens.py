"""Experts of many tokens: sorted slots and grouped products, against a loop in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.dequant_matmul.layout import CENTRES, group_count, pack
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.expert_dispatch import many_tokens as module
from pallas_kernels.expert_dispatch import sorting
from pallas_kernels.expert_dispatch.many_tokens import many_tokens
from pallas_kernels.expert_dispatch.many_tokens_config import Grouped, ManyTokens, heuristic
from pallas_kernels.testing import interpreted, norm_error

pytestmark = pytest.mark.usefixtures("fast_compile_all")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A call. Bits 16 are numbers in bfloat16."""

    tokens: int = 70
    slots: int = 3
    experts: int = 5
    width: int = 200
    hidden: int = 72
    bits: int = 3
    group: int = 64
    zero: bool = False


def stack(rng, experts, outputs, inputs, sizes: Sizes):
    """Random matrices, and the numbers that they stand for in float64."""
    if sizes.bits == 16:
        wide = rng.standard_normal((experts, outputs, inputs)) / inputs**0.5
        weight = jnp.asarray(wide, jnp.bfloat16)
        return weight, np.asarray(weight, np.float64)
    values = rng.integers(0, 2**sizes.bits, (experts, outputs, inputs)).astype(np.uint8)
    groups = (experts, outputs, group_count(inputs, sizes.group))
    scale = rng.uniform(0.5, 1.5, groups) * rng.choice((-1, 1), groups) / inputs**0.5
    scale = jnp.asarray(scale * 4 / 2**sizes.bits, jnp.bfloat16)
    zero = None
    if sizes.zero:
        zero = jnp.asarray(rng.uniform(0, 2**sizes.bits, groups), jnp.bfloat16)
    group = np.arange(inputs) // sizes.group
    centre = CENTRES[sizes.bits] if zero is None else np.asarray(zero, np.float64)[..., group]
    wide = np.asarray(scale, np.float64)[..., group] * (values - centre)
    return QTensor(jnp.asarray(pack(values, sizes.bits)), scale, zero, None, inputs, sizes.group), wide


@functools.cache
def drawn(sizes: Sizes):
    rng = np.random.default_rng(sizes.tokens)
    x = jnp.asarray(rng.standard_normal((sizes.tokens, sizes.width)), jnp.bfloat16)
    ids = np.stack([rng.permutation(sizes.experts)[: sizes.slots] for _ in range(sizes.tokens)])
    weights = rng.random((sizes.tokens, sizes.slots), np.float32)
    up, wide_up = stack(rng, sizes.experts, 2 * sizes.hidden, sizes.width, sizes)
    down, wide_down = stack(rng, sizes.experts, sizes.width, sizes.hidden, sizes)
    return (x, ids.astype(np.int32), weights, up, down), (wide_up, wide_down)


def oracle(x, ids, weights, up, down):
    x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
    result = np.zeros(x.shape)
    for m, a in np.ndindex(*ids.shape):
        if 0 <= ids[m, a] < len(up):
            gate, value = np.split(up[ids[m, a]] @ x[m], 2)
            result[m] += weights[m, a] * (down[ids[m, a]] @ (gate / (1 + np.exp(-gate)) * value))
    return result


def run(config, x, ids, weights, up, down, dtype=jnp.float32):
    with interpreted():
        call = jax.jit(functools.partial(many_tokens, dtype=dtype, config=config))
        return call(x, jnp.asarray(ids), jnp.asarray(weights), up, down)


def config(rows=16, outputs=16, units=2, unpacked=False) -> ManyTokens:
    return ManyTokens(rows, *(Grouped(outputs, units, 4, 2),) * 2, unpacked)


CASES = {
    "bfloat16": (Sizes(bits=16), config()),
    "3 bits, sums": (Sizes(), config()),
    "3 bits, numbers": (Sizes(), config(units=4)),
    "4 bits, zero, sums": (Sizes(bits=4, group=32, zero=True), config(units=1)),
    "8 bits, zero, numbers": (Sizes(bits=8, group=32, zero=True), config(32, 32, 2)),
    "unpacked": (Sizes(zero=True, group=128), config(unpacked=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_experts(name):
    sizes, cut = CASES[name]
    arrays, wide = drawn(sizes)
    y = run(cut, *arrays)
    error = norm_error(y, oracle(*arrays[:3], *wide))
    print(name, error)
    assert error < 4e-3
