"""Calls whose arrays contradict one another are refused before anything reads memory."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200
from pallas_kernels.flash_attention import api

CASES = {
    "attention_inputs": "batch 8",
    "block_attention": "batch 8, 512",
    "delta_rule": "decode, batch 8",
    "flash_attention": "32 x 512",
}


def choose(name: str, place: int, **changes):
    """What a call of the operation is told with another array in one place."""
    spec = importlib.import_module(f"pallas_kernels.{name}.specs").SPECS[CASES[name]]
    arrays = list(spec.arguments())
    old = arrays[place]
    shape = changes.get("shape", old.shape)
    arrays[place] = jax.ShapeDtypeStruct(shape, changes.get("dtype", old.dtype))
    operation = importlib.import_module(f"pallas_kernels.{name}.api").OPERATION
    return operation.choose(*arrays, implementation=None, target=H200, **spec.settings())


@pytest.mark.parametrize(
    ("name", "place", "shape", "reason"),
    [
        ("flash_attention", 1, (32, 300, 2, 256), "k is [B T K H] = [32, 300, 2, 256], but T is"),
        ("flash_attention", 2, (32, 512, 1, 256), "v is [B T K H] = [32, 512, 1, 256], but K is"),
        ("flash_attention", 2, (32, 512, 2, 32), "but H is 256 in q"),
        ("flash_attention", 1, (1, 512, 2, 256), "but B is 32 in q"),
        ("flash_attention", 0, (32, 0, 16, 256), "q has shape [32, 0, 16, 256], which holds"),
        ("flash_attention", 0, (32, 512, 256), "q has shape [32, 512, 256]; accepted is [B T N H]"),
        ("block_attention", 2, (7, 1, 64, 256), "value_blocks is [P K Z H]"),
        ("block_attention", 2, (3, 2, 64, 256), "but P is"),
        ("block_attention", 2, (65, 2, 16, 256), "but Z is 64 in key_blocks"),
        ("block_attention", 3, (1, 8), "block_table is [B W] = [1, 8], but B is 8 in q"),
        ("block_attention", 4, (8, 3), "positions is [B T] = [8, 3], but T is 1 in q"),
        ("attention_inputs", 2, (8, 1, 4, 256), "v is [B T K H] = [8, 1, 4, 256], but K is 2 in k"),
        ("attention_inputs", 3, (8, 3, 32), "cos is [B T R2] = [8, 3, 32], but T is 1 in q"),
        ("attention_inputs", 5, (32,), "q_weight is [H] = [32], but H is 256 in k"),
        ("attention_inputs", 10, (1, 1), "positions is [B T] = [1, 1], but B is 8 in q"),
        ("delta_rule", 3, (8192, 3), "conv_state is [P C W] = [8, 8192, 4], but W is 3 in"),
        ("delta_rule", 1, (8, 1, 1), "a is [B T M] = [8, 1, 32], but M is 1 in b"),
        ("delta_rule", 4, (1,), "a_log is [M] = [1], but M is 32 in b"),
        ("delta_rule", 8, (1,), "start is [B] = [1], but B is 8 in qkv"),
    ],
)
def test_contradicting_shapes_are_refused_by_all(name, place, shape, reason):
    choice = choose(name, place, shape=shape)
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said), said


@pytest.mark.parametrize(
    ("name", "place", "dtype", "reason"),
    [
        ("block_attention", 4, jnp.float32, "positions is float32; accepted is int32"),
        ("block_attention", 3, jnp.uint8, "block_table is uint8; accepted is int32"),
        ("delta_rule", 7, jnp.int8, "delta_state is int8; accepted is floating point"),
        ("delta_rule", 8, jnp.float32, "start is float32; accepted is int32"),
        ("flash_attention", 0, jnp.int32, "q is int32; accepted is floating point"),
        ("attention_inputs", 8, jnp.float32, "keys are bfloat16 and values float32"),
    ],
)
def test_other_kinds_of_numbers_are_refused_by_all(name, place, dtype, reason):
    choice = choose(name, place, dtype=dtype)
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said), said


def test_what_is_no_array_becomes_one_or_is_refused():
    run = functools.partial(api.OPERATION, implementation=None, window=None)
    q = np.ones((1, 3, 2, 8), np.float32)
    plain = run(*[jnp.asarray(q)] * 3, None)
    np.testing.assert_array_equal(run(q.tolist(), q, q, None), plain)
    ends = np.array([0, 3], np.int64)
    np.testing.assert_array_equal(run(q, q, q, ends), plain)
    with pytest.raises(ExceptionGroup, match="cu_seqlens is uint8; accepted is int32"):
        run(q, q, q, ends.astype(np.uint8))
    with pytest.raises(ExceptionGroup, match=r"q is None; accepted is an array \[B T N H\]"):
        run(None, q, q, None)
