"""`quantization_config` in words: read strictly, and written as it is read."""

import copy
import json

import pytest

from qwen_jax.errors import CheckpointError
from qwen_jax.quant import Scheme, TensorScheme, WeightFormat

CONFIG = {
    "quant_method": "qwen_jax",
    "format_version": 2,
    "recipe": "q3",
    "tensors": {
        "lm_head.weight": {"bits": 4, "group_size": 32, "symmetric": True, "input_scale": False},
        "layers.0.mlp.experts.down_proj": {
            "bits": 3,
            "group_size": 64,
            "symmetric": False,
            "input_scale": True,
        },
    },
}


def test_words_become_a_scheme_and_the_same_words():
    scheme = Scheme.from_config(json.loads(json.dumps(CONFIG)))

    assert scheme.recipe == "q3"
    assert scheme.tensors["lm_head.weight"] == TensorScheme(WeightFormat(4, 32, True), False)
    down = scheme.tensors["layers.0.mlp.experts.down_proj"]
    assert down == TensorScheme(WeightFormat(3, 64, False), True)
    assert scheme.bits == 3
    assert json.dumps(scheme.to_config()) == json.dumps(CONFIG)


def test_nothing_in_codes_is_16_bits():
    assert Scheme().bits == 16


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("quant_method",), "gptq", ("gptq", "qwen-jax quantize")),
        (("format_version",), 1, ("format_version 1", "reads 2", "upgrade")),
        (("format_version",), True, ("format_version true",)),
        (("format_version",), "1", ('format_version "1"',)),
        (("recipe",), 3, ("recipe is 3",)),
        (("tensors",), {}, ("tensors is {}",)),
        (("tensors",), None, ("tensors is null",)),
        (("extra",), 1, ('unknown field "extra"',)),
        (("tensors", "lm_head.weight"), 3, ("lm_head.weight", "object")),
        (("tensors", "lm_head.weight", "bits"), 5, ("lm_head.weight", "bits 5", "(3, 4, 8)")),
        (("tensors", "lm_head.weight", "bits"), 4.0, ("lm_head.weight", "bits 4.0")),
        (("tensors", "lm_head.weight", "group_size"), -1, ("group_size -1", "(32, 64, 128)")),
        (("tensors", "lm_head.weight", "symmetric"), 1, ("symmetric 1", "true and false")),
        (("tensors", "lm_head.weight", "input_scale"), None, ("input_scale null",)),
        (("tensors", "lm_head.weight", "zero"), 1, ("lm_head.weight", 'unknown field "zero"')),
    ],
)
def test_a_wrong_value_is_named(place, value, words):
    config = copy.deepcopy(CONFIG)
    inner = config
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value

    with pytest.raises(CheckpointError) as error:
        Scheme.from_config(config)

    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("name", ["recipe", "tensors", "format_version", "quant_method"])
def test_a_field_that_is_missing_is_named(name):
    with pytest.raises(CheckpointError, match=name):
        Scheme.from_config({key: value for key, value in CONFIG.items() if key != name})


def test_all_faults_are_in_one_error():
    tensors = {f"t{i}": {"bits": 5} for i in range(3)}

    with pytest.raises(CheckpointError) as error:
        Scheme.from_config(CONFIG | {"tensors": tensors})

    assert all(f'tensor "t{i}" lacks group_size' in str(error.value) for i in range(3))
