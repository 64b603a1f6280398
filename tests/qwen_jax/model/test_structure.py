"""The tree of modules says nothing of a layer but what it is."""

from __future__ import annotations

import jax

from qwen_jax import CausalLM, QwenConfig
from tests.qwen_jax.conftest import TINY


def test_layers_of_one_kind_share_what_is_compiled_for_a_layer():
    """A number in a layer's structure would compile converters' programs once for each layer."""
    kinds = ["linear_attention", "full_attention"] * 2
    config = QwenConfig.from_hf(TINY | {"num_hidden_layers": 4, "layer_types": kinds})
    first, second, third, fourth = map(jax.tree.structure, CausalLM(config).layers)
    assert first == third
    assert second == fourth
    assert first != second
