"""What tests of routers and interventions share."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_jax import CausalLM
from qwen_jax.model import ModelOutput

LENGTHS = np.array([13, 9], np.int32)
# A configuration of two layers with six experts.
SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def tokens(tiny: CausalLM) -> np.ndarray:
    """Two rows, the second with padding."""
    random = np.random.default_rng(11)
    return random.integers(0, tiny.config.vocab_size, (2, int(LENGTHS.max())), np.int32)


@pytest.fixture(scope="session")
def plain(tiny: CausalLM, tokens: np.ndarray) -> ModelOutput:
    """The model as it is, on `tokens`."""
    return tiny(tokens, LENGTHS)
