"""Experts of many tokens: sorted slots and grouped products, against a loop in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, lower_for_cuda
from pallas_kernels.dequant_matmul.layout import CENTRES, group_count, pack, unit_count
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.expert_dispatch import combine, sorting
from pallas_kernels.expert_dispatch import many_tokens as module
from pallas_kernels.expert_dispatch.many_tokens import many_tokens
from pallas_kernels.expert_dispatch.many_tokens_config import Grouped, ManyTokens, heuristic
from pallas_kernels.testing import interpreted, norm_error

SETTINGS: dict[str, Any] = {
    "shared": None,
    "residual": None,
    "inner_dtype": jnp.bfloat16,
    "dtype": jnp.float32,
}


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
    return QTensor(
        jnp.asarray(pack(values, sizes.bits)), scale, zero, None, inputs, sizes.group
    ), wide


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


@functools.cache
def compiled(config):
    return jax.jit(functools.partial(many_tokens, **SETTINGS, config=config))


def run(config, x, ids, weights, up, down):
    with interpreted():
        return compiled(config)(x, jnp.asarray(ids), jnp.asarray(weights), up, down)


def config(rows=16, outputs=32, units=2, turns=1, unpacked=False) -> ManyTokens:
    return ManyTokens(rows, *(Grouped(outputs, units, 4, 2, turns),) * 2, unpacked)


# Weights that are rounded to bfloat16 cost more than what lies between the products does.
SUMS, ROUNDED = 3e-3, 4.2e-3
SLOW = ("3 bits, sums", "8 bits, zero, numbers")
CASES = {
    "bfloat16": (Sizes(bits=16), config(), SUMS),
    "3 bits, sums": (Sizes(), config(), SUMS),
    "3 bits, turns": (Sizes(width=580), config(turns=4), ROUNDED),
    "4 bits, zero, sums": (Sizes(bits=4, group=32, zero=True), config(units=1), SUMS),
    "8 bits, zero, numbers": (Sizes(bits=8, group=32, zero=True), config(32, 32, 2), ROUNDED),
    "unpacked": (Sizes(zero=True, group=128), config(unpacked=True), ROUNDED),
}
# The parts that matrices are made in show "unpacked" as well; the others most of the slow ones.
INTERPRETED = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in CASES
    if name != "unpacked"
]


def check(arrays, wide, cut, bar, implementation=run):
    y = np.asarray(implementation(cut, *arrays), np.float64)
    wanted = oracle(*arrays[:3], *wide)
    assert norm_error(y, wanted) < bar
    assert not y[~wanted.any(axis=1)].any()


@pytest.mark.parametrize("name", INTERPRETED)
def test_experts_match_the_loop(name):
    sizes, cut, bar = CASES[name]
    check(*drawn(sizes), cut, bar)


def test_any_routing():
    """Empty slots, experts without tokens, a token of padding; the same program each time."""
    (x, ids, weights, *stacks), wide = drawn(Sizes())
    rng = np.random.default_rng(1)
    for part in (0.3, 0.97):
        empty = rng.random(ids.shape) < part
        mixed = np.where(empty, rng.choice([5, -1, 2**31 - 1, -(2**31)], ids.shape), ids)
        mixed[7] = -1
        spoilt = np.where((mixed >= 0) & (mixed < 5), weights, np.nan).astype(np.float32)
        padded = x.at[7].set(jnp.nan)
        y = np.asarray(run(config(), padded, mixed.astype(np.int32), spoilt, *stacks), np.float64)
        wanted = oracle(x, mixed, weights, *wide)
        assert norm_error(y, wanted) < SUMS
        assert not y[7].any()
    for experts in ([3], [1, 4]):
        crowded = rng.choice(experts, ids.shape).astype(np.int32)
        check((x, crowded, weights, *stacks), wide, config(), SUMS)
    assert not np.asarray(run(config(), x, np.full_like(ids, -1), weights, *stacks)).any()


def test_matrices_are_made_part_by_part(monkeypatch):
    """Two experts at a time, of which the last part has one."""
    monkeypatch.setattr(module, "PART_BYTES", 2 * 2 * 200 * 144)
    cut = config(unpacked=True)
    arrays, wide = drawn(Sizes(experts=3, zero=True, group=128))
    check(arrays, wide, cut, ROUNDED)
    text = str(jax.make_jaxpr(functools.partial(run, cut))(*arrays))
    assert "bf16[288,200]" in text
    assert "bf16[432,200]" not in text


@pytest.mark.parametrize(
    ("slots", "experts", "rows", "blocks"),
    [(1, 1, 16, 128), (300, 3, 128, 128), (1300, 60, 16, 2), (1100, 300, 32, 128)],
)
def test_sorting(slots, experts, rows, blocks, monkeypatch):
    """Stable, and every tile of one expert; with blocks, and shares of tiles, that are not full."""
    monkeypatch.setattr(sorting, "BLOCKS", blocks)
    rng = np.random.default_rng(slots)
    ids = rng.integers(-1, experts + 1, (slots, 1)).astype(np.int32)
    ids[: slots // 2] = np.minimum(ids[: slots // 2], experts // 2)
    with interpreted():
        tiles = jax.jit(lambda ids: sorting.sort(ids, experts, rows))(jnp.asarray(ids))
    tiles = sorting.Tiles(*map(np.asarray, tiles))
    filled = np.flatnonzero((ids >= 0) & (ids < experts))
    order = filled[np.argsort(ids[filled, 0], kind="stable")]
    np.testing.assert_array_equal(tiles.slot[: order.size], order)
    assert tiles.rows.size == sorting.tile_count(slots, experts, rows)
    place = 0
    for expert, first, count in zip(*tiles[1:4], strict=True):
        if count == 0:
            continue
        assert first == place and count <= rows
        assert (ids[order[first : first + count], 0] == expert).all()
        place += count
    assert place == order.size
    most = np.bincount(ids[filled, 0], minlength=experts)
    assert tiles.total == np.count_nonzero(tiles.rows) == np.sum(-(-most // rows))


@pytest.mark.parametrize("shared", [False, True])
def test_sums(shared):
    """Slots that are not filled may hold anything."""
    rng = np.random.default_rng(0)
    y = rng.standard_normal((15, 2200)).astype(jnp.bfloat16)
    ids, weights = rng.integers(-1, 4, (5, 3)), rng.random((5, 3), np.float32)
    filled = (ids >= 0) & (ids < 3)
    assert filled.any() and not filled.all()
    y[~filled.ravel()] = np.nan
    beside = rng.standard_normal((5, 2200), np.float32)
    numbers = np.asarray(y, np.float64).reshape(5, 3, 2200)
    wanted = np.einsum("mad,ma->md", np.where(filled[..., None], numbers, 0), weights)
    if shared:
        wanted += beside
    call = functools.partial(combine.summed, experts=3, dtype=jnp.float32)
    arrays = [jnp.asarray(a) for a in (y, ids.astype(np.int32), np.where(filled, weights, np.nan))]
    with interpreted():
        found = jax.jit(call)(*arrays, shared=jnp.asarray(beside) if shared else None)
    assert norm_error(found, wanted) < 1e-6


def abstract(tokens: int, sizes: Sizes):
    """Shapes of a call of the model's sizes."""
    of, experts, width, hidden = jax.ShapeDtypeStruct, 256, 2048, 512

    def weight(outputs, inputs):
        if sizes.bits == 16:
            return of((experts, outputs, inputs), jnp.bfloat16)
        scale = of((experts, outputs, group_count(inputs, sizes.group)), jnp.bfloat16)
        codes = of((experts, outputs, sizes.bits, unit_count(inputs)), jnp.uint32)
        return QTensor(codes, scale, scale if sizes.zero else None, None, inputs, sizes.group)

    routing = of((tokens, 8), jnp.int32), of((tokens, 8), jnp.float32)
    x = of((tokens, width), jnp.bfloat16)
    return x, *routing, weight(2 * hidden, width), weight(width, hidden)


