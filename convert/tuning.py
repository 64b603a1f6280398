"""Codes and scales fitted together, on what a layer or a whole model puts out.

Matrices are put in codes one by one, each on its own outputs. What becomes of their errors
together, in convolutions, gates, norms and further layers, is not seen there. Here all codes and
scales of a layer or a model follow the gradient of the final error. Everything else stays.

Rounding has no gradient of use, so each code has a position, a real number that is rounded to it;
positions move by the gradient with respect to the codes, as in Bengio et al. (arXiv 1308.3432).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from qwen_jax.config import QwenConfig
from qwen_jax.model import CausalLM
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.quant import Rule, WeightFormat

from .calibrate import advance, at, run
from .layer import quantise_layer
from .methods import Codes, Solved
from .methods.codes import as_stored, of_inputs

# Adam's. Of the first step: the rate of positions in codes, that of scales in logarithms.
CODE_RATE, SCALE_RATE = 5e-3, 3e-3
WINDOWS_OF_STEP = 2
MOMENTUM, SPREAD = 0.9, 0.99
# How far from its code a position starts at most, on the side of the weight. At 0.5 and more the
# first steps would undo what made up for errors elsewhere.
AWAY = 0.45

Tree = Any


class Start(NamedTuple):
    """A tensor in codes before the fit, on the device."""

    codes: Codes
    input_scale: Array | None


class Place(NamedTuple):
    """What moves of a tensor: the positions of its codes [*, O, I], logarithms of its scales."""

    positions: Float[Array, "*S O I"]
    logs: Float[Array, "*S O J"]


@functools.cache
def layer_error(
    config: QwenConfig,
) -> Callable[[DecoderLayer, Float[Array, "B T D"], Float[Array, "B T D"]], Array]:
    """A loss of a layer, its input and what the float layer makes of that: the share missed."""

    def loss(layer: DecoderLayer, x: Array, y: Array) -> Array:
        difference = run(layer, config, x) - y
        return jnp.sum(jnp.square(difference)) / jnp.sum(jnp.square(y - x))

    return loss


def fit_layer(
    layer: DecoderLayer,
    config: QwenConfig,
    hidden: Float[np.ndarray, "N T D"],
    rules: Mapping[str, Rule],
    *,
    steps: int,
) -> dict[str, Solved]:
    """Put a layer in codes as `quantise_layer` does, then fit them to the layer's output.

    Args:
        layer: as `quantise_layer` takes it; it stands for the layer in codes afterwards.
        config: of the model.
        hidden: the residual stream in front of the layer; at least two windows. The last eighth
            of the windows is held out.
        rules: as `quantise_layer` takes them.
        steps: of the fit, each on `WINDOWS_OF_STEP` windows.

    Returns:
        Codes by tree path, with reports on them as they are in the end.
    """
    weights = {path: at(layer, path)[...] for path in rules}
    target = advance(layer, config, hidden)
    solved = quantise_layer(layer, config, hidden, rules)
    if not solved:
        return solved
    formats = {path: rule.format for path, rule in rules.items() if rule.format is not None}
    seen = len(hidden) - max(1, len(hidden) // 8)
    batches, held_out = (
        [
            (hidden[i : min(i + WINDOWS_OF_STEP, stop)], target[i : min(i + WINDOWS_OF_STEP, stop)])
            for i in range(start, stop, WINDOWS_OF_STEP)
        ]
        for start, stop in ((0, seen), (seen, len(hidden)))
    )
    loss = layer_error(config)
    solved = fit_codes(layer, weights, solved, formats, loss, batches, held_out, steps=steps)
    for path, weight in weights.items():
        at(layer, path).set_value(weight)
    return quantise_layer(layer, config, hidden, rules, given=solved)


def divergence(model: CausalLM, base: CausalLM, tokens: Int[Array, "B T"]) -> Array:
    """Mean KL(base || model) in nats: a loss of a model, the float model and tokens."""
    wanted, other = (
        jax.nn.log_softmax(m(tokens, capture="none").logits, axis=-1) for m in (base, model)
    )
    return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - other), axis=-1))


def fit_codes(
    module: nnx.Module,
    weights: Mapping[str, Any],
    solved: Mapping[str, Solved],
    formats: Mapping[str, WeightFormat],
    loss: Callable[..., Array],
    batches: Sequence[tuple[Any, ...]],
    held_out: Sequence[tuple[Any, ...]],
    *,
    steps: int,
    code_rate: float = CODE_RATE,
    scale_rate: float = SCALE_RATE,
) -> dict[str, Solved]:
    """Better codes and scales for the matrices of a layer or a model.

    On the device lie, beside the module, about 24 bytes a weight in codes.

    Args:
        module: with the numbers that the codes stand for; holds the new ones afterwards.
        weights: as they were before they became codes, by tree path within the module.
        solved: codes by the same paths.
        formats: of the same paths.
        loss: of the module and a batch.
        batches: arrays on the host, or models. Steps take them in turn.
        held_out: batches that no step sees.
        steps: of the descent.
        code_rate: of the first step, in codes; it falls to zero.
        scale_rate: the same in logarithms of scales.

    Returns:
        New codes and scales; the old ones where the new ones are no better over `held_out`. The
        reports stay those of the old ones.
    """
    starts = {path: _start(solved[path]) for path in formats}
    graph, state = nnx.split(module)
    fixed = {"graph": graph, "formats": tuple(formats.items()), "loss": loss}
    on_device = functools.partial(jax.tree.map, jnp.asarray)

    def overall(places: dict[str, Place]) -> float:
        found = [_measure(places, starts, state, *on_device(b), **fixed) for b in held_out]
        return float(np.mean(found))

    places = {
        p: _place(jnp.asarray(weights[p]), starts[p], format) for p, format in formats.items()
    }
    before = overall(places)
    progress = (places, *(jax.tree.map(jnp.zeros_like, places) for _ in range(2)))
    for number in range(steps):
        share = 1 - number / steps
        rates = jnp.asarray([share * code_rate, share * scale_rate], jnp.float32)
        batch = on_device(batches[number % len(batches)])
        progress = _descend(
            progress, jnp.float32(number + 1), rates, starts, state, *batch, **fixed
        )
    places = progress[0]
    if not overall(places) < before:
        return dict(solved)
    result = dict(solved)
    for path, format in formats.items():
        codes = jax.tree.map(np.asarray, _codes(places[path], starts[path], format))
        result[path] = solved[path]._replace(codes=codes)
        parameter = at(module, path)
        parameter.set_value(result[path].weight(format).astype(parameter[...].dtype))
    return result


def _start(solved: Solved) -> Start:
    return Start(*jax.tree.map(jnp.asarray, (solved.codes, solved.input_scale)))


@functools.partial(jax.jit, static_argnames=("format",))
def _place(weight: Array, start: Start, format: WeightFormat) -> Place:
    codes, weight = start.codes, weight.astype(jnp.float32)
    if start.input_scale is not None:
        weight = weight / start.input_scale[..., None, :]
    scale, zero = of_inputs(codes, format)
    values = codes.values.astype(jnp.float32)
    positions = jnp.clip(weight / scale + zero, values - AWAY, values + AWAY)
    return Place(positions, jnp.log(codes.scale))


def _weight(place: Place, start: Start, format: WeightFormat) -> Array:
    """The numbers that the codes stand for, with the gradient of what is not rounded."""
    scale = _passing(as_stored, jnp.exp(place.logs))
    step, zero = of_inputs(start.codes._replace(scale=scale), format)
    weight = step * (_passing(functools.partial(_values, format), place.positions) - zero)
    return weight if start.input_scale is None else weight * start.input_scale[..., None, :]


def _codes(place: Place, start: Start, format: WeightFormat) -> Codes:
    values = _values(format, place.positions).astype(jnp.uint8)
    return start.codes._replace(values=values, scale=as_stored(jnp.exp(place.logs)))


def _values(format: WeightFormat, positions: Array) -> Array:
    return jnp.clip(jnp.round(positions), 0, 2**format.bits - 1)


def _passing(function: Callable[[Array], Array], x: Array) -> Array:
    """The function's value, and the gradient of the identity."""
    still = jax.lax.stop_gradient(x)
    return function(still) + (x - still)


