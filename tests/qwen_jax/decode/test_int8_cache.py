"""A cache of int8 keys and values, on the demo model: near to the exact one, and true to itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import CausalLM, fork, generate, init_cache, stream_generate
from qwen_jax.cache import Cache, KVBlocks
from qwen_jax.decode.prompt import pad, run_prefill
from qwen_jax.errors import RequestError
from tests.qwen_jax.decode.texts import run_step

# Codes are off by up to 1/254 of the greatest value of their row: about 1 % of the norm of what
# attention mixes, and here one layer of four is attention.
NEAR = 2e-2
# A code that rounds the other way, once in a while.
SAME = 1e-3

PROMPTS = ("short", "n65", "n200")


@pytest.fixture(scope="module")
def prompts(demo_expected) -> list[list[int]]:
    return [demo_expected.prompts[name] for name in PROMPTS]


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference, as a share of the norm of the logits' deviations."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected - expected.mean()))


def empty(model: CausalLM, rows: int) -> Cache:
    return init_cache(model.config, rows, 256, kv_cache_dtype="int8")


def enter(
    model: CausalLM, cache: Cache, prompts: list[list[int]], width: int
) -> tuple[list[np.ndarray], Cache]:
    """Logits of all positions of each prompt, entered in calls of this width, and the cache."""
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    for begin in range(0, max(map(len, prompts)), width):
        tokens, lengths = pad([prompt[begin : begin + width] for prompt in prompts], width)
        output, cache = run_prefill(model, cache, tokens, lengths, all_logits=True)
        for row, logits in enumerate(np.asarray(output.logits)):
            found[row].append(logits[: lengths[row]])
    return [np.concatenate(row) for row in found], cache


@pytest.fixture(scope="module")
def entered(demo, prompts) -> list[np.ndarray]:
    """Logits of each prompt, all its tokens in one call."""
    return enter(demo[0], empty(demo[0], 3), prompts, 256)[0]


def test_logits_are_near_those_of_an_exact_cache(demo_expected, demo_output, entered):
    names = list(demo_expected.prompts)
    for name, found in zip(PROMPTS, entered, strict=True):
        exact = np.asarray(demo_output.logits[names.index(name), : len(found)])
        assert 1e-4 < difference(found, exact) < NEAR, name


def test_chunks_leave_what_one_pass_leaves(demo, prompts, entered):
    found, _ = enter(demo[0], empty(demo[0], 3), prompts, 48)  # borders inside of blocks
    for logits, expected in zip(found, entered, strict=True):
        assert difference(logits, expected) < SAME


def test_forked_row_goes_on_like_its_source(demo, prompts, entered):
    model = demo[0]
    text, logits = prompts[2], entered[2]
    _, cache = enter(model, empty(model, 3), [text[:150], text[:5], text[:1]], 256)
    cache = jax.jit(fork, donate_argnums=0)(cache, jnp.array([0, 0, 2], jnp.int32))
    table = np.asarray(cache.blocks.table)
    assert (table[0, :2] == table[1, :2]).all() and table[0, 2] != table[1, 2]
    for at in (150, 151):
        other = (text[at] + 1) % model.config.vocab_size
        output, cache = run_step(model, cache, np.array([other, text[at], 3], np.int32))
        assert difference(output.logits[1], logits[at]) < SAME
        assert difference(output.logits[0], logits[at]) > 0.1


def test_greedy_tokens_are_mostly_the_same(demo, demo_expected, prompts):
    exact = [demo_expected.values["greedy"][name] for name in PROMPTS]
    options = {"max_tokens": min(map(len, exact)), "ignore_eos": True}
    coded = generate(*demo, prompts, kv_cache_dtype="int8", **options)
    for tokens, result in zip(exact, coded, strict=True):
        same = np.equal(tokens[: options["max_tokens"]], result.tokens)
        assert same[:8].all() and same.mean() > 0.8


def test_layers_of_an_int8_cache(demo):
    model = demo[0]
    kv = next(layer for layer in empty(model, 3).layers if isinstance(layer, KVBlocks))
    assert kv.key.dtype == kv.value.dtype == jnp.int8
    assert kv.scales is not None
    assert kv.scales.key_scale.shape == kv.scales.value_scale.shape == kv.key.shape[:3]
    assert kv.scales.key_base.shape == (*kv.key.shape[:2], model.config.head_dim)
    assert kv.scales.key_base.dtype == jnp.float32
    half = dataclasses.replace(model.config, dtype="bfloat16")
    kv = init_cache(half, 1, 64, kv_cache_dtype="int8").layers[3]
    assert kv.scales.key_base.dtype == jnp.bfloat16


@pytest.mark.parametrize("value", ["fp8", "auto", "", "bfloat16"])
def test_unknown_dtypes_are_refused(demo, value):
    refused = pytest.raises(
        RequestError, match=rf"kv_cache_dtype is '{value}'; accepted are 'int8'"
    )
    with refused:
        init_cache(demo[0].config, 1, 64, kv_cache_dtype=value)
    with refused:
        stream_generate(*demo, [1, 2], kv_cache_dtype=value)
