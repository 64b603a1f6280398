"""The shared expert as products of all tokens, against float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.dispatch import recording
from pallas_kernels.expert_dispatch.shared import SharedExpert
from pallas_kernels.expert_dispatch.shared_products import shared_products
from pallas_kernels.testing import interpreted, norm_error
from tests.pallas_kernels.expert_calls import filled, gated, small

WIDTH, HIDDEN_WIDTH = 600, 300
PRODUCTS = functools.partial(shared_products, dtype=jnp.bfloat16)
# What lies between is rounded to bfloat16; from 65 rows on, weights in codes are too.
SUMS, ROUNDED = 2.2e-3, 4.2e-3


def structs(bits: int, group_size: int, tokens: int) -> tuple[Any, SharedExpert]:
    """Shapes of tokens and an expert: three tiles or more along each axis, none of them full.

    The down projection is stored in another way: 3 bits behind 8, codes behind arrays, and so on.
    """
    x = jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)
    weight = small(3, 3, group_size=group_size).weight
    above, below = (HIDDEN_WIDTH, WIDTH), (WIDTH, HIDDEN_WIDTH)
    gate: Any = jax.ShapeDtypeStruct((1, WIDTH), jnp.bfloat16)
    other = {3: 8, 8: 3, 16: 16}[bits]
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
        logit[::3], logit[1:2] = np.nan, -np.inf
        shared = dataclasses.replace(shared, logit=jnp.asarray(logit))
        logits = np.where(np.isnan(logit), logits, logit.astype(np.float64))
    strengths = 1 / (1 + np.exp(-logits))
    # Strengths are of tokens as they are.
    rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
    between = gated(rounded, gate_proj, up_proj)
    wanted = strengths * (between @ down_proj.T)

    y = np.asarray(jax.jit(PRODUCTS)(x, shared))
    assert y.dtype == np.float32
    assert norm_error(y, wanted) < (ROUNDED if tokens > 64 and bits < 16 else SUMS)
    # What a strength of zero leaves out is nothing at all.
    assert not y[strengths[:, 0] == 0].any()


CALLS = pytest.mark.parametrize(
    ("bits", "group_size", "tokens", "given"),
    [
        (bits, group_size, tokens, given)
        for bits in (3, 8)
        for group_size in (64, 128)
        for tokens, given in ((11, True), (33, False))
    ]
    + [(3, 64, 33, True), (3, 128, 8, True), (8, 64, 11, False), (8, 128, 1, False)]
    + [(8, 64, 1, True), (8, 64, 8, False), (3, 64, 65, True), (8, 128, 65, False)]
    + [(16, 64, tokens, tokens != 33) for tokens in (1, 8, 33, 65)],
)


@CALLS
def test_shared_expert(bits, group_size, tokens, given):
    with interpreted():
        check(bits, group_size, tokens, given=given)


@pytest.mark.gpu
@CALLS
def test_shared_expert_on_a_gpu(bits, group_size, tokens, given):
    check(bits, group_size, tokens, given=given)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("bits", "tokens"), [(3, 1), (3, 8), (8, 33), (8, 64), (3, 65), (16, 33)])
def test_lowers_for_cuda(bits, tokens, given):
    """Gates and the rows above are one launch up to 64 rows; arrays are XLA's products."""
    x, shapes = structs(bits, 64, tokens)
    if given:
        shapes = dataclasses.replace(shapes, logit=jax.ShapeDtypeStruct((tokens, 1), jnp.float32))
    with recording() as calls:
        text = lower_for_cuda(PRODUCTS, x, shapes)
    launches = text.count("xla.gpu.triton")
    assert launches == (0 if bits == 16 else 2 if tokens <= 64 else 3)
    assert text.count("stablehlo.dot_general") == (3 if bits == 16 else 0)
    # A report of a model's operations counts what the model calls, and this is a part of one.
    assert not calls
