"""What is given something that is no model says so, and what to give."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qwen_jax
from qwen_jax import CausalLM, init_cache, init_state
from qwen_jax.errors import RequestError
from qwen_jax.evaluate import score
from qwen_jax.evaluate.activation_scales import activation_scales
from qwen_jax.evaluate.activations import with_activations
from qwen_jax.evaluate.continuations import likelihoods
from qwen_jax.model import FlatModel
from qwen_jax.research import collect, expert_cache, trace_text
from qwen_jax.research.routers import replace_routers

# Not looked at where the model is none.
NOTHING: Any = None
ONE, MANY = jnp.ones((1,), jnp.int32), jnp.ones((1, 3), jnp.int32)


def stream(model: Any, cache: qwen_jax.Cache) -> Any:
    return next(qwen_jax.stream(model, cache, init_state(jnp.zeros((1, 61)), max_tokens=4)))


def decode_loop(model: Any, cache: qwen_jax.Cache) -> Any:
    return qwen_jax.decode_loop(model, cache, init_state(jnp.zeros((1, 61)), max_tokens=4))


CALLS = {
    "generate": lambda model, _: qwen_jax.generate(model, None, [1]),
    "stream_generate": lambda model, _: qwen_jax.stream_generate(model, None, [1]),
    "prefill": lambda model, cache: qwen_jax.prefill(model, cache, MANY, ONE),
    "prefill_prompts": lambda model, cache: qwen_jax.prefill_prompts(model, cache, [[1]]),
    "decode_step": lambda model, cache: qwen_jax.decode_step(model, cache, ONE),
    "decode_loop": decode_loop,
    "stream": stream,
    "trace_text": lambda model, _: trace_text(model, [[1]]),
    "collect": lambda model, _: collect(trace_text(model, [[1]])),
    "score": lambda model, _: score(model, NOTHING),
    "likelihoods": lambda model, _: likelihoods(model, [], batch_size=1, max_model_len=4),
    "activation_scales": lambda model, _: activation_scales(model, NOTHING, NOTHING),
    "with_activations": lambda model, _: with_activations(model, NOTHING),
    "replace_routers": lambda model, _: replace_routers(model, lambda layer, gate: gate),
    "measure": lambda model, _: expert_cache.measure(model, np.ones((1, 3), int), resident=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_model_is_refused(no_type_checks, tiny: CausalLM, name: str):
    cache = init_cache(tiny.config, 1, 8)
    for wrong in ("demo", None, tiny.config, (tiny, None), FlatModel.of(tiny), np.zeros(3)):
        kind = type(wrong).__name__
        with pytest.raises(RequestError, match=f"the model is of type {kind}; accepted is what"):
            CALLS[name](wrong, cache)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
