"""Reading `config.json`: defaults, spellings and derived values against published numbers."""

import json

import pytest

from qwen_jax.config import QwenConfig

ROPE = {"rope_type": "default", "rope_theta": 1e6}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read(model_type, **fields):
    return QwenConfig.from_hf({"model_type": model_type, "rope_parameters": ROPE} | fields)


# The configuration classes of transformers 5.24.
DENSE = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "num_experts": 0,
}
MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "router_aux_loss_coef": 0.001,
}
LINEAR_SIZES = {
    "head_dim": 256,
    "attention_bias": False,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 16,
}
DEFAULTS = {
    "qwen2": DENSE | {"qkv_bias": True, "attention_bias": False},
    "qwen3": DENSE | {"qkv_bias": False, "attention_bias": False},
    "qwen2_moe": MOE
    | {
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 5632,
        "qkv_bias": True,
        "attention_bias": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
    "qwen3_moe": MOE
    | {
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 6144,
        "qkv_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "shared_expert_intermediate_size": 0,
        "norm_topk_prob": False,
    },
    "qwen3_next": MOE
    | LINEAR_SIZES
    | {
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": LINEAR_SIZES
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "num_experts": 0,
    },
    "qwen3_5_moe_text": LINEAR_SIZES
    | {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "intermediate_size": None,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
    },
}
COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": (),
    "pad_token_id": None,
}

QWEN36_TEXT = {
    "model_type": "qwen3_5_moe_text",
    "attention_bias": False,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
QWEN36 = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "image_token_id": 248056,
    "text_config": QWEN36_TEXT,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "vision_config": {"model_type": "qwen3_5_moe", "hidden_act": "gelu_pytorch_tanh", "depth": 27},
}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_field_left_out_has_the_default_of_its_type(model_type):
    config = read(model_type)
    for name, value in (COMMON | DEFAULTS[model_type]).items():
        assert getattr(config, name) == value, name
    partial = 0.25 if model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") else 1.0
    assert config.rope_parameters.partial_rotary_factor == partial
    assert config.rotary_dim == config.head_dim * partial
    section = (11, 11, 10) if model_type.startswith("qwen3_5") else None
    assert config.rope_parameters.mrope_section == section


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_traits_of_each_type(model_type):
    config = read(model_type)
    hybrid = model_type in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    assert config.zero_centred_norm is config.attn_gate is config.is_hybrid is hybrid
    assert config.qk_norm is (model_type not in ("qwen2", "qwen2_moe"))
    assert config.is_moe is ("moe" in model_type or model_type == "qwen3_next")


def test_a_released_composite_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN36))
    config = QwenConfig.from_hf(tmp_path)
    assert config == QwenConfig.from_hf(str(tmp_path / "config.json")) == QwenConfig.from_hf(QWEN36)
    assert config.model_type == "qwen3_5_moe_text"
    assert [i for i, kind in enumerate(config.layer_types) if kind == FULL] == list(range(3, 40, 4))
    assert config.rope_parameters.rope_theta == 1e7
    assert (config.rotary_dim, config.key_dim, config.value_dim) == (64, 2048, 4096)
    assert config.conv_dim == 8192
    assert config.mtp_num_hidden_layers == 1
    assert config.eos_token_id == (248044,)


def test_nested_and_flat_files_agree():
    nested = QwenConfig.from_hf(QWEN36)
    assert QwenConfig.from_hf(QWEN36_TEXT) == nested
    assert QwenConfig.from_hf(QWEN36_TEXT | {"model_type": "qwen3_5_moe"}) == nested
    without = {k: v for k, v in QWEN36_TEXT.items() if k != "model_type"}
    assert QwenConfig.from_hf(QWEN36 | {"text_config": without}) == nested
    assert QwenConfig.from_hf({"text_config": QWEN36_TEXT}) == nested


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False, None])
def test_the_outer_flag_governs_tied_embeddings(outer, inner):
    text = {k: v for k, v in QWEN36_TEXT.items() if k != "tie_word_embeddings"}
    if inner is not None:
        text["tie_word_embeddings"] = inner
    values = QWEN36 | {"text_config": text, "tie_word_embeddings": outer}
    if inner in (outer, None):
        assert QwenConfig.from_hf(values).tie_word_embeddings is outer
        return
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        assert QwenConfig.from_hf(values).tie_word_embeddings is outer


def test_the_inner_flag_governs_where_the_outer_is_missing():
    text = QWEN36_TEXT | {"tie_word_embeddings": True}
    outer = {"model_type": "qwen3_5_moe", "text_config": text}
    assert QwenConfig.from_hf(outer).tie_word_embeddings
    assert QwenConfig.from_hf(text).tie_word_embeddings


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [0, 3]}, [1, 2]),
        ({"mlp_only_layers": None}, [0, 1, 2, 3]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [3]),
        ({"num_experts": 0}, []),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_which_layers_are_sparse(model_type, fields, sparse):
    config = read(model_type, num_hidden_layers=4, **fields)
    assert [i for i in range(4) if config.is_sparse(i)] == sparse
    assert config.is_moe is bool(sparse)


@pytest.mark.parametrize(
    ("model_type", "fields", "sliding"),
    [
        ("qwen2", {"max_window_layers": 2}, [2, 3, 4]),
        ("qwen3", {"max_window_layers": 2}, [2, 3, 4]),
        ("qwen2_moe", {"max_window_layers": 3}, [0, 2]),
        ("qwen2_moe", {}, [0, 2, 4]),
        ("qwen3_moe", {}, [0, 1, 2, 3, 4]),
        ("qwen3", {}, []),
        ("qwen3", {"layer_types": [FULL, SLIDING] * 2 + [FULL]}, [1, 3]),
        ("qwen3", {"max_window_layers": 0, "sliding_window": None}, []),
    ],
)
def test_which_layers_slide(model_type, fields, sliding):
    fields = {"sliding_window": 7, "use_sliding_window": True, "num_hidden_layers": 5} | fields
    config = read(model_type, **fields)
    assert [i for i, kind in enumerate(config.layer_types) if kind == SLIDING] == sliding
    assert config.sliding_window == (7 if sliding else None)
    off = read(model_type, **fields | {"use_sliding_window": False, "layer_types": None})
    assert off.layer_types == (FULL,) * 5


def test_linear_layers_come_from_the_interval_or_the_list():
    kinds = read("qwen3_next", num_hidden_layers=7, full_attention_interval=3).layer_types
    assert kinds == (LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL, LINEAR)
    listed = [FULL, LINEAR, LINEAR]
    config = read("qwen3_5", num_hidden_layers=3, layer_types=listed, full_attention_interval=3)
    assert config.layer_types == tuple(listed)
