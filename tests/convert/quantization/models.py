"""A model of two layers, small enough that all its codes are made in a second, and its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from qwen_jax.checkpoint.mapping import Layout
from tests.convert import sources

# A layer of either kind; 80 inputs end in a group, and a unit of codes, that is not full. Each
# shape in codes is compiled for: several matrices are [96, 80].
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 80,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "max_position_embeddings": 256,
}
RULES: list[dict[str, Any]] = [
    {"pattern": "*.mlp.experts.*", "bits": 3, "group_size": 32},
    {"pattern": "*.mlp.shared_expert.*_proj.weight", "bits": 8, "group_size": 32},
    {"pattern": "*.linear_attn.in_proj_qkv*", "bits": 4, "group_size": 64, "symmetric": False},
    {"pattern": "*.self_attn.q_proj.weight", "bits": 4, "group_size": 64, "symmetric": False},
    {"pattern": "lm_head.weight", "bits": 4, "group_size": 64, "symmetric": False},
    {"pattern": "embed_tokens.weight", "bits": 4, "group_size": 64, "symmetric": False},
]
# For calibrated runs, which compile for every shape, format and method: few of these.
CALIBRATED: dict[str, Any] = {
    "layer_types": ["full_attention", "full_attention"],
}
CALIBRATED_RULES: list[dict[str, Any]] = [
    {
        "pattern": "*.mlp.experts.*",
        "bits": 3,
        "group_size": 32,
        "method": "activation-aware",
    },
    *(
        {
            "pattern": name,
            "bits": 4,
            "group_size": 64,
            "symmetric": False,
            "method": "activation-aware",
        }
        for name in ("*.self_attn.q_proj.weight", "lm_head.weight", "embed_tokens.weight")
    ),
]
WINDOW, WINDOWS = 16, 3


def source(folder: Path, layout: Layout = sources.PLAIN, mtp: int = 0, **fields: Any) -> Path:
    """Writes the model in a layout; the same weights in every one."""
    fields = SIZES | fields
    arrays = sources.tensors(layout, mtp, **fields)
    return sources.write(folder, arrays, mtp_num_hidden_layers=mtp, **fields)


def recipe(folder: Path, rules: list[dict[str, Any]] | None = None) -> Path:
    """Writes the recipe, or one of other rules."""
    file = folder / "mine.json"
    file.write_text(json.dumps({"name": "mine", "rules": RULES if rules is None else rules}))
    return file


def tokens(folder: Path, count: int = WINDOW * WINDOWS, top: int = 96) -> Path:
    """Writes a file of token ids."""
    file = folder / "tokens.npy"
    np.save(file, np.random.default_rng(0).integers(0, top, count).astype(np.int32))
    return file
