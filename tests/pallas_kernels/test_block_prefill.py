"""The Triton kernel of `block_attention` for many new tokens: interpreted and lowered."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, current_target, lower_for_cuda
from pallas_kernels.attention.cut import Cut
from pallas_kernels.block_attention import BlockScales, block_attention, prefill
from pallas_kernels.block_attention.specs import SPECS, Spec
from pallas_kernels.testing import interpreted, norm_error, prefill_bar, token_error
from tests.pallas_kernels.blocks import Blocks, ragged


@dataclasses.dataclass(frozen=True)
class Case:
    """A call small enough to be interpreted; `new` are the new tokens of each sequence."""

    spec: Spec
    new: tuple[int, ...]
    cut: Cut | None


CASES = {
    "two blocks a tile": Case(
        Spec((200, 64, 130, 65, 1), 6, 2, 64, "bfloat16", 16),
        (33, 20, 1, 0, 1),
        Cut(32, 32, 4, 2),
    ),
    "window, sinks, tokens shared by three programs": Case(
        Spec((200, 64, 63, 2), 14, 2, 64, "float32", 32, window=40, sinks=19),
        (20, 15, 7, 0),
        Cut(32, 16, 4, 2, splits=3),
    ),
    "several tiles a block": Case(
        Spec((129, 128), 2, 1, 256, "bfloat16", 128), (40, 3), Cut(16, 32, 4, 2)
    ),
    "the heuristic's cut": Case(Spec((100, 24), 8, 1, 64, "float32", 64), (24, 24), None),
}


def check(normal, case: Case) -> None:
    """Compares the kernel with the formula, in a pool where all that is not a live token is NaN."""
    spec, lengths = case.spec, list(case.spec.lengths)
    blocks = Blocks.of(lengths, spec.block_size, heads=spec.kv_heads, width=spec.width)
    for pool in ("key", "value", "key_blocks", "value_blocks"):
        setattr(blocks, pool, getattr(blocks, pool).astype(jnp.dtype(spec.dtype)))
    blocks.table[blocks.table == 0] = 2**31 - 1
    positions = ragged(lengths, list(case.new))
    q = normal(*positions.shape, spec.query_heads, spec.width).astype(jnp.dtype(spec.dtype))
    q[positions < 0] = np.nan
    run = functools.partial(prefill.prefill, cut=case.cut)
    if case.cut is None:
        run = functools.partial(block_attention, implementation="triton")
    run = jax.jit(run, static_argnames=("window", "sinks"))
    mixed = blocks.attend(q, positions, spec.window, sinks=spec.sinks, run=run)
    expected = blocks.oracle(q, positions, spec.window, spec.sinks)
    assert mixed.dtype == q.dtype
    assert token_error(mixed, expected) <= prefill_bar(expected, spec.dtype)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_formula(normal, name):
    with interpreted():
        check(normal, CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_formula_on_a_gpu(normal, name):
    check(normal, CASES[name])


def quantised(blocks: Blocks) -> tuple[np.ndarray, ...]:
    """Codes and scales of keys and values, with the first key of a block taken off the others.

    What holds no token has NaN for scales and bases. The sequences become what the codes stand for.
    """
    lengths = [150, 40]
    pools, (count, heads, size, width) = [], blocks.key_blocks.shape
    base = np.full((count, heads, width), np.nan, np.float32)
    for name in ("key", "value"):
        pool, plain = getattr(blocks, f"{name}_blocks"), getattr(blocks, name)
        codes = np.full(pool.shape, 77, np.int8)
        scale = np.full(pool.shape[:3], np.nan, np.float32)
        for row, length in enumerate(lengths):
            for token in range(length):
                block, within = blocks.table[row, token // size], token % size
                if name == "key" and within == 0:
                    base[block] = pool[block, :, 0]
                offset = base[block] if name == "key" else 0.0
                rest = pool[block, :, within] - offset
                scale[block, :, within] = np.abs(rest).max(axis=1) / 127
                step = np.maximum(scale[block, :, within], 1e-30)[:, None]
                codes[block, :, within] = np.rint(rest / step)
                plain[row, token] = codes[block, :, within] * step + offset
        pools += [codes, scale]
    return pools[0], pools[2], pools[1], pools[3], base


@pytest.mark.parametrize("splits", [1, 2])
def test_interpreted_kernel_reads_int8_blocks(normal, splits):
    blocks = Blocks.of([150, 40], 32, heads=2, width=64)
    blocks.key_blocks[..., 5] += 200
    key_codes, value_codes, *scales = quantised(blocks)
    positions = ragged([150, 40], [20, 9])
    q = normal(2, 20, 6, 64)
    run = functools.partial(prefill.prefill, window=None, sinks=0, cut=Cut(32, 32, 4, 2, splits))
    with interpreted():
        mixed = jax.jit(run)(
            q, key_codes, value_codes, blocks.table, positions, BlockScales(*scales)
        )
    expected = blocks.oracle(q, positions)
    assert token_error(mixed, expected) <= prefill_bar(expected, "float32")


def test_interpreted_int8_in_bfloat16_with_an_outlier_channel(normal):
    lengths, new = [70, 33, 1], [10, 9, 1]
    plain = Blocks.of(lengths, 32, heads=1, width=64, outlier=200.0)
    for name in ("key", "value", "key_blocks", "value_blocks"):
        setattr(plain, name, getattr(plain, name).astype(jnp.bfloat16))
    blocks, positions = plain.quantised(), ragged(lengths, new)
    q = normal(3, 10, 7, 64).astype(jnp.bfloat16)
    run = functools.partial(block_attention, implementation="triton")
    with interpreted(12):
        cut = prefill.block_cut(current_target(), q, blocks.key_blocks, blocks.table)
        mixed = blocks.attend(q, positions, run=jax.jit(run, static_argnames=("window", "sinks")))
    assert cut.tile == 32 and cut.splits > 1
    assert norm_error(mixed, blocks.oracle(q, positions)) < 4e-3
    assert norm_error(mixed, plain.oracle(q, positions)) < 2e-2


@pytest.mark.parametrize("name", [name for name in SPECS if SPECS[name].new_tokens > 8])
def test_kernel_lowers_for_cuda(name):
    spec = SPECS[name]
    run = functools.partial(block_attention, implementation="triton", **spec.settings())
    module = lower_for_cuda(run, *spec.arguments())
    assert module.count("xla.gpu.triton") == 1
    assert "block_attention_prefill" in module


@pytest.mark.parametrize(
    ("new", "splits"), [(8192, 1), (512, 2), (128, 8), (16, 32), (513, 2), (1100, 1)]
)
def test_few_queries_share_their_tokens(new, splits):
    q, key, _, table, _ = Spec((32768,), new_tokens=new).arguments()
    assert prefill.block_cut(H200, q, key, table).splits == splits


def test_tiles_of_int8_blocks_do_not_cross_a_block():
    q, key, _, table, _ = Spec((4096,), new_tokens=512, block_size=16).arguments()
    codes = jax.ShapeDtypeStruct(key.shape, jnp.int8)
    assert prefill.block_cut(H200, q, codes, table).tile == 16
    assert prefill.block_cut(H200, q, key, table).tile == 64
