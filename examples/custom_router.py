"""Other routers in a trained model: some that come along, and one of your own.

python examples/custom_router.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import qwen_jax
from qwen_jax.errors import RequestError
from qwen_jax.model import Routing
from qwen_jax.research.expert_cache import measure
from qwen_jax.research.routers import replace_routers, with_router

TEXT = """And God said, Let there be light: and there was light. And God saw the light, that it was
good: and God divided the light from the darkness. And God called the light Day, and the darkness he
called Night. And the evening and the morning were the first day. And God said, Let there be a
firmament in the midst of the waters, and let it divide the waters from the waters."""

model, tokenizer = qwen_jax.load("demo", dtype="float32")
tokens = jnp.asarray([tokenizer.encode(TEXT.replace("\n", " "))], jnp.int32)
experts = model.config.num_experts


def threshold(inner, share=0.5):
    """A router of your own: the inner router's experts, but for those far below the first.

    Any function of (x, context) that gives a Routing will do. x is float32 [B, T, D]; the context
    has valid, mixed, tokens, positions, layer and intervention. Empty slots have the id E.
    """

    def router(x, context):
        routing = inner(x, context)
        kept = routing.weights >= share * routing.weights[..., :1]
        weights = jnp.where(kept, routing.weights, 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
        return Routing(jnp.where(kept, routing.ids, experts), weights, routing.logits)

    # The inner router applies what an intervention says.
    router.intervenes = True
    return router


def report(name, model):
    """Loss of the text, experts a token and the share of slots that the busiest expert has."""
    output = model(tokens)
    logprobs = jax.nn.log_softmax(output.logits[:, :-1])
    loss = -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()
    ids = np.stack([routing.ids for routing in output.routing.values()])
    used = [np.bincount(layer[layer < experts], minlength=experts) for layer in ids]
    busiest = np.mean([counts.max() / counts.sum() for counts in used])
    mean = (ids < experts).sum() / len(ids) / tokens.size
    print(f"{name:28s}  {float(loss):.4f}  {mean:7.2f}  {busiest:7.1%}")


print("router                          loss  experts  busiest")
report("released: 4 of 16", model)
report("a function of our own", replace_routers(model, lambda layer, gate: threshold(gate)))
report("probability mass 0.5", with_router(model, "mass", mass=0.5))
capacity = 30
for overflow in ("drop", "next"):
    other = with_router(model, "capacity", capacity=capacity, overflow=overflow)
    report(f"capacity {capacity}, {overflow}", other)
report("expert choice", with_router(model, "expert_choice"))
report("random", with_router(model, "random"))

try:
    replace_routers(
        model, lambda layer, gate: lambda x, c: Routing(gate(x, c).ids * 0, gate(x, c).weights)
    )
except RequestError as error:
    print("\nrefused:", error)

print("\nbias  loss    distinct in 16 tokens  hits with 8 of 16 resident")
for strength in (0.0, 0.5, 1.0, 2.0, 4.0):
    found = measure(model, np.asarray(tokens), within=strength, window=16, resident=8)
    print(f"{strength:4.1f}  {found.loss:.4f}  {found.distinct:21.2f}  {found.hit_rate:.1%}")
