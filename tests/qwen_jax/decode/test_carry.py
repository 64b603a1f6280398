"""A packed carry is the tree that it was made of, and a greedy loop has nothing to ask."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

from qwen_jax.cache import init_cache
from qwen_jax.decode import init_state
from qwen_jax.decode.carry import Packing
from qwen_jax.decode.loop import decode_loop

ROWS = 3


def test_packing_loses_nothing():
    tree = {
        "flags": jnp.array([True, False, True]),
        "rows": jnp.array([-5, 2**31 - 1, -(2**31)], jnp.int32),
        "one": jnp.int32(7),
        "yes": jnp.bool_(True),
        "matrix": jnp.arange(6, dtype=jnp.int32).reshape(3, 2),
        "other length": jnp.arange(4, dtype=jnp.int32),
        "floats": jnp.array([0.5, -1.0, 2.0], jnp.float32),
        "seeds": jnp.array([2**32 - 1, 0, 1], jnp.uint32),
    }
    packing = Packing(tree, ROWS)
    carry = packing.pack(tree)
    assert carry.small.shape == (ROWS + ROWS + 1 + 1,)
    assert len(carry.large) == 4
    again = packing.unpack(carry)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for name, value in tree.items():
        assert (again[name].dtype, again[name].shape) == (value.dtype, value.shape), name
        np.testing.assert_array_equal(again[name], value, err_msg=name)


def test_a_greedy_loop_neither_sorts_nor_branches(tiny):
    cache = jax.eval_shape(lambda: init_cache(tiny.config, 2, 16))
    logits = jax.ShapeDtypeStruct((2, tiny.config.vocab_size), jnp.float32)
    state = jax.eval_shape(lambda x: init_state(x, max_tokens=4), logits)
    found = set(re.findall(r"\b(\w+)\[", str(jax.make_jaxpr(decode_loop)(tiny, cache, state))))
    assert {"while", "reduce", "dot_general"} <= found
    assert not found & {"cond", "sort", "argmax"}
