"""A folder with a random model in codes, as `qwen-jax quantize` writes one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from qwen_jax import CausalLM, QwenConfig
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.native import SHARD_METADATA, Record
from qwen_jax.model import initialise
from qwen_jax.quant import QTensor, Recipe, Rule, Scheme, TensorScheme, WeightFormat

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


def coded_model(recipe: Recipe = RECIPE, **changes: Any) -> CausalLM:
    """A random model."""
    return initialise(QwenConfig.from_hf(CONFIG | changes), jax.random.key(5), recipe)


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
    config = CONFIG | changes | {"quantization_config": scheme.to_config()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "model.safetensors", metadata=dict(SHARD_METADATA))
    checksums = {k: hashlib.sha256(a.tobytes()).hexdigest() for k, a in arrays.items()}
    Record(layout=Layout(), checksums=checksums).write(folder)
    return folder
