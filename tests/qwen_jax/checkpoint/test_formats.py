"""Quantised folders are recognised and refused by name before anything else is said of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError

MODULE = "model.layers.0.mlp.experts.0.up_proj."


@pytest.fixture
def message(tiny, write_folder):
    def refused(config_json, keys):
        path = write_folder({key: np.ones((1, 2), np.float32) for key in keys})
        if config_json is not None:
            (path / "config.json").write_text(json.dumps(config_json))
        with pytest.raises(CheckpointError) as caught:
            plan_load(open_folder(path), tiny("qwen3_moe"))
        return str(caught.value)

    return refused


@pytest.mark.parametrize(
    ("config", "format"),
    [
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "FP8 block"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "AWQ"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                }
            },
            "compressed-tensors, pack-quantized",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"quantization_config": "odd"}, "odd"),
        ({"quantization_config": {"bits": 4}}, "unknown quantization_config"),
        ({"quantization": {"group_size": 64, "bits": 8, "mode": "affine"}}, "MLX"),
        ({"quantization_config": {"group_size": 64, "bits": 8}}, "MLX"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "FP8 block"),
    ],
)
def test_format_is_named_from_the_configuration(message, config, format):
    text = message(config, [f"{MODULE}weight"])
    assert f"quantised weights ({format})" in text
    assert "qwen-jax convert" in text


@pytest.mark.parametrize(
    ("endings", "format"),
    [
        (["weight", "weight_scale_inv"], "FP8 block"),
        (["qweight", "qzeros", "scales", "g_idx"], "GPTQ"),
        (["qweight", "qzeros", "scales"], "AWQ"),
        (["weight_packed", "weight_scale", "weight_shape"], "compressed-tensors"),
        (["weight", "weight_scale"], "compressed-tensors"),
        (["weight", "scales", "biases"], "MLX"),
        (["weight", "weight_scale", "weight_scale_2", "input_scale"], "ModelOpt"),
        (["weight", "weight.absmax", "weight.quant_map"], "bitsandbytes"),
        (["weight", "activation_scale"], "FP8"),
    ],
)
@pytest.mark.parametrize("config", [None, {}, {"quantization_config": None}])
def test_format_is_named_from_the_keys(message, endings, format, config):
    text = message(config, [MODULE + ending for ending in endings])
    assert f"quantised weights ({format})" in text


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_damaged_configuration_is_refused(tiny, write_folder, content):
    path = write_folder({"x": np.ones(1, np.float32)})
    (path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        plan_load(open_folder(path), tiny("qwen3_moe"))
