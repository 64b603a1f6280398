"""Bytes of recipes, counted by hand where it matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import QwenConfig
from qwen_jax.checkpoint.parameters import abstract_parameters
from qwen_jax.errors import RequestError
from qwen_jax.quant import (
    RECIPES,
    Recipe,
    Rule,
    Size,
    WeightFormat,
    by_part,
    scheme_of,
    tensor_sizes,
)


def shapes(**tensors):
    return {
        path.replace("__", "."): jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for path, shape in tensors.items()
    }


def uniform(bits, group_size, pattern="*"):
    return Recipe("mine", (Rule(pattern, WeightFormat(bits, group_size)),))


@pytest.mark.parametrize(
    ("recipe", "most"), [("q3", 16.0e9), ("q3-small", 14.5e9), ("q4", 20e9), ("q8", 38e9)]
)
def test_the_35b_model_with_its_mtp_layer(recipe, most):
    config = QwenConfig.preset("qwen3.6-35b-a3b")
    tree = abstract_parameters(config, mtp_layers=config.mtp_num_hidden_layers)
    scheme = scheme_of(tree, RECIPES[recipe])

    sizes = tensor_sizes(tree, scheme)

    assert Size.of(sizes).after <= most
    # 41 layers of 256 experts with three matrices 2048 x 512 each.
    experts = by_part(sizes)["experts"]
    assert experts.values == 41 * 256 * 3 * 2048 * 512
    form = scheme.tensors["layers.7.mlp.experts.down_proj"].format
    assert experts.bits_per_value == form.bits + 16 / form.group_size
    kept = {path for path in tree if path not in scheme.tensors}
    assert all(f"layers.{i}.mlp.gate.weight" in kept for i in range(40))
    assert not any("_proj.weight" in path for path in kept)


def test_short_groups_and_padded_units_to_the_byte():
    """100 inputs are 4 units and 4 groups of 32, or 2 of 64."""
    tree = shapes(a__weight=(7, 100), experts=(2, 7, 100), norm=(7,))

    rules = Rule("a.weight", WeightFormat(3, 32)), Rule("experts", WeightFormat(4, 64, False))
    sizes = tensor_sizes(tree, scheme_of(tree, Recipe("mine", rules)))

    after = {size.path: size.after for size in sizes}
    assert after["a.weight"] == 7 * (4 * 3 * 4 + 4 * 2)
    assert after["experts"] == 2 * 7 * (4 * 4 * 4 + 2 * (2 + 2))
    assert after["norm"] == 14
    assert Size.of(sizes).before == 2 * (700 + 1400 + 7)


def test_a_group_larger_than_the_inputs_is_refused():
    tree = shapes(a__weight=(8, 48), b__weight=(8, 24), c__weight=(8, 64))

    with pytest.raises(RequestError) as error:
        scheme_of(tree, uniform(3, 64))

    text = str(error.value)
    assert "a.weight has 48 inputs, fewer than a group of 64" in text
    assert "b.weight has 24 inputs" in text and "smaller groups or narrower patterns" in text
    assert "c.weight" not in text


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("layers.0.mlp.gate.weight", (60, 64)),
        ("norm.weight", (64,)),
        ("layers.0.linear_attn.conv1d.weight", (64, 1, 64)),
    ],
)
def test_what_is_no_matrix_to_multiply_with_is_refused(path, shape):
    with pytest.raises(RequestError, match=path):
        scheme_of({path: jax.ShapeDtypeStruct(shape, np.float32)}, uniform(4, 32))


def test_a_recipe_that_matches_nothing_is_refused():
    with pytest.raises(RequestError, match=r"nowhere\.\*"):
        scheme_of(shapes(a__weight=(8, 64)), uniform(3, 32, "nowhere.*"))
