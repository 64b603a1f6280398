"""Random weights, made on the device one tensor at a time."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from ..config import QwenConfig
from ..quant import QTensor, Recipe, Scheme, scheme_of
from ..quant.random import random_qtensor
from .abstract import abstract_model, parameter_shapes
from .decoder import CausalLM


def initialise(config: QwenConfig, key: Array, recipe: Recipe | None = None) -> CausalLM:
    """A model with random weights.

    Matrices are normal with variance 1 / inputs, and routing is spread about evenly. As in a
    trained model, each layer changes the residual stream a little: embeddings have variance 1
    (unless they are the head too), and the projections back into the stream are scaled by 1 /
    sqrt(2 * layers) (GPT-2's rule). Norms are neutral; decays reach from slow to fast. Codes are
    uniform, of the same variance. Peak memory is the model and one tensor.

    Args:
        config: shape and dtype.
        key: from `jax.random.key`.
        recipe: which matrices are in codes; none if None.

    Raises:
        RequestError: the recipe does not fit the model.
    """
    scheme = Scheme() if recipe is None else scheme_of(parameter_shapes(config), recipe)
    model = abstract_model(config, scheme)
    state = nnx.state(model)
    for number, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        kind, scale = _kind(".".join(map(str, path)), leaf.shape, config)
        ours, like = jax.random.fold_in(key, number), leaf.get_value()
        if isinstance(like, QTensor):
            leaf.set_value(random_qtensor(like, scale, ours))
        else:
            leaf.set_value(_random(kind, like.shape, like.dtype, scale, ours))
    nnx.update(model, state)
    return model


def _kind(name: str, shape: tuple[int, ...], config: QwenConfig) -> tuple[str, float]:
    """How to fill a parameter: `one`, `zero`, `decay` or `normal`, and the latter's deviation."""
    if name.endswith("linear_attn.norm.weight"):
        return "one", 0.0
    if name.endswith("norm.weight"):
        return ("zero" if config.zero_centred_norm else "one"), 0.0
    if name.endswith(".bias"):
        return "zero", 0.0
    if name.endswith(("A_log", "dt_bias")):
        return "decay", 0.0
    if name == "embed_tokens.weight" and not config.tie_word_embeddings:
        return "normal", 1.0
    back = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj"))
    branches = 2 * config.num_hidden_layers if back else 1
    return "normal", (shape[-1] * branches) ** -0.5


@functools.partial(jax.jit, static_argnames=("kind", "shape", "dtype", "scale"))
def _random(kind: str, shape: tuple[int, ...], dtype: jnp.dtype, scale: float, key: Array) -> Array:
    if kind == "one":
        return jnp.ones(shape, dtype)
    if kind == "zero":
        return jnp.zeros(shape, dtype)
    if kind == "decay":
        return jax.random.uniform(key, shape, jnp.float32, -2.0, 2.0).astype(dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
