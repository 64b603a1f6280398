"""Prompt to tokens in a single `jax.jit`, with a sampling rule of one's own.

python examples/jit_generate.py
"""

import functools

import jax
import jax.numpy as jnp

import qwen_jax
from qwen_jax import decode_loop, init_cache, init_state, prefill
from qwen_jax.decode import LOOP_OPTIONS

NEW_TOKENS = 48


def epsilon_greedy(logits, state):
    """Mostly the most likely token, one time in ten the runner-up. Any pure function will do."""
    _, best = jax.lax.top_k(logits, 2)
    key = jax.random.fold_in(jax.random.key(7), state.count[0])
    second = jax.random.bernoulli(key, 0.1, state.count.shape)
    return jnp.where(second, best[:, 1], best[:, 0])


@functools.partial(jax.jit, donate_argnames=("cache",), compiler_options=LOOP_OPTIONS)
def generate(model, cache, tokens, lengths):
    """Ids [B, NEW_TOKENS] after the prompts, and the cache to go on with."""
    output, cache = prefill(model, cache, tokens, lengths)
    state = init_state(output.logits, max_tokens=NEW_TOKENS, sample=epsilon_greedy)
    state, cache = decode_loop(model, cache, state, sample=epsilon_greedy)
    return state.tokens, cache


model, tokenizer = qwen_jax.load("demo", dtype="float32")
prompt = tokenizer.encode("And Moses said unto")
cache = init_cache(model.config, batch_size=1, max_length=len(prompt) + NEW_TOKENS)
tokens, cache = generate(model, cache, jnp.asarray([prompt]), jnp.asarray([len(prompt)]))
print(tokenizer.decode(tokens[0].tolist()))
print("tokens in the cache:", int(cache.length[0]))
