"""One pass over the logits against float64 formulas; a greedy state against one with options."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from qwen_jax.decode import SamplingOptions, SamplingParams, init_state, sample
from qwen_jax.decode.state import advance
from qwen_jax.decode.summary import summarise

ROWS, VOCABULARY, KNOWN = 5, 700, 650
jit_summarise = jax.jit(summarise)


def rows_of_logits() -> np.ndarray:
    """Rows whose padding, from id 650 on, holds the largest logits."""
    logits = np.random.default_rng(3).normal(0, 6, (ROWS, VOCABULARY)).astype(np.float32)
    logits[:, KNOWN:] += 50
    logits[1, [9, 300, 649]] = 60.0  # a tie
    logits[2] *= 1e4  # exponentials far below float32
    logits[3] = -3e38  # all equal
    return logits


def test_largest_best_and_sum_are_those_of_the_known_ids():
    logits = rows_of_logits()
    found = jit_summarise(jnp.asarray(logits), jnp.int32(KNOWN))
    known = logits[:, :KNOWN].astype(np.float64)
    np.testing.assert_array_equal(found.largest, known.max(-1))
    np.testing.assert_array_equal(found.best, known.argmax(-1))
    below = known - known.max(-1, keepdims=True)
    np.testing.assert_allclose(found.log_sum, np.log(np.exp(below).sum(-1)), rtol=1e-5, atol=1e-6)
    assert found.finite.tolist() == [True] * ROWS
    assert found.best.tolist()[1] == 9
    assert found.best.tolist()[3] == 0


def test_any_logit_that_is_not_finite_shows():
    logits = rows_of_logits()
    for row, (column, value) in enumerate(
        [(0, np.nan), (649, np.inf), (650, np.nan), (699, -np.inf)]
    ):
        logits[row, column] = value
    found = jit_summarise(jnp.asarray(logits), jnp.int32(KNOWN))
    assert found.finite.tolist() == [False] * 4 + [True]
    assert np.isfinite(found.log_sum[4])


def test_a_state_without_options_takes_the_tokens_of_greedy_options():
    logits = rows_of_logits()
    start = jax.jit(init_state, static_argnames=("max_tokens",))
    grow = jax.jit(advance, static_argnames=("sample",))
    greedy = SamplingParams.stack([SamplingOptions()] * ROWS)
    state = start(jnp.asarray(logits), max_tokens=3, vocab_size=jnp.int32(KNOWN))
    same = start(jnp.asarray(logits), max_tokens=3, vocab_size=jnp.int32(KNOWN), sampling=greedy)
    assert state.sampling is None
    full = jnp.arange(ROWS) == 4
    for shift in (1, 2):
        new = jnp.asarray(np.roll(logits, shift, axis=0))
        state, same = (grow(each, new, full, sample=sample) for each in (state, same))
    for field in dataclasses.fields(state):
        if field.name not in ("sampling", "logprobs"):
            values = (getattr(each, field.name) for each in (state, same))
            np.testing.assert_array_equal(*values, err_msg=field.name)
    np.testing.assert_allclose(state.logprobs, same.logprobs, atol=1e-6)
    assert state.count.tolist() == [3] * 4 + [1]
    expected = [
        [np.roll(logits, n, axis=0)[row, :KNOWN].argmax() for n in range(3)] for row in (0, 3)
    ]
    np.testing.assert_array_equal(np.asarray(state.tokens)[[0, 3]], expected)
