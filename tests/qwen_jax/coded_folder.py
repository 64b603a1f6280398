"""A folder with a random model in codes, as `qwen-jax quantize` writes one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from pallas_kernels.dequant_matmul.layout import pack
from qwen_jax import CausalLM, QwenConfig
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.native import SHARD_METADATA, Record
from qwen_jax.model import abstract_model, parameter_shapes
from qwen_jax.quant import QTensor, Recipe, Rule, Scheme, TensorScheme, WeightFormat, scheme_of

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": 4089,
}
RECIPE = Recipe(
    "mine",
    (
        Rule("*.experts.gate_up_proj", WeightFormat(3, 32)),
        Rule("*.experts.down_proj", WeightFormat(4, 32, symmetric=False)),
        Rule("*_proj.weight", WeightFormat(8, 32)),
        Rule("embed_tokens.weight", WeightFormat(4, 32)),
        Rule("lm_head.weight", WeightFormat(8, 32)),
    ),
)


def coded_model(
    recipe: Recipe = RECIPE, config: QwenConfig | None = None, **changes: Any
) -> CausalLM:
    """A random model; made by NumPy, so that nothing is compiled."""
    config = config or QwenConfig.from_hf(CONFIG | changes)
    random = np.random.default_rng(5)
    scheme = scheme_of(parameter_shapes(config), recipe)
    model = abstract_model(config, scheme)
    state = nnx.state(model)
    for path, variable in nnx.to_flat_state(state):
        like = variable.get_value()
        if isinstance(like, QTensor):
            variable.set_value(_random_codes(like, random))
        else:
            centre = 1.0 if path[-2].endswith("norm") else 0.0
            values = centre + random.normal(0, like.shape[-1] ** -0.5, like.shape)
            variable.set_value(jnp.asarray(values.astype(like.dtype)))
    nnx.update(model, state)
    return model


def _random_codes(like: QTensor, random: np.random.Generator) -> QTensor:
    values = random.integers(0, 2**like.bits, like.shape).astype(np.uint8)
    scale = random.uniform(0.5, 1.5, like.scale.shape) / 2**like.bits / like.inputs**0.5
    zero = None
    if like.zero is not None:
        zero = random.uniform(0, 2**like.bits, like.zero.shape).astype(like.zero.dtype)
    return dataclasses.replace(
        like,
        codes=jnp.asarray(pack(values, like.bits)),
        scale=jnp.asarray(scale.astype(like.scale.dtype)),
        zero=None if zero is None else jnp.asarray(zero),
    )


def scheme_from(model: CausalLM, recipe: Recipe = RECIPE) -> Scheme:
    """What the model's tensors are stored in."""
    tensors = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        if isinstance(value, QTensor):
            form = WeightFormat(value.bits, value.group_size, value.zero is None)
            scheme = TensorScheme(form, value.input_scale is not None)
            tensors[".".join(map(str, path))] = scheme
    return Scheme(recipe.name, tensors)


def arrays_of(model: CausalLM) -> dict[str, np.ndarray]:
    """Tensors of the folder by key."""
    arrays = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        key, value = "model." + ".".join(map(str, path)), variable.get_value()
        key = key.removeprefix("model.") if path[0] == "lm_head" else key
        parts = {"": value}
        if isinstance(value, QTensor):
            names = ("codes", "scale", "zero", "input_scale")
            parts = {f".{name}": getattr(value, name) for name in names}
        arrays |= {key + end: np.asarray(a) for end, a in parts.items() if a is not None}
    return arrays


def write_coded(
    folder: Path, arrays: dict[str, np.ndarray], scheme: Scheme, **changes: Any
) -> Path:
    """Writes tensors, config.json and conversion.json."""
    folder.mkdir(exist_ok=True)
    # `save_file` writes memory as it lies.
    arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    config = CONFIG | changes | {"quantization_config": scheme.to_config()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors", metadata=dict(SHARD_METADATA))
    checksums = {k: hashlib.sha256(a.tobytes()).hexdigest() for k, a in arrays.items()}
    Record(layout=Layout(), checksums=checksums).write(folder)
    return folder
