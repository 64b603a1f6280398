"""Models that several test files share: loaded, run and compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

import qwen_jax
from benchmarks.parity import Expected, read_expected, run_prompts
from qwen_jax import CausalLM, QwenConfig
from qwen_jax.model import ModelOutput
from qwen_jax.text import Tokenizer
from tests.compiling import optimised

GOLDEN = Path(__file__).parents[1] / "golden"

# One layer of each kind, experts in both, and sizes that are no multiples of each other.
TINY = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def demo(demo_path: Path) -> tuple[CausalLM, Tokenizer]:
    """The bundled model in float32, and its tokenizer."""
    model, tokenizer = qwen_jax.load(demo_path, dtype="float32")
    assert tokenizer is not None
    return model, tokenizer


@pytest.fixture(scope="session")
def demo_expected() -> Expected:
    """What transformers computed with the demo model."""
    return read_expected(GOLDEN / "demo.expected")


@pytest.fixture(scope="session")
def demo_output(demo: tuple[CausalLM, Tokenizer], demo_expected: Expected) -> ModelOutput:
    """The demo model over the prompts of `demo_expected` as one ragged batch, without a cache.

    By a program that is optimised as users' are.
    """
    with optimised():
        return run_prompts(demo[0], list(demo_expected.prompts.values()))


@pytest.fixture(scope="session")
def tiny() -> CausalLM:
    """A random hybrid model in float32, small enough to compile in a second or two."""
    random = np.random.default_rng(3)
    model = CausalLM(QwenConfig.from_hf(TINY))
    state = nnx.state(model)
    for path, leaf in nnx.to_flat_state(state):
        wide = random.normal(0, 1, leaf.shape).astype(np.float32)
        is_matrix = leaf.shape[-1] > 1 and len(leaf.shape) > 1
        scale = leaf.shape[-1] ** -0.5 if is_matrix else 0.3
        centre = 1.0 if path[-3:] == ("linear_attn", "norm", "weight") else 0.0
        leaf.set_value(jnp.asarray(centre + scale * wide, jnp.float32))
    nnx.update(model, state)
    return model


@pytest.fixture
def no_type_checks() -> Iterator[None]:
    """Values as they reach users, for whom annotations are not checked."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
