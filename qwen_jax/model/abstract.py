"""A model that holds shapes only."""

from __future__ import annotations

import jax
from flax import nnx

from ..config import QwenConfig
from ..quant import Scheme, in_codes
from .decoder import CausalLM


def parameter_shapes(config: QwenConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each tensor of the parameter tree by path, none of them in codes."""
    leaves = nnx.to_flat_state(nnx.state(CausalLM(config)))
    return {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in leaves
    }


def abstract_model(config: QwenConfig, scheme: Scheme) -> CausalLM:
    """A model of shapes and dtypes, with those matrices in codes that a scheme names."""
    model = CausalLM(config)
    if not scheme.tensors:
        return model
    state, leaves = nnx.state(model), in_codes(parameter_shapes(config), scheme)
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(leaves[".".join(map(str, path))])
    nnx.update(model, state)
    return model
