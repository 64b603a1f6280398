"""Static scales of activations, searched on calibration text.

Twice over the text: first for the largest |x| of each channel, then for the share of it at which
the squared error of rounding and clipping is smallest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..errors import RequestError
from ..model import CausalLM, FlatModel, Routing, check_model, whole
from ..model.layers import Linear
from ..model.moe import Experts
from ..quant import ActivationFormat, fake_quantise
from .activations import run_experts, wrapped
from .scores import DEFAULT_BATCH_SIZE
from .windows import Windows

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Of the largest |x|."""

Observe = Callable[[Array, Array, Array | None], Array]
"""Of inputs [*, I], which of them count [*], and a channel's largest [I], or None."""


def activation_scales(
    model: CausalLM,
    windows: Windows,
    format: ActivationFormat,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> dict[str, np.ndarray]:
    """A scale for each input of each linear and expert, from text that is not to be evaluated.

    An expert counts the tokens that chose it; one that none chose takes what is largest among the
    other experts, channel by channel. A channel that was always 0 takes the mean of the others.

    Args:
        model: a loaded model.
        windows: of calibration text.
        format: bits; its kind is "static".
        batch_size: windows in one forward pass.

    Returns:
        Tree path -> float32 [I], ready for `with_activations`. Experts have two entries:
        PATH.gate_up_proj [D] and PATH.down_proj [E, F].

    Raises:
        RequestError: a format that needs no scales.
        FloatingPointError: NaN or infinite activations; names the path.
    """
    check_model(model)
    if format.kind != "static":
        raise RequestError(
            f"activation kind is {format.kind!r}, which takes no scales; accepted is 'static'"
        )
    flat, none = FlatModel.of(model), dict[str, Array]()
    largest: dict[str, np.ndarray] = {}
    for found in _passes(flat, windows, batch_size, none, None):
        largest = {path: np.maximum(a, largest.get(path, a)) for path, a in found.items()}
    largest = {path: _filled(path, array) for path, array in largest.items()}
    errors: dict[str, np.ndarray] = {}
    on_device = {path: jnp.asarray(array) for path, array in largest.items()}
    for found in _passes(flat, windows, batch_size, on_device, format):
        errors = {path: a + errors.get(path, 0.0) for path, a in found.items()}
    shares = np.array(SHARES, np.float32)
    return {
        path: array * shares[np.argmin(errors[path], axis=-2)] / format.largest_code
        for path, array in largest.items()
    }


def _passes(
    model: FlatModel,
    windows: Windows,
    batch_size: int,
    largest: dict[str, Array],
    format: ActivationFormat | None,
) -> Iterator[dict[str, np.ndarray]]:
    for batch in windows.batches(batch_size):
        yield jax.device_get(_observed(model, batch.tokens, batch.lengths, largest, format))


def _filled(path: str, largest: np.ndarray) -> np.ndarray:
    """Every channel above 0: rounding divides by it."""
    if not np.isfinite(largest).all():
        raise FloatingPointError(f"NaN or infinite inputs of {path}; check the weights")
    if largest.ndim == 2:
        largest = np.where(largest.any(axis=-1, keepdims=True), largest, largest.max(axis=0))
    lit = largest > 0
    mean = largest.sum(axis=-1, keepdims=True) / np.maximum(lit.sum(axis=-1, keepdims=True), 1)
    filled = np.where(lit, largest, mean)
    return np.where(filled > 0, filled, 1.0).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("format",))
def _observed(
    model: FlatModel,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    largest: dict[str, Array],
    format: ActivationFormat | None,
) -> dict[str, Array]:
    """Of one batch, padding left out: the largest |x| of each input, or with a format the errors.

    Errors are [shares, I], those of experts' down projections [E, shares, F].
    """
    found: dict[str, Array] = {}
    valid = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    observe: Observe = _most if format is None else functools.partial(_errors, format)
    observer = _Observer(valid, observe, largest, found)

    def wrap(path: str, module: Linear | Experts) -> _ObservedLinear | _ObservedExperts:
        if isinstance(module, Linear):
            return _ObservedLinear(module, path, observer)
        return _ObservedExperts(module, path, observer)

    observed = wrapped(whole(model), wrap)
    observed.forward(tokens, None, jnp.zeros_like(lengths), lengths)
    return found


@dataclasses.dataclass(frozen=True)
class _Observer:
    """What is looked at, and what was seen of it, by path."""

    valid: Bool[Array, "B T"]
    observe: Observe
    largest: dict[str, Array]
    found: dict[str, Array]

    # Arrays are traced.
    __no_type_check__ = True

    def look(self, path: str, x: Float[Array, "B T i"]) -> None:
        self.found[path] = self.observe(x, self.valid, self.largest.get(path))


class _ObservedLinear:
    def __init__(self, module: Linear, path: str, observer: _Observer):
        self.module, self.path, self.observer = module, path, observer

    def __call__(self, x: Array) -> Array:
        self.observer.look(self.path, x)
        return self.module(x)


class _ObservedExperts:
    def __init__(self, module: Experts, path: str, observer: _Observer):
        self.module, self.path, self.observer = module, path, observer

    @property
    def gate_up_proj(self) -> nnx.Param:
        return self.module.gate_up_proj

    def __call__(self, x: Array, routing: Routing) -> Array:
        observer, down = self.observer, f"{self.path}.down_proj"
        observer.look(f"{self.path}.gate_up_proj", x)

        def middle(h: Array, used: Array, largest: Array | None) -> tuple[Array, Array]:
            return h, observer.observe(h, used, largest)

        largest = observer.largest.get(down)
        y, observer.found[down] = run_experts(self.module, x, routing, middle, largest)
        return y


def _most(
    x: Float[Array, "*B i"], counted: Bool[Array, "*B"], _: Array | None
) -> Float[Array, " i"]:
    magnitude = jnp.where(counted[..., None], jnp.abs(x.astype(jnp.float32)), 0.0)
    return jnp.max(magnitude, axis=tuple(range(x.ndim - 1)))


def _errors(
    format: ActivationFormat,
    x: Float[Array, "*B i"],
    counted: Bool[Array, "*B"],
    largest: Float[Array, " i"] | None,
) -> Float[Array, "shares i"]:
    """Squared error of each channel, summed, for each share of its largest."""
    assert largest is not None
    x = jnp.where(counted[..., None], x.astype(jnp.float32), 0.0).reshape(-1, x.shape[-1])

    def error(share: Array) -> Array:
        rounded = fake_quantise(x, format, share * largest / format.largest_code)
        return jnp.sum(jnp.square(x - rounded), axis=0)

    return jax.lax.map(error, jnp.array(SHARES, jnp.float32))