@pytest.mark.parametrize(
    ("tokens", "sizes", "launches"),
    [
        (65, Sizes(), 6),
        (512, Sizes(bits=4, group=32, zero=True), 6),
        # Parts of 64 experts of the first stack, and of 128 of the second.
        (8192, Sizes(zero=True), 4 + 2 * (4 + 2)),
        (8192, Sizes(bits=16), 6),
    ],
)
def test_lowers_for_cuda(tokens, sizes, launches):
    cut = heuristic(H200, tokens, 8, 256)
    call = functools.partial(many_tokens, **SETTINGS, config=cut)
    text = lower_for_cuda(call, *abstract(tokens, sizes))
    assert text.count("xla.gpu.triton") == launches


def on_a_gpu(cut, *arrays):
    return jax.jit(functools.partial(many_tokens, **SETTINGS, config=cut))(*arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_experts_on_a_gpu(name):
    sizes, cut, bar = CASES[name]
    check(*drawn(sizes), cut, bar, on_a_gpu)


def test_slots_are_summed_with_what_is_beside_them():
    """Of two programs' columns; the last slot is empty and may hold anything."""
    rng = np.random.default_rng(3)
    y, shared, residual = (rng.standard_normal((size, 1100)) for size in (6, 2, 2))
    weights = rng.random((2, 3))
    y[5], ids = np.nan, np.asarray([[0, 3, 1], [2, 2, 4]], np.int32)
    wanted = residual + shared
    for slot in range(5):
        wanted[slot // 3] += weights[slot // 3, slot % 3] * y[slot]
    given = (jnp.asarray(each, jnp.float32) for each in (y, weights, shared, residual))
    y, weights, shared, residual = given
    with interpreted():
        found = combine.summed(y, jnp.asarray(ids), weights, 4, jnp.float32, shared, residual)
    assert norm_error(found, wanted) < 1e-6
