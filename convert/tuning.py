"""Scales fitted together, on what a layer or a whole model puts out.

Matrices are put in codes one by one, each on its own outputs. What becomes of their errors
together, in convolutions, gates, norms and further layers, is not seen there. Here all scales
follow the gradient of the final error, with the codes as they are. Nothing but scales changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from qwen_jax.config import QwenConfig
from qwen_jax.model import CausalLM
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.quant import WeightFormat

from .calibrate import at, run
from .methods import Codes, Solved, dequantise
from .methods.codes import as_stored

# Adam's, on logarithms of scales.
RATE, MOMENTUM, SPREAD = 3e-3, 0.9, 0.95
COMPARED = 16

Tree = Any


def layer_error(
    config: QwenConfig,
) -> Callable[[DecoderLayer, Float[Array, "B T D"], Float[Array, "B T D"]], Array]:
    """A loss of a layer, its input and what the float layer makes of that: the share missed."""

    def loss(layer: DecoderLayer, x: Array, y: Array) -> Array:
        difference = run(layer, config, x) - y
        return jnp.sum(jnp.square(difference)) / jnp.sum(jnp.square(y - x))

    return loss


def divergence(model: CausalLM, base: CausalLM, tokens: Int[Array, "B T"]) -> Array:
    """Mean KL(base || model) in nats: a loss of a model, the float model and tokens."""
    wanted, other = (
        jax.nn.log_softmax(m(tokens, capture="none").logits, axis=-1) for m in (base, model)
    )
    return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - other), axis=-1))


def fit_scales(
    module: nnx.Module,
    solved: Mapping[str, Solved],
    formats: Mapping[str, WeightFormat],
    loss: Callable[..., Array],
    batches: Sequence[tuple[Any, ...]],
    *,
    steps: int,
    rate: float = RATE,
) -> dict[str, Solved]:
    """Better scales for the matrices of a layer or a model in codes.

    Args:
        module: with the numbers that the codes stand for; holds the new ones afterwards.
        solved: codes by tree path within the module, without input scales.
        formats: of the same paths.
        loss: of the module and a batch.
        batches: arrays on the host, or models. Steps take them in turn.
        steps: of the descent.
        rate: of the first step, in logarithms of scales; it falls to zero.

    Returns:
        The same codes with new scales; the old ones where the new ones are no better over the
        first `COMPARED` batches. Errors in the reports stay those of the old ones.
    """
    codes: dict[str, Codes] = jax.tree.map(jnp.asarray, {p: solved[p].codes for p in formats})
    graph, state = nnx.split(module)

    def loss_of(logs: Tree, state: Tree, codes: Tree, *batch: Array) -> Array:
        changed = nnx.merge(graph, state)
        for path, log in logs.items():
            parent, name = path.rsplit(".", 1)
            weight = dequantise(codes[path]._replace(scale=jnp.exp(log)), formats[path])
            dtype = at(changed, path)[...].dtype
            setattr(at(changed, parent), name, nnx.Param(weight.astype(dtype)))
        return loss(changed, *batch)

    on_device = functools.partial(jax.tree.map, jnp.asarray)
    measure = jax.jit(loss_of)
    descend = jax.jit(functools.partial(_descend, jax.value_and_grad(loss_of), steps, rate))

    def overall(logs: Tree) -> float:
        losses = [measure(logs, state, codes, *on_device(b)) for b in batches[:COMPARED]]
        return float(np.mean(losses))

    before = {path: jnp.log(value.scale) for path, value in codes.items()}
    nothing = jax.tree.map(jnp.zeros_like, before)
    progress = (before, nothing, nothing)
    for number in range(steps):
        batch = on_device(batches[number % len(batches)])
        progress = descend(progress, jnp.float32(number), state, codes, *batch)
    after = {path: jnp.log(as_stored(jnp.exp(log))) for path, log in progress[0].items()}
    if not overall(after) < overall(before):
        return dict(solved)
    result = dict(solved)
    for path, format in formats.items():
        scale = np.asarray(as_stored(jnp.exp(after[path])))
        result[path] = solved[path]._replace(codes=solved[path].codes._replace(scale=scale))
        parameter = at(module, path)
        parameter.set_value(result[path].weight(format).astype(parameter[...].dtype))
    return result


def _descend(
    gradient: Any, steps: int, rate: float, progress: Tree, number: Array, *inputs: Any
) -> tuple[Tree, Tree, Tree]:
    """One step of Adam."""
    logs, means, squares = progress
    _, slopes = gradient(logs, *inputs)
    means = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, means, slopes)
    squares = jax.tree.map(lambda s, g: SPREAD * s + (1 - SPREAD) * g * g, squares, slopes)
    now = rate * (1 - number / steps)
    first, second = (1 - decay ** (number + 1) for decay in (MOMENTUM, SPREAD))

    def moved(log: Array, mean: Array, square: Array) -> Array:
        return log - now * (mean / first) / (jnp.sqrt(square / second) + 1e-12)

    return jax.tree.map(moved, logs, means, squares), means, squares
