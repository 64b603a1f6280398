"""Tiny models and folders to hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.plan import LoadPlan, plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.checkpoint.tensors import stored_tensors, tree_tensors
from qwen_jax.config import QwenConfig
from qwen_jax.errors import CheckpointError

Arrays = dict[str, np.ndarray]

_BASE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
_SHARED = {"shared_expert_intermediate_size": 10}
_LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "partial_rotary_factor": 0.5,
}
_OLD_ROPE = {"rope_theta": 10000.0}
_NEW_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    }
}
_FAMILIES = {
    "qwen2": {**_BASE, **_OLD_ROPE},
    "qwen2_moe": {**_BASE, **_OLD_ROPE, **_MOE, **_SHARED, "mlp_only_layers": [1]},
    "qwen3": {**_BASE, **_OLD_ROPE, "attention_bias": True},
    "qwen3_moe": {**_BASE, **_OLD_ROPE, **_MOE, "decoder_sparse_step": 2},
    "qwen3_next": {**_BASE, **_OLD_ROPE, **_MOE, **_SHARED, **_LINEAR},
    "qwen3_5_text": {**_BASE, **_NEW_ROPE, **_LINEAR},
    "qwen3_5_moe_text": {**_BASE, **_NEW_ROPE, **_MOE, **_SHARED, **_LINEAR},
}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., QwenConfig]:
    """Gives a tiny configuration of a model type, with fields of its config.json changed."""

    def make(model_type: str, **changes: Any) -> QwenConfig:
        return QwenConfig.from_hf({"model_type": model_type, **_FAMILIES[model_type], **changes})

    return make


@pytest.fixture(params=_FAMILIES)
def family(request: pytest.FixtureRequest, tiny: Callable[..., QwenConfig]) -> QwenConfig:
    """Each model type in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def random_tree() -> Callable[..., Arrays]:
    """Makes a parameter tree of random float32 values that bfloat16 and float16 hold exactly."""

    def make(config: QwenConfig, mtp_layers: int = 0) -> Arrays:
        rng = np.random.default_rng(0)
        return {
            path: rng.integers(-128, 128, tensor.shape).astype(np.float32) / 64
            for path, tensor in tree_tensors(config, mtp_layers).items()
        }

    return make


@pytest.fixture(scope="session")
def stored() -> Callable[..., Arrays]:
    """Regroups a tree into the tensors of a folder, in bfloat16."""

    def make(
        config: QwenConfig, tree: Mapping[str, np.ndarray], layout: Layout, mtp_layers: int = 0
    ) -> Arrays:
        arrays = {}
        for key, tensor in stored_tensors(config, layout, mtp_layers).items():
            arrays[key] = np.zeros(tensor.shape, ml_dtypes.bfloat16)
            for piece in tensor.pieces:
                piece.scatter(arrays[key], tree[piece.path])
        return arrays

    return make


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes arrays as a folder of `shards` shards with an index; 0 means a single file."""

    def write(arrays: Arrays, *, shards: int = 0, name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        if not shards:
            save_file(arrays, folder / "model.safetensors")
            return folder
        placed = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {key: arrays[key] for key in sorted(arrays)[number::shards]}
            save_file(part, folder / file)
            placed |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write


@pytest.fixture
def moe(tiny: Any, random_tree: Any, stored: Any) -> tuple[QwenConfig, Arrays, Arrays]:
    """A tiny hybrid MoE configuration, its tree, and its tensors as released."""
    config = tiny("qwen3_5_moe_text")
    tree = random_tree(config)
    return config, tree, stored(config, tree, Layout("model.language_model."))


@pytest.fixture
def planned(write_folder: Callable[..., Path]) -> Callable[..., LoadPlan]:
    """Plans a folder of the given arrays."""

    def plan(config: QwenConfig, arrays: Arrays, **options: Any) -> LoadPlan:
        return plan_load(open_folder(write_folder(arrays, **options)), config)

    return plan


@pytest.fixture
def refused(planned: Callable[..., LoadPlan]) -> Callable[[QwenConfig, Arrays], str]:
    """Gives the message with which a folder of the given arrays is refused."""

    def message(config: QwenConfig, arrays: Arrays) -> str:
        with pytest.raises(CheckpointError) as caught:
            planned(config, arrays)
        return str(caught.value)

    return message
