"""Shapes of released models by name: `config.json` fields that are not their type's defaults.

Values are those of the released configurations where a public copy was found. Assumed from other
members of the family: `rope_theta` of qwen3.5-397b-a17b, qwen3.5-122b-a10b and qwen1.5-moe-a2.7b,
the context length of qwen3-coder-next, and token ids where no copy was found. The files of the
qwen3_next models hold a multi-token prediction layer that their configurations do not announce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

_QWEN2 = {"model_type": "qwen2_moe", "bos_token_id": 151643, "eos_token_id": 151643}
_QWEN3 = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "norm_topk_prob": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_NEXT = {
    "model_type": "qwen3_next",
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "rope_theta": 1e7,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 248044,
}
_QWEN3_5_MOE = _QWEN3_5 | {"model_type": "qwen3_5_moe_text"}

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen3.6-35b-a3b": _QWEN3_5_MOE | {"bos_token_id": 248044},
    "qwen3.5-35b-a3b": _QWEN3_5_MOE,
    "qwen3.5-122b-a10b": _QWEN3_5_MOE
    | {
        "hidden_size": 3072,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
    "qwen3.5-397b-a17b": _QWEN3_5_MOE
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "linear_num_value_heads": 64,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
    "qwen3-next-80b-a3b": _NEXT | {"rope_theta": 1e7},
    "qwen3-coder-next": _NEXT | {"rope_theta": 5e6},
    "qwen3-30b-a3b": _QWEN3
    | {"num_hidden_layers": 48, "rope_theta": 1e6, "max_position_embeddings": 40960},
    "qwen3-coder-30b-a3b": _QWEN3
    | {
        "num_hidden_layers": 48,
        "intermediate_size": 5472,
        "rope_theta": 1e7,
        "max_position_embeddings": 262144,
        "router_aux_loss_coef": 0.0,
    },
    "qwen3-235b-a22b": _QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
    },
    "qwen2-57b-a14b": _QWEN2
    | {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    },
    "qwen1.5-moe-a2.7b": _QWEN2 | {"rope_theta": 1e6},
    "qwen3.5-0.8b": _QWEN3_5
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "intermediate_size": 3584,
        "tie_word_embeddings": True,
    },
    "qwen3.5-2b": _QWEN3_5
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 16,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "qwen3.5-4b": _QWEN3_5
    | {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "qwen3.5-9b": _QWEN3_5,
    "qwen3.5-27b": _QWEN3_5
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "intermediate_size": 17408,
    },
}

PRESET_NAMES: tuple[str, ...] = tuple(_PRESETS)


def preset_fields(name: str) -> Mapping[str, Any]:
    """Return the `config.json` fields of a released model's shape.

    Raises:
        ConfigError: There is no such preset; the message lists the names.
    """
    fields = _PRESETS.get(name.lower())
    if fields is None:
        raise ConfigError(
            f"there is no preset {name!r}; accepted: {', '.join(PRESET_NAMES)}. "
            "For another model give the folder with its config.json"
        )
    return fields
