"""What experts are for: ban, force and bias them, and see what it does to the loss and the text.

python examples/routing_intervention.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import qwen_jax
from qwen_jax.research import interventions as change

TEXT = """And God said, Let there be light: and there was light. And God saw the light, that it was
good: and God divided the light from the darkness. And God called the light Day, and the darkness he
called Night. And the evening and the morning were the first day. And God said, Let there be a
firmament in the midst of the waters, and let it divide the waters from the waters."""
PROMPT = "And Moses said unto the people,"

model, tokenizer = qwen_jax.load("demo", dtype="float32")
tokens = jnp.asarray([tokenizer.encode(TEXT.replace("\n", " "))], jnp.int32)
experts = model.config.num_experts


@jax.jit
def loss(model, intervention):
    """Mean negative log-likelihood of a token, in nats. Compiled once for all interventions."""
    logits = model(tokens[:, :-1], intervention=intervention).logits
    logprobs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()


plain = model(tokens)
print(
    f"{tokens.size} tokens, {experts} experts a layer, {model.config.num_experts_per_tok} a token"
)

# The expert that a layer uses most, and what is lost without it.
print("\nlayer  most used  of tokens  loss without it")
base = float(loss(model, change.neutral(model)))
for layer, routing in plain.routing.items():
    counts = np.bincount(np.ravel(routing.ids), minlength=experts)
    top = int(counts.argmax())
    without = float(loss(model, change.ban(model, [top], layers=[layer])))
    share = counts[top] / tokens.size
    print(f"{layer:5d}  {top:9d}  {share:9.0%}  {without:.4f} ({without - base:+.4f})")

print("\nintervention                        loss")
even = change.temperature(model, 1e6)
middle = tokens.shape[1] // 2
for name, intervention in {
    "none": change.neutral(model),
    "2 experts a token": change.experts_per_token(model, 2),
    "1 expert a token": change.experts_per_token(model, 1),
    "half of the experts banned": change.ban(model, range(0, experts, 2)),
    "the same, in the second half only": change.ban(
        model, range(0, experts, 2), positions=(middle, None)
    ),
    "expert 0 forced everywhere": change.force(model, [0]),
    "weights of the chosen all alike": even,
    "no shared expert": change.shared_expert(model, 0.0),
    "shared expert alone": change.scale_weights(model, np.zeros(experts)),
}.items():
    print(f"{name:34s}  {float(loss(model, intervention)):.4f}")
print("programs compiled:", loss._cache_size())

# Three sequences of a batch, each with its own intervention, in one loop.
each = change.per_sequence(
    [None, change.experts_per_token(model, 1), change.shared_expert(model, 0.0)]
)
results = qwen_jax.generate(
    model, tokenizer, [PROMPT] * 3, max_tokens=24, ignore_eos=True, intervention=each
)
print()
for name, result in zip(("as it is", "1 expert", "no shared expert"), results, strict=True):
    print(f"{name}: {result.text!r}")
