"""Codes and scales fitted together, on what a layer or a whole model puts out.

Matrices are put in codes one by one, each on its own outputs. What becomes of their errors
together, in convolutions, gates, norms and further layers, is not seen there. Here all codes and
scales of a module follow the gradient of the final error. Everything else stays.

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
from jaxtyping import Array, Float

from qwen_jax.model import FlatModel
from qwen_jax.quant import WeightFormat

from .calibrate import at
from .methods import Codes
from .methods.codes import as_stored, of_inputs

# Adam's.
MOMENTUM, SPREAD = 0.9, 0.99
# How far from its code a position starts at most, on the side of the weight. At 0.5 and more the
# first steps would undo what made up for errors elsewhere.
AWAY = 0.45

Tree = Any


class Start(NamedTuple):
    """A tensor in codes before the fit.

    Attributes:
        codes: arrays on the host or the device.
        input_scale: float32 [*, I], a factor of each input; None where there is none. It stays.
    """

    codes: Codes
    input_scale: Any


class Place(NamedTuple):
    """What moves of a tensor: the positions of its codes [*, O, I], logarithms of its scales."""

    positions: Float[Array, "*S O I"]
    logs: Float[Array, "*S O J"]


class Fit(NamedTuple):
    """What a fit came to.

    Attributes:
        codes: by tree path, NumPy arrays; those of the start where the fit made nothing better.
        before: the loss of the start over what was held out.
        after: the loss of what was fitted.
    """

    codes: dict[str, Codes]
    before: float
    after: float

    @property
    def better(self) -> bool:
        """Whether `codes` are new ones."""
        return self.after < self.before


def _ignore(step: int, loss: Array) -> None:
    pass


def fit_codes(
    module: nnx.Module,
    weights: Mapping[str, Any],
    starts: Mapping[str, Start],
    formats: Mapping[str, WeightFormat],
    loss: Callable[..., Array],
    batches: Sequence[tuple[Any, ...]],
    held_out: Sequence[tuple[Any, ...]],
    *,
    code_rate: float,
    scale_rate: float,
    tell: Callable[[int, Array], None] = _ignore,
) -> Fit:
    """Better codes and scales for the matrices of a layer or a model.

    On the device lie, beside the module, about 24 bytes a weight in codes.

    Args:
        module: computes in float32; what it has in the places of `starts` is not read.
        weights: as they were before they became codes, by tree path within the module.
        starts: codes by the same paths. Zero points stay.
        formats: of the same paths.
        loss: of the module and a batch.
        batches: of each step one; arrays on the host, or flat models.
        held_out: batches that no step sees.
        code_rate: of the first step, in codes; it falls to zero.
        scale_rate: the same in logarithms of scales.
        tell: called after each step with its number, from 1 on, and the loss of its batch before
            it, which may still be under way.
    """
    on_device = functools.partial(jax.tree.map, jnp.asarray)
    starts = {path: on_device(starts[path]) for path in formats}
    flat, fixed = FlatModel.of(module), {"formats": tuple(formats.items()), "loss": loss}

    def overall(places: dict[str, Place]) -> float:
        with jax.default_matmul_precision("highest"):
            found = [_measure(places, starts, flat, *b, **fixed) for b in held_out]
        return float(np.mean(found))

    places = {
        p: _place(jnp.asarray(weights[p]), starts[p], format) for p, format in formats.items()
    }
    before = overall(places)
    progress = (places, *(jax.tree.map(jnp.zeros_like, places) for _ in range(2)))
    for number, batch in enumerate(batches):
        share = 1 - number / len(batches)
        rates = np.asarray([share * code_rate, share * scale_rate], np.float32)
        step = np.float32(number + 1)
        progress, value = _descend(progress, step, rates, starts, flat, *batch, **fixed)
        tell(number + 1, value)
    places = progress[0]
    after = overall(places)
    codes = {path: start.codes for path, start in starts.items()}
    if after < before:
        codes = {p: _codes(places[p], starts[p], format) for p, format in formats.items()}
    return Fit(jax.tree.map(np.asarray, codes), before, after)


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
    flat: FlatModel,
    *batch: Any,
    formats: tuple[tuple[str, WeightFormat], ...],
    loss: Callable[..., Array],
) -> Array:
    changed = flat.module()
    for path, format in formats:
        parent, name = path.rsplit(".", 1)
        weight = _weight(places[path], starts[path], format)
        setattr(at(changed, parent), name, nnx.Param(weight))
    return loss(changed, *batch)


# Layers that are alike share what is compiled.
_measure = jax.jit(_loss, static_argnames=("formats", "loss"))


@functools.partial(jax.jit, static_argnames=("formats", "loss"), donate_argnames=("progress",))
def _descend(
    progress: Tree, number: Array, rates: Float[Array, "2"], *inputs: Any, **fixed: Any
) -> tuple[tuple[Tree, Tree, Tree], Array]:
    """One step of Adam, and the loss before it; the first has number 1."""
    places, means, squares = progress
    value, slopes = jax.value_and_grad(functools.partial(_loss, **fixed))(places, *inputs)
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
    return (after, means, squares), value
