"""An observer in the state sees what single steps give, and changes nothing."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from qwen_jax import CausalLM, init_cache
from qwen_jax.cache import Cache
from qwen_jax.decode import DecodeState, Observer, StepOutput, init_state, prefill_prompts, stream
from qwen_jax.decode.loop import run_steps
from qwen_jax.model import Capture
from qwen_jax.pytree import pytree
from tests.qwen_jax.decode.texts import run_step

PROMPTS = [[5, 9, 33], [7]]
LIMITS = [9, 4]


@pytree
class Ledger:
    """All ids of all steps, and how many steps each row took."""

    ids: Array
    steps: Array
    capture: ClassVar[Capture] = "ids"

    def observe(self, output: StepOutput, taken: Array) -> Ledger:
        seen = jnp.stack([output.routing[i].ids for i in sorted(output.routing)])[:, :, 0]
        column = jnp.max(self.steps)
        return Ledger(self.ids.at[column].set(seen), self.steps + taken.astype(jnp.int32))


def begin(model: CausalLM, observer: Observer | None) -> tuple[Cache, DecodeState]:
    cache = init_cache(model.config, 2, 32, block_size=8)
    logits, cache = prefill_prompts(model, cache, PROMPTS, chunk_size=16)
    return cache, init_state(logits, max_tokens=np.array(LIMITS, np.int32), observer=observer)


def ledger(model: CausalLM) -> Ledger:
    shape = (max(LIMITS), model.config.num_hidden_layers, 2, model.config.num_experts_per_tok)
    return Ledger(jnp.full(shape, -1, jnp.int32), jnp.zeros((2,), jnp.int32))


@pytest.fixture(scope="module")
def observed(tiny: CausalLM) -> DecodeState:
    cache, state = begin(tiny, ledger(tiny))
    return run_steps(tiny, cache, state, max_steps=jnp.int32(20))[0]


def test_the_ids_are_those_of_single_steps(tiny, observed):
    cache, _ = begin(tiny, None)
    expected = np.full(observed.observer.ids.shape, -1)
    empty = tiny.config.num_experts
    for step in range(max(LIMITS) - 1):
        takes = np.array([step < n - 1 for n in LIMITS])
        last = jnp.where(takes, observed.tokens[:, step], 0)
        output, cache = run_step(tiny, cache, last, active=jnp.asarray(takes), capture="ids")
        for layer in range(2):
            ids = np.asarray(output.routing[layer].ids)[:, 0]
            assert (ids[~takes] == empty).all() and (ids[takes] < empty).all()
            expected[step, layer] = ids
    np.testing.assert_array_equal(observed.observer.ids, expected)
    # The first token comes from the prompt's logits.
    np.testing.assert_array_equal(observed.observer.steps, [n - 1 for n in LIMITS])


def test_a_row_without_room_is_not_taken(tiny):
    """Row 0 has room for 5 tokens behind its prompt, of the 8 that it would enter."""
    cache = init_cache(tiny.config, 2, 8, block_size=8)
    logits, cache = prefill_prompts(tiny, cache, PROMPTS, chunk_size=16)
    state = init_state(logits, max_tokens=np.array(LIMITS, np.int32), observer=ledger(tiny))
    state, cache = run_steps(tiny, cache, state, max_steps=jnp.int32(20))
    assert cache.overflow.tolist() == [True, False]
    assert state.count.tolist() == [6, LIMITS[1]]
    assert state.observer.steps.tolist() == [5, LIMITS[1] - 1]


def test_tokens_are_those_without_an_observer(tiny, observed):
    plain, _ = run_steps(tiny, *begin(tiny, None), max_steps=jnp.int32(20))
    for name in ("tokens", "logprobs", "count", "reason"):
        np.testing.assert_array_equal(getattr(observed, name), getattr(plain, name))


def test_the_stream_carries_it(tiny, observed):
    for state, _ in stream(tiny, *begin(tiny, ledger(tiny))):
        last = state
    np.testing.assert_array_equal(last.observer.ids, observed.observer.ids)


def test_it_is_an_observer_and_a_pytree():
    one = Ledger(jnp.zeros((1,), jnp.int32), jnp.zeros((1,), jnp.int32))
    assert isinstance(one, Observer)
    assert len(jax.tree.leaves(dataclasses.replace(one))) == 2