def _loss(
    places: dict[str, Place],
    starts: dict[str, Start],
    state: Tree,
    *batch: Any,
    graph: Any,
    formats: tuple[tuple[str, WeightFormat], ...],
    loss: Callable[..., Array],
) -> Array:
    changed = nnx.merge(graph, state)
    for path, format in formats:
        parent, name = path.rsplit(".", 1)
        weight = _weight(places[path], starts[path], format)
        dtype = at(changed, path)[...].dtype
        setattr(at(changed, parent), name, nnx.Param(weight.astype(dtype)))
    return loss(changed, *batch)


# Layers that are alike share what is compiled.
_measure = jax.jit(_loss, static_argnames=("graph", "formats", "loss"))


@functools.partial(
    jax.jit, static_argnames=("graph", "formats", "loss"), donate_argnames=("progress",)
)
def _descend(
    progress: Tree, number: Array, rates: Float[Array, "2"], *inputs: Any, **fixed: Any
) -> tuple[Tree, Tree, Tree]:
    """One step of Adam; the first has number 1."""
    places, means, squares = progress
    slopes = jax.grad(functools.partial(_loss, **fixed))(places, *inputs)
    means = jax.tree.map(lambda m, g: MOMENTUM * m + (1 - MOMENTUM) * g, means, slopes)
    squares = jax.tree.map(lambda s, g: SPREAD * s + (1 - SPREAD) * g * g, squares, slopes)
    first, second = (1 - decay**number for decay in (MOMENTUM, SPREAD))

    def moved(rate: Array, x: Array, mean: Array, square: Array) -> Array:
        return x - rate * (mean / first) / (jnp.sqrt(square / second) + 1e-12)

    after = {}
    for path, place in places.items():
        m, s = means[path], squares[path]
        positions = moved(rates[0], place.positions, m.positions, s.positions)
        after[path] = Place(positions, moved(rates[1], place.logs, m.logs, s.logs))
    return after, means, squares
