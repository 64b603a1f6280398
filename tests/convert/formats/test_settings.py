"""What configurations may say: fields of releases are accepted, all others are named."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.logical import open_logical
from qwen_jax.errors import CheckpointError

PLAIN = {"w.weight": np.ones((2, 2), ml_dtypes.bfloat16)}

# As in released files, some of them put together.
ACCEPTED = {
    "qwen fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_per_tensor": False,
        "act_per_tensor": False,
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
    "transformers fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "dequantize": False,
        "expert_dtype": "fp8",
        "modules_to_convert": None,
        "modules_to_not_convert": None,
        "scale_fmt": "float",
        "weight_block_size": None,
    },
    "autofp8": {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": [],
        "kv_cache_scheme": None,
    },
    "qwen gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "damp_percent": 0.01,
        "static_groups": False,
        "true_sequential": True,
        "lm_head": False,
        "dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}},
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "modules_in_block_to_quantize": [["mlp.gate_proj"]],
    },
    "gptqmodel": {
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "lm_head": False,
        "method": "gptq",
        "quant_method": "gptq",
        "format": "gptq_v2",
        "checkpoint_format": "gptq_v2",
        "pack_dtype": "int32",
        "sym": True,
        "meta": {"quantizer": ["gptqmodel:7.7.0"], "damp_percent": 0.05},
        "dynamic": {"+:.*down.*": {"bits": 8, "group_size": 32, "sym": True}},
    },
    "autoround": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "autoround_version": "0.16.1",
        "provider": "auto-round",
        "iters": 1000,
        "nsamples": 512,
        "seqlen": 4096,
        "low_gpu_mem_usage": True,
        "enable_quanted_input": False,
        "block_name_to_quantize": "model.layers",
        "lm_head": False,
        "desc_act": False,
        "true_sequential": False,
        "damp_percent": 0.01,
    },
    "autoawq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "GEMM",
        "modules_to_not_convert": ["mlp.gate"],
    },
    "transformers awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "version": "gemm",
        "backend": "autoawq",
        "do_fuse": False,
        "exllama_config": None,
        "fuse_max_seq_len": None,
        "modules_to_fuse": None,
        "modules_to_not_convert": None,
        "zero_point": True,
    },
    "llm-compressor": {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "targets": ["re:.*mlp.*"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "actorder": "static",
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 128,
                    "num_bits": 4,
                    "observer": "mse",
                    "observer_kwargs": {},
                    "scale_dtype": None,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                    "zp_dtype": "torch.int8",
                },
            },
            "group_1": {
                "format": "float-quantized",
                "targets": ["Linear"],
                "input_activations": {"num_bits": 8, "dynamic": True},
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "block",
                    "block_structure": "128x128",
                },
            },
        },
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.1",
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_fields_of_releases_are_accepted(opened, name):
    folder = opened(PLAIN, ACCEPTED[name])
    assert list(folder.tensors) == ["w.weight"]
    assert not folder.parts


@pytest.mark.parametrize("name", ACCEPTED)
def test_unknown_fields_are_named(refusal, name):
    text = refusal(PLAIN, ACCEPTED[name] | {"zero_shift": 3, "fp8_dtype_flavor": "gaudi2"})
    assert "config.json: quantization_config.zero_shift: 3" in text
    assert 'quantization_config.fp8_dtype_flavor: "gaudi2"' in text
    assert "unknown fields; understood for" in text
    assert all(field in text for field in ACCEPTED[name] if field != "quant_method")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen fp8", "fmt", "e5m2"),
        ("qwen fp8", "weight_block_size", [128]),
        ("qwen fp8", "weight_block_size", [128, 0]),
        ("qwen fp8", "weight_block_size", [128, True]),
        ("qwen fp8", "weight_block_size", "128x128"),
        ("qwen fp8", "scale_fmt", "e4m3"),
        ("transformers fp8", "expert_dtype", "fp4"),
        ("qwen gptq", "bits", 5),
        ("qwen gptq", "bits", "4"),
        ("qwen gptq", "bits", True),
        ("qwen gptq", "bits", [4]),
        ("qwen gptq", "group_size", 0),
        ("qwen gptq", "group_size", -2),
        ("qwen gptq", "group_size", 1.5),
        ("qwen gptq", "sym", 1),
        ("qwen gptq", "checkpoint_format", "gptq_p"),
        ("qwen gptq", "checkpoint_format", "marlin"),
        ("qwen gptq", "checkpoint_format", {}),
        ("qwen gptq", "pack_dtype", "int16"),
        ("qwen gptq", "is_marlin_format", True),
        ("qwen gptq", "dynamic", [1]),
        ("gptqmodel", "format", "gptq"),
        ("gptqmodel", "rotation", "hadamard"),
        ("gptqmodel", "adapter", {"name": "lora"}),
        ("autoawq", "zero_point", None),
        ("llm-compressor", "format", "nvfp4-pack-quantized"),
        ("llm-compressor", "format", "marlin-24"),
        ("llm-compressor", "transform_config", {"config_groups": {"R1": {}}}),
        ("llm-compressor", "config_groups", ["W4A16"]),
    ],
)
def test_values_that_change_the_meaning_are_refused(opened, refusal, name, field, value):
    config = ACCEPTED[name] | {field: value}
    if value is None:
        opened(PLAIN, config)
        return
    text = refusal(PLAIN, config)
    assert f"config.json: quantization_config.{field} is {json.dumps(value)}; accepted: " in text


def test_overrides_and_groups_are_checked_like_the_rest(refusal):
    dynamic = {"a": {"bits": 9, "shift": 1}, "b": {"pack_dtype": "int8"}, "c": 5, "-:d": {"x": 1}}
    text = refusal(PLAIN, ACCEPTED["qwen gptq"] | {"dynamic": dynamic})
    place = "config.json: quantization_config.dynamic"
    assert f"{place}.a.bits is 9; accepted: 2, 3, 4, 8" in text
    assert f"{place}.a.shift: 1" in text
    assert f'{place}.b.pack_dtype is "int8"' in text
    assert f"{place}.c is 5; accepted: an object" in text
    assert "-:d" not in text
    groups = {
        "g": {
            "targets": ["Linear"],
            "format": "nvfp4-pack-quantized",
            "extra": 0,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 0,
                "block_structure": [1],
                "actorder": "random",
                "clip": 1,
            },
        },
        "h": {"targets": [], "weights": 3},
        "i": {"targets": [], "weights": {"num_bits": 1}},
    }
    text = refusal(PLAIN, ACCEPTED["llm-compressor"] | {"config_groups": groups})
    place = "config.json: quantization_config.config_groups"
    for expected in (
        f'{place}.g.format is "nvfp4-pack-quantized"',
        f"{place}.g.extra: 0",
        f"{place}.g.weights.num_bits is 4; accepted: 8",
        f'{place}.g.weights.strategy is "tensor_group"',
        f"{place}.g.weights.group_size is 0",
        f"{place}.g.weights.block_structure is [1]",
        f'{place}.g.weights.actorder is "random"',
        f"{place}.g.weights.clip: 1",
        f"{place}.h.weights is 3; accepted: an object or null",
        f"{place}.i.weights.num_bits is 1; accepted: 2, 3, 4, 5, 6, 7, 8",
    ):
        assert expected in text


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "modelopt", "mxfp4", "auto-round", "gptq_marlin", "hqq", "fbgemm_fp8", "\x1b"],
)
def test_other_methods_are_refused_by_name(refusal, method):
    text = refusal(PLAIN, {"quant_method": method})
    assert "which are not read; what is read: FP8, GPTQ, AWQ" in text
    assert "\x1b" not in text
    assert method.strip("\x1b").lower() in text.lower()


def test_mlx_is_refused_by_name(refusal):
    details = {"group_size": 64, "bits": 8, "mode": "affine"}
    for where in ({"quantization": details}, {"text_config": {"quantization": details}}):
        assert "quantised weights (MLX)" in refusal(PLAIN, details, **where)
    packed = {"w.weight": np.ones((2, 2), np.uint32)}
    packed |= {"w.scales": np.ones((2, 1), np.float16), "w.biases": np.ones((2, 1), np.float16)}
    assert "quantised weights (MLX)" in refusal(packed)


def test_inner_configuration_is_found_and_must_agree(opened, refusal):
    gptq, awq = ACCEPTED["qwen gptq"], ACCEPTED["autoawq"]
    inner = {"text_config": {"quantization_config": gptq}}
    opened(PLAIN, **inner)
    opened(PLAIN, gptq, **inner)
    assert "text_config.quantization_config differ" in refusal(PLAIN, awq, **inner)
    broken = {"compression_config": ACCEPTED["llm-compressor"] | {"odd": 1}}
    assert "config.json: compression_config.odd: 1" in refusal(PLAIN, **broken)
    broken = {"text_config": {"quantization_config": gptq | {"bits": 5}}}
    assert "config.json: text_config.quantization_config.bits is 5" in refusal(PLAIN, **broken)


def test_file_of_an_older_packer_counts_for_packed_weights_only(write, packing):
    codes, ones = np.ones((8, 32), int), np.ones((8, 1))
    parts = packing.gptq(codes, np.zeros((8, 1), int), ones, 4, 2)
    packed = write({f"w.{leaf}": array for leaf, array in parts.items()})
    plain = write(PLAIN)
    content = {"bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2", "desc_act": False}
    for folder in (packed, plain):
        (folder / "quantize_config.json").write_text(json.dumps(content))
    assert (open_logical(packed).read("w.weight") == 1).all()
    for folder in (packed, plain):
        (folder / "quantize_config.json").write_text("[1")
    open_logical(plain)
    with pytest.raises(ValueError, match=r"quantize_config\.json cannot be read"):
        open_logical(packed)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", "is not a JSON object"),
        ('{"quantization_config": {"bits": 4, "bits": 8}}', "duplicate keys: bits"),
        ('{"quantization_config": 7}', "quantization_config is 7; expected an object"),
        ("{" * 100000, "cannot be read"),
    ],
)
def test_broken_configuration_is_refused(write, content, expected):
    folder = write(PLAIN)
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError) as caught:
        open_logical(folder)
    assert expected in str(caught.value)


FIELDS = sorted({field for config in ACCEPTED.values() for field in config})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weights", "bits", "group_size", "format"]), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(ACCEPTED)), st.sampled_from(FIELDS), JSON)
def test_any_value_is_accepted_or_refused_in_words(write, name, field, value):
    path = write(PLAIN, ACCEPTED[name] | {field: value})
    try:
        assert list(open_logical(path).tensors) == ["w.weight"]
    except CheckpointError as error:
        assert str(error)
