"""The Triton kernel of `block_attention`: interpreted, lowered, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, lower_for_cuda
from pallas_kernels.block_attention import api, block_attention, triton
from pallas_kernels.block_attention.config import config_for, shared_bytes
from pallas_kernels.block_attention.specs import SPECS, Spec
from pallas_kernels.testing import decode_bar, interpreted, relative_error
from tests.pallas_kernels.blocks import Blocks, ragged

ADA = Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))


@dataclasses.dataclass(frozen=True)
class Case:
    """A call small enough to be interpreted.

    Attributes:
        spec: shapes; `lengths` and `new_tokens` are the longest.
        new: new tokens of each sequence.
        cores: how many multiprocessors the kernel is told of; few make few splits.
    """

    spec: Spec
    new: tuple[int, ...]
    cores: int


CASES = {
    "splits, two blocks a tile": Case(
        Spec((130, 64, 0, 65, 1), 8, 2, 64, "bfloat16", 16), (1, 1, 0, 1, 1), 64
    ),
    "window and sinks, several queries": Case(
        Spec((200, 64, 128, 0, 2), 14, 2, 64, "float32", 32, window=70, sinks=5),
        (3, 1, 2, 0, 2),
        64,
    ),
    "int8, splits, window": Case(
        Spec((130, 64, 0, 65, 1), 8, 2, 64, "bfloat16", 16, window=100, sinks=5, int8=True),
        (1, 1, 0, 1, 1),
        64,
    ),
    "int8, one split, several tiles a block": Case(
        Spec((200, 1, 33), 4, 2, 128, "float32", 128, new_tokens=2, int8=True), (2, 1, 1), 1
    ),
    "one split, unequal lengths": Case(Spec((96, 1, 33), 4, 4, 128, "float32", 32), (1, 1, 1), 1),
    "several tiles a block": Case(Spec((129, 128), 6, 1, 256, "float32", 128), (1, 1), 8),
}


def check(normal, case: Case) -> None:
    """Compares the kernel with the formula, in a pool where all that is not a live token is NaN."""
    spec = case.spec
    blocks = Blocks.of(list(spec.lengths), spec.block_size, heads=spec.kv_heads, width=spec.width)
    for pool in ("key", "value", "key_blocks", "value_blocks"):
        setattr(blocks, pool, getattr(blocks, pool).astype(jnp.dtype(spec.dtype)))
    if spec.int8:
        blocks = blocks.quantised()
    blocks.table[blocks.table == 0] = 2**31 - 1
    positions = ragged(list(spec.lengths), list(case.new))
    q = normal(len(case.new), max(case.new), spec.query_heads, spec.width)
    q = q.astype(jnp.dtype(spec.dtype))
    q[positions < 0] = np.nan
    run = jax.jit(
        functools.partial(block_attention, implementation="triton"),
        static_argnames=("window", "sinks"),
    )
    mixed = blocks.attend(q, positions, spec.window, sinks=spec.sinks, run=run)
    q[positions < 0] = 0
    expected = blocks.oracle(q, positions, spec.window, spec.sinks)
    assert mixed.dtype == q.dtype
    assert relative_error(mixed, expected) <= decode_bar(expected, spec.dtype)
    assert not mixed[positions < 0].any()


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_formula(normal, name):
    with interpreted(CASES[name].cores):
        check(normal, CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_formula_on_a_gpu(normal, name):
    check(normal, CASES[name])


LOWERED = (
    "batch 1, 512",
    "batch 64, unequal",
    "batch 8, 32k, window 4k",
    "batch 8, 4k, blocks of 16",
    "batch 8, 4k, 28 heads of 128",
    "batch 8, 4k, 4 new tokens",
    "batch 8, 4k, float32",
    "batch 8, 32k, int8",
    "batch 8, 4k, blocks of 16, int8",
)


@pytest.mark.parametrize("name", LOWERED)
def test_kernel_lowers_for_cuda(name):
    spec = SPECS[name]
    run = functools.partial(block_attention, **spec.settings())
    module = lower_for_cuda(run, *spec.arguments())
    assert "xla.gpu.triton" in module
    assert "block_attention_combine" in module


def choose(target=H200, *, pool_dtype=None, pool_rows=None, window=None, sinks=0, **changes):
    spec = dataclasses.replace(SPECS["batch 8, 512"], **changes)
    q, key, value, *rest = spec.arguments()
    if pool_dtype is not None:
        key, value = (jax.ShapeDtypeStruct(x.shape, pool_dtype) for x in (key, value))
    if pool_rows is not None:
        key, value = (
            jax.ShapeDtypeStruct((pool_rows, *x.shape[1:]), x.dtype) for x in (key, value)
        )
    return api.OPERATION.choose(
        q, key, value, *rest, implementation=None, target=target, window=window, sinks=sinks
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"width": 64, "dtype": "float32"},
        {"width": 128, "block_size": 16},
        {"block_size": 128, "window": 100, "sinks": 4},
        {"new_tokens": 8},
        {"new_tokens": 9},
        {"new_tokens": 8192},
        {"int8": True, "block_size": 16},
        {"target": ADA},
    ],
)
def test_calls_on_a_gpu_take_the_kernel(changes):
    choice = choose(**changes)
    assert (choice.chosen, choice.refused) == ("triton", {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 80}, "head dim 80 is not one of 64, 128, 256"),
        ({"block_size": 24}, "block size 24 is not one of 16, 32, 64, 128"),
        ({"dtype": "float16"}, "(float16, float16, float16) are not all the same one of bfloat16"),
        ({"pool_dtype": jnp.float32}, "(bfloat16, float32, float32) are not all the same"),
        ({"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
    ],
)
def test_refusals_of_the_kernel(changes, reason):
    choice = choose(**changes)
    assert choice.chosen == "reference"
    assert any(reason in said for said in choice.refused["triton"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query_heads": 15}, "15 query heads cannot share 2 key/value heads evenly"),
        ({"window": 0}, "window is 0; accepted is a whole number from 1 on, or None"),
        ({"sinks": 4}, "sinks is 4; accepted is 0, or a larger number beside a window"),
        ({"sinks": -1, "window": 8}, "sinks is -1"),
        ({"pool_dtype": jnp.int8}, "keys are int8 without scales; accepted are int8 with scales"),
        ({"pool_dtype": jnp.bfloat16, "int8": True}, "values are bfloat16 beside scales"),
        ({"pool_rows": 3, "int8": True}, "key_scale is ((65, 2, 64), 'float32'); accepted is"),
    ],
)
def test_calls_without_a_meaning_are_refused_by_all(changes, reason):
    choice = choose(**changes)
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said)


@pytest.mark.parametrize(
    ("lengths", "splits"), [((32768,), 128), ((32768,) * 8, 32), ((4096,) * 64, 4), ((16,), 1)]
)
def test_long_sequences_fill_the_device(lengths, splits):
    q, key, _, table, _ = Spec(lengths).arguments()
    config = config_for(H200, q, key, table)
    assert config.splits == splits
    assert config.tile * config.ahead * 2 * 256 * 2 <= H200.shared_memory // 2


@pytest.mark.parametrize("new_tokens", [1, 40])
@pytest.mark.parametrize("position", [34, 1000])
def test_beyond_the_table_the_kernel_sees_what_the_reference_sees(normal, new_tokens, position):
    blocks = Blocks.of([32], 16, columns=2, width=64)
    q = normal(1, new_tokens, 4, 64)
    positions = np.arange(position - new_tokens + 1, position + 1, dtype=np.int32)[None]
    blocks.table[0, 1] = 2**31 - 1  # counts as the last block of the pool
    for pool in (blocks.key_blocks, blocks.value_blocks):
        pool[-1] = normal(*pool.shape[1:])
    run = jax.jit(block_attention, static_argnames=("window", "sinks", "implementation"))
    expected = blocks.attend(q, positions, 16, sinks=4, run=run)
    assert np.abs(expected).max() > 0.1
    with interpreted():
        named = functools.partial(run, implementation="triton")
        found = blocks.attend(q, positions, 16, sinks=4, run=named)
    np.testing.assert_allclose(found, expected, atol=1e-5)


# By dtype, int8, width and rows: tile and tiles ahead on an RTX 4090 in blocks of 64, and the bytes
# of shared memory of that, compiled.
COMPILED = {
    ("bfloat16", False, 256, 64): (16, 1, 51204),
    ("bfloat16", False, 64, 16): (64, 2, 36872),
    ("bfloat16", True, 256, 16): (64, 1, 44036),
    ("bfloat16", True, 64, 64): (64, 3, 34956),
    ("float32", False, 256, 16): (16, 1, 83972),
    ("float32", False, 256, 32): (16, 1, 118788),
    ("float32", False, 256, 64): (16, 1, 188420),
    ("float32", False, 128, 64): (16, 1, 98308),
    ("float32", True, 256, 32): (16, 1, 95364),
    ("float32", True, 256, 64): (16, 1, 164996),
}


@pytest.mark.parametrize(("dtype", "int8", "width", "rows"), COMPILED)
def test_shared_memory_is_at_least_what_was_compiled(dtype, int8, width, rows):
    q, key, _, table, *_ = Spec(
        (4096,) * 8, 2 * rows, 2, width, dtype, new_tokens=1, int8=int8
    ).arguments()
    tile, ahead, used = COMPILED[dtype, int8, width, rows]
    config = config_for(ADA, q, key, table)
    assert (config.tile, config.ahead) == (tile, ahead)
    assert used <= shared_bytes(config, q, key) <= 2 * used


@pytest.mark.parametrize("target", [H200, ADA, Target("gpu", "NVIDIA A100", 108, (8, 0))])
def test_rows_that_do_not_fit_are_cut_into_tiles(target):
    decoded = set()
    axes = ("bfloat16", "float32"), (False, True), (64, 128, 256), (1, 17, 64), (16, 128)
    for dtype, int8, width, rows, size in itertools.product(*axes):
        spec = Spec((4096,), 2 * rows, 2, width, dtype, size, int8=int8)
        q, key, _, table, *_ = spec.arguments()
        if (config := triton.decode_config(target, q, key, table)) is not None:
            assert shared_bytes(config, q, key) <= target.shared_memory
            decoded.add((dtype, width, rows))
    assert {("bfloat16", 256, 64), ("float32", 256, 1)} <= decoded
    assert (("float32", 256, 64) in decoded) == (target == H200)


@pytest.mark.parametrize(("target", "prefill"), [(H200, False), (ADA, True)])
def test_calls_with_rows_that_do_not_fit_run_the_other_kernel(target, prefill):
    arguments = Spec((4096,), 128, 2, 256, "float32").arguments()
    module = lower_for_cuda(block_attention, *arguments, target=target)
    assert ("block_attention_prefill" in module) == prefill
