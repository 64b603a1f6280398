"""What tests of routers and interventions share."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_jax import CausalLM
from qwen_jax.model import ModelOutput

LENGTHS = np.array([13, 9], np.int32)


@pytest.fixture(scope="session")
def tokens(tiny: CausalLM) -> np.ndarray:
    """Two rows, the second with padding."""
    random = np.random.default_rng(11)
    return random.integers(0, tiny.config.vocab_size, (2, int(LENGTHS.max())), np.int32)


@pytest.fixture(scope="session")
def plain(tiny: CausalLM, tokens: np.ndarray) -> ModelOutput:
    """The model as it is, on `tokens`."""
    return tiny(tokens, LENGTHS)
