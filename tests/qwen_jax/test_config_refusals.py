"""Configurations that are refused: each error names the field, its value and what is accepted."""

import json

import pytest

from qwen_jax.config import QwenConfig
from qwen_jax.errors import ConfigError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ANY_LAYERS = {"num_hidden_layers": 2}


def refuse(model_type, match, **fields):
    with pytest.raises(ConfigError, match=match):
        QwenConfig.from_hf({"model_type": model_type, "rope_theta": 1e6} | fields)


@pytest.mark.parametrize(
    "model_type", ["qwen4_exp", "qwen3_vl_moe", "llama", "Qwen3", "", None, 3, ["qwen3"]]
)
def test_model_types_that_are_not_implemented(model_type):
    refuse(model_type, r"model_type is .*; accepted: qwen2, qwen2_moe, .*qwen3_5_moe_text")


def test_model_types_that_contradict_each_other():
    refuse("qwen3_5_moe", "text_config.model_type", text_config={"model_type": "qwen3_5_text"})
    refuse("qwen3_vl_moe", "model_type is 'qwen3_vl_moe'", text_config={"model_type": "qwen3"})
    refuse("qwen3_5", "text_config is 'x'", text_config="x")


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "decoder_sparse_step",
    ],
)
@pytest.mark.parametrize("value", ["64", -64, 0, True, 64.0, [64]])
def test_sizes_are_integers_above_0(name, value):
    refuse("qwen3_next", rf"{name} is .*; accepted: an integer of at least 1", **{name: value})


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "decoder_sparse_step"])
def test_null_is_refused_where_transformers_refuses_it(name):
    refuse("qwen3_next", f"{name} is null", **{name: None})


@pytest.mark.parametrize(
    ("model_type", "fields", "match"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: 'silu'"),
        ("qwen3", {"is_causal": False}, "is_causal is False; accepted: True"),
        ("qwen3", {"auto_map": {"AutoConfig": "x.Y"}}, "auto_map is .*no custom code"),
        ("qwen3", {"per_layer_config": {"0": {}}}, "per_layer_config"),
        ("qwen3", {"num_experts": 8}, "num_experts is 8; accepted: 0"),
        ("qwen3_5", {"num_local_experts": 8}, "num_local_experts is 8; accepted: 0"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False; accepted: True"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate is False; accepted: True"),
        ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window is True; accepted: False"),
        (
            "qwen3_moe",
            {"scoring_func": "sigmoid"},
            "scoring_func is 'sigmoid'; accepted: 'softmax'",
        ),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 8},
            "shared_expert_intermediate_size is 8",
        ),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; accepted: 1"),
        ("qwen3_5_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; accepted: \[\]"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob is False; accepted: True"),
        ("qwen3_5_moe", {"num_experts": 0}, "num_experts is 0; .*every layer of this type"),
        ("qwen3", {"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; accepted: bfloat16, fl"),
        ("qwen3", {"dtype": 16}, "dtype is 16"),
        ("qwen3", {"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; accepted: a number above 0"),
        ("qwen3", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; accepted: a finite number"),
        ("qwen3", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("qwen3", {"attention_bias": "false"}, "attention_bias is 'false'; accepted: true or fal"),
        ("qwen3", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ("qwen3", {"eos_token_id": "<eos>"}, "eos_token_id is '<eos>'; accepted: a token id"),
        ("qwen3", {"eos_token_id": [1, True]}, "eos_token_id"),
    ],
)
def test_values_that_ask_for_another_model(model_type, fields, match):
    refuse(model_type, match, **fields)


@pytest.mark.parametrize(
    ("model_type", "fields", "match"),
    [
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 4}, "a multiple of num_key"),
        ("qwen2", {"hidden_size": 100}, "hidden_size is 100; .*without head_dim"),
        ("qwen3", {"head_dim": 7}, "head_dim is 7; .*even and above 0; it is 7"),
        ("qwen3_5", {"head_dim": 20}, "head_dim is 20; .*it is 5"),
        ("qwen3_5", {"head_dim": 2}, "head_dim is 2; .*it is 0"),
        ("qwen3_5", {"linear_num_value_heads": 24}, "a multiple of linear_num_key_heads 16"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129; .*1 to num_exp"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ("qwen3_moe", {"num_experts": 8, "num_local_experts": 16}, "num_local_experts is 16"),
        ("qwen3_moe", {"num_experts": -1}, "num_experts is -1; accepted: an integer of at least 0"),
        ("qwen3_moe", {"decoder_sparse_step": -1}, "decoder_sparse_step is -1"),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, r"mlp_only_layers is \[2\]; .*from 0 to 1"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, r"mlp_only_layers is \[-1\]"),
        ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers is 0"),
        ("qwen3_moe", {"intermediate_size": 0, "mlp_only_layers": [1]}, r"layers \[1\]"),
        ("qwen3_moe", {"moe_intermediate_size": [8]}, "moe_intermediate_size is '1 long'"),
        ("qwen3_moe", {"moe_intermediate_size": [8, "8"]}, "moe_intermediate_size"),
        ("qwen3_moe", {"moe_intermediate_size": [8, 0]}, r"above 0 for layers \[1\]"),
        ("qwen3", {"intermediate_size": [8, 8, 8]}, "intermediate_size is '3 long'"),
        ("qwen3", {"layer_types": [FULL]}, "layer_types is '1 long'; accepted: 2 entries"),
        ("qwen3", {"layer_types": [FULL, "conv"]}, r"layer_types\[1\] is 'conv'; accepted: full"),
        ("qwen3", {"layer_types": [FULL, LINEAR]}, r"layer_types\[1\] is 'linear_attention'"),
        ("qwen3_next", {"layer_types": [SLIDING, FULL]}, r"layer_types\[0\] is 'sliding_att"),
        ("qwen3", {"layer_types": FULL}, "layer_types is 'full_attention'"),
        ("qwen3", {"layer_types": [FULL, SLIDING]}, "sliding_window is null or missing"),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "layer_types": [FULL, FULL]},
            "layer_types is .*only sliding_attention",
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval is 0"),
    ],
)
def test_values_that_contradict_each_other(model_type, fields, match):
    refuse(model_type, match, **ANY_LAYERS | fields)


def test_one_error_names_all_problems():
    with pytest.raises(ConfigError) as caught:
        QwenConfig.from_hf(
            {
                "model_type": "qwen3_moe",
                "hidden_size": "64",
                "num_experts": -1,
                "hidden_act": "gelu",
                "rope_scaling": {"type": "unheard_of"},
                "auto_map": {"AutoConfig": "x.Y"},
            }
        )
    for name in ("hidden_size", "num_experts", "hidden_act", "rope_type", "auto_map"):
        assert f"{name} is " in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"qwen3"', "[" * 100_000, "\ufeff{}"])
def test_files_that_hold_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match=r"config\.json"):
            QwenConfig.from_hf(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        QwenConfig.from_hf(tmp_path)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        QwenConfig.from_hf(tmp_path / "nowhere")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        QwenConfig.from_hf(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        QwenConfig.from_hf(tmp_path)


def test_errors_of_a_file_name_it(tmp_path):
    values = {"model_type": "qwen3", "rope_theta": 1e6, "num_key_value_heads": 5}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"config\.json.*\n.*num_attention_heads is 32"):
        QwenConfig.from_hf(tmp_path)
