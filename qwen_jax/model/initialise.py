"""Random weights, made on the device one tensor at a time."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from ..config import QwenConfig
from .decoder import CausalLM


def initialise(config: QwenConfig, key: Array) -> CausalLM:
    """A model with random weights.

    Matrices are normal with variance 1 / inputs, so that activations keep their size and routing is spread about evenly;
    norms are neutral; decays reach from slow to fast. Peak memory is the model and one tensor.

    Args:
        config: shape and dtype.
        key: from `jax.random.key`.
    """
    model = CausalLM(config)
    state = nnx.state(model)
    for number, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        name = ".".join(str(part) for part in path)
        array = _random(name_kind(name, config), leaf.shape, leaf.dtype, jax.random.fold_in(key, number))
        leaf.set_value(array)
    nnx.update(model, state)
    return model


def name_kind(name: str, config: QwenConfig) -> str:
    """What a parameter is, by its path: `one`, `zero`, `decay`, or `matrix`."""
    if name.endswith("linear_attn.norm.weight"):
        return "one"
    if name.endswith("norm.weight"):
        return "zero" if config.zero_centred_norm else "one"
    if name.endswith(".bias"):
        return "zero"
    if name.endswith(("A_log", "dt_bias")):
        return "decay"
    return "matrix"


@functools.partial(jax.jit, static_argnames=("kind", "shape", "dtype"))
def _random(kind: str, shape: tuple[int, ...], dtype: jnp.dtype, key: Array) -> Array:
    if kind == "one":
        return jnp.ones(shape, dtype)
    if kind == "zero":
        return jnp.zeros(shape, dtype)
    if kind == "decay":
        return jax.random.uniform(key, shape, jnp.float32, -2.0, 2.0).astype(dtype)
    return (jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)).astype(dtype)
