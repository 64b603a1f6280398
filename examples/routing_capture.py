"""Which experts the demo model uses: of a text, and of every step of a decode loop inside jit.

python examples/routing_capture.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import qwen_jax
from qwen_jax import decode_loop, init_cache, init_state, prefill
from qwen_jax.research import RoutingCounts, collect, statistics, summarise, trace_text

NEW_TOKENS = 64
TEXT = """And it came to pass in those days, that there went out a decree from the king.
Return True if the string ends with the specified suffix, otherwise return False.
And the children of Israel did evil again in the sight of the LORD: 40 years, 7 months.
"""

model, tokenizer = qwen_jax.load("demo", dtype="float32")

# The routing of a text: ids and weights of every token come to the host chunk by chunk, and the
# sums of the router's probabilities stay on the device.
pieces = trace_text(model, [tokenizer.encode(TEXT)], probabilities=True)
trace, counts = collect(pieces)
print(f"{len(trace)} tokens, layers {trace.layers}, ids {trace.ids.shape}")

summary = summarise(trace, counts, tokenizer)
print(f"load-balancing loss, layers pooled: {summary.pooled_balance_loss:.3f}")
for row in summary.layers:
    print(
        f"layer {row.layer}: {row.effective_experts:.1f} of {trace.experts} experts in effect, "
        f"busiest {row.largest_load:.1f} x even share, loss {row.balance_loss:.2f}"
    )

# What each token of a line chose in the last layer.
last = trace[trace.layers[-1]]
for token, ids, weights in list(zip(trace.tokens, last.ids, last.weights, strict=True))[:6]:
    print(f"{tokenizer.decode([int(token)])!r:12} {ids} {np.round(weights, 2)}")


# The same of a loop: an observer in the state sees each step without leaving jit. The tokens stay
# as they are, and all layers together cost one launch more a step on a GPU.
@functools.partial(jax.jit, donate_argnames=("cache",))
def generate(model, cache, tokens, lengths, observer):
    """Ids [B, NEW_TOKENS] after the prompts, what the observer has seen, and the cache."""
    output, cache = prefill(model, cache, tokens, lengths)
    state = init_state(output.logits, max_tokens=NEW_TOKENS, observer=observer)
    state, cache = decode_loop(model, cache, state)
    return state.tokens, state.observer, cache


prompts = [tokenizer.encode(text) for text in ("And Moses said unto", "Return the value of")]
width = max(map(len, prompts))
rows = jnp.asarray([ids + [0] * (width - len(ids)) for ids in prompts])
lengths = jnp.asarray([len(ids) for ids in prompts])


def run(observer):
    """One batch of both prompts."""
    cache = init_cache(model.config, batch_size=2, max_length=width + NEW_TOKENS)
    tokens, observer, cache = generate(model, cache, rows, lengths, observer)
    return tokens, observer


made, seen = run(RoutingCounts.zeros(model.config))
plain, _ = run(None)
print("tokens with and without observer are equal:", bool(jnp.all(made == plain)))
print(f"the loop entered {int(seen.tokens)} tokens; experts of the last layer were chosen")
print(np.asarray(seen.chosen[-1]))

# How alike the two loads are: of the text above, and of what the model wrote.
loads = [statistics.load(np.asarray(part.chosen)) for part in (counts, seen)]
print("stability of the load, layer by layer:", statistics.stability(np.stack(loads)).round(2))
