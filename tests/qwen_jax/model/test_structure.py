"""The tree of modules says nothing of a layer but what it is."""

from __future__ import annotations

import jax

from qwen_jax import CausalLM, QwenConfig
from qwen_jax.checkpoint.parameters import abstract_parameters
from qwen_jax.configuration.presets import PRESET_NAMES
from qwen_jax.model import parameter_shapes
from tests.qwen_jax.conftest import TINY


def test_layers_of_one_kind_share_what_is_compiled_for_a_layer():
    """A number in a layer's structure would compile converters' programs once for each layer."""
    kinds = ["linear_attention", "full_attention"] * 2
    config = QwenConfig.from_hf(TINY | {"num_hidden_layers": 4, "layer_types": kinds})
    first, second, third, fourth = map(jax.tree.structure, CausalLM(config).layers)
    assert first == third
    assert second == fourth
    assert first != second


def test_modules_have_the_dtypes_that_files_are_loaded_in():
    """Each is said twice, by modules and by the table of names; `A_log` is float32 in both."""
    for name in PRESET_NAMES:
        config = QwenConfig.preset(name)
        assert parameter_shapes(config) == abstract_parameters(config), name
