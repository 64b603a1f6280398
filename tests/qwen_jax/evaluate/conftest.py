"""Random models of one layer, which compile at once, and text for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen_jax import CausalLM, QwenConfig
from qwen_jax.evaluate import Document
from qwen_jax.text import Tokenizer

READER = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": 4089,
}


SPARSE = READER | {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "tie_word_embeddings": False,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "eos_token_id": None,
}


@pytest.fixture(scope="session")
def random_text() -> Callable[..., Document]:
    """Makes a document of random ids below 60."""

    def make(tokens: int, seed: int = 0, name: str = "random") -> Document:
        ids = np.random.default_rng(seed).integers(0, 60, tokens)
        return Document(name, ids.astype(np.int32))

    return make


@pytest.fixture(scope="session")
def reader(demo_path: Path) -> tuple[CausalLM, Tokenizer]:
    """A random dense model of one layer, and the demo's tokenizer."""
    tokenizer = Tokenizer.from_folder(demo_path)
    assert tokenizer is not None
    return random_model(READER), tokenizer


@pytest.fixture(scope="session")
def sparse() -> CausalLM:
    """A random model of one layer with six experts and 61 ids."""
    return random_model(SPARSE)


def random_model(fields: dict[str, object]) -> CausalLM:
    random = np.random.default_rng(5)
    model = CausalLM(QwenConfig.from_hf(fields))
    state = nnx.state(model)
    for _, leaf in nnx.to_flat_state(state):
        leaf.set_value(jnp.asarray(random.normal(0, 0.3, leaf.shape), jnp.float32))
    nnx.update(model, state)
    return model


@pytest.fixture(scope="session")
def log_softmax() -> Callable[[np.ndarray], np.ndarray]:
    """The definition, in float64."""

    def compute(logits: np.ndarray) -> np.ndarray:
        wide = np.asarray(logits, np.float64)
        wide = wide - wide.max(-1, keepdims=True)
        return wide - np.log(np.exp(wide).sum(-1, keepdims=True))

    return compute
