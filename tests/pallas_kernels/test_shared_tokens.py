"""The shared expert of some tokens in launches of its own, against float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.dequant_matmul.config import SomeRows
from pallas_kernels.expert_dispatch.shared import SharedExpert
from pallas_kernels.expert_dispatch.shared_tokens import Cuts, alone
from pallas_kernels.testing import interpreted, norm_error
from tests.pallas_kernels.expert_calls import WHOLE, filled, gated, small

CUTS = Cuts(SomeRows(8, 32, num_warps=1, blocks=2), SomeRows(16, 32))
WIDTH, HIDDEN_WIDTH = 600, 300


def structs(bits: int, group_size: int, tokens: int) -> tuple[Any, SharedExpert]:
    """Shapes of tokens and an expert: three tiles or more along each axis, none of them full.

    What lies between the launches has the order of the other number of bits.
    """
    x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)
    weight = small(3, 3, group_size=group_size).weight
    above, below = (HIDDEN_WIDTH, WIDTH), (WIDTH, HIDDEN_WIDTH)
    gate = jax.ShapeDtypeStruct((1, WIDTH), jnp.bfloat16)
    other = {3: 8, 8: 3}[bits]
    return x, SharedExpert(weight(above, bits), weight(above, bits), weight(below, other), gate)


def check(bits: int, group_size: int, tokens: int, *, given: bool) -> None:
    """`given`: with logits that are given, but for some."""
    rng = np.random.default_rng(bits)
    like, shapes = structs(bits, group_size, tokens)
    x = jnp.asarray(rng.standard_normal(like.shape), like.dtype)
    names = ("gate_proj", "up_proj", "down_proj", "gate")
    parts = {name: filled(rng, getattr(shapes, name)) for name in names}
    shared = SharedExpert(**{name: weight for name, (weight, _) in parts.items()})
    gate_proj, up_proj, down_proj, gate = (wide for _, wide in parts.values())
    wide = np.asarray(x, np.float64)
    logits = wide @ gate.T
    if given:
        logit = rng.standard_normal(logits.shape).astype(np.float32)
        logit[::3], logit[1] = np.nan, -np.inf
        shared = dataclasses.replace(shared, logit=jnp.asarray(logit))
        logits = np.where(np.isnan(logit), logits, logit.astype(np.float64))
    strengths = 1 / (1 + np.exp(-logits))
    between = np.stack([gated(row, gate_proj, up_proj) for row in wide])

    y = jax.jit(functools.partial(alone, cuts=CUTS))(x, shared)
    assert y.dtype == jnp.float32
    assert norm_error(y, strengths * (between @ down_proj.T)) < WHOLE["bfloat16"]


CALLS = pytest.mark.parametrize(
    ("bits", "group_size", "tokens", "given"),
    [
        (bits, group_size, tokens, given)
        for bits in (3, 8)
        for group_size in (64, 128)
        for tokens, given in ((11, True), (33, False))
    ]
    + [(3, 64, 33, True), (8, 64, 11, False), (8, 128, 1, False)],
)


@CALLS
def test_shared_expert_alone(bits, group_size, tokens, given):
    with interpreted():
        check(bits, group_size, tokens, given=given)


@pytest.mark.gpu
@CALLS
def test_shared_expert_alone_on_a_gpu(bits, group_size, tokens, given):
    check(bits, group_size, tokens, given=given)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("bits", [3, 8])
def test_lowers_for_cuda(bits, given):
    """A launch each for gates and down projections, with their own warps; and tokens in order."""
    x, shapes = structs(bits, 64, 33)
    shared = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    if given:
        shared = dataclasses.replace(shared, logit=jnp.zeros((33, 1)))
    text = lower_for_cuda(functools.partial(alone, cuts=CUTS), x, shared)
    assert text.count("xla.gpu.triton") == 2
    for name, cut in (("gates", CUTS.gates), ("down", CUTS.down)):
        [call] = [line for line in text.splitlines() if f"expert_dispatch_shared_{name}" in line]
        assert f"num_warps = {cut.num_warps} : i32" in call
