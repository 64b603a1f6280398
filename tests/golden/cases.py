"""The model cases: configurations as a released checkpoint would spell them.

Read by ``make_golden.py`` only; tests read the JSON files that it writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Case:
    """One model: its config.json, how its file is laid out, and why it is here."""

    config: dict[str, Any]
    tests: str
    prefix: str = "model."
    experts: str = "per_expert"
    stored: str = "bfloat16"
    stored_as: dict[str, str] = field(default_factory=dict)
    # Of the tokens; chosen so that no routing or greedy decision is a close call.
    seed: int = 0

    @property
    def text_config(self) -> dict[str, Any]:
        """The text level of the configuration."""
        return self.config.get("text_config", self.config)


def _flat(model_type: str, **fields: Any) -> dict[str, Any]:
    """A flat config.json with what all tiny models share."""
    return {
        "architectures": [CLASSES[model_type]],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 256,
    } | fields


MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _text_3_5(moe: bool, **fields: Any) -> dict[str, Any]:
    """The text level of a Qwen3.5 config.json: no ``torch_dtype``, rotary values in one dict."""
    config = _flat("qwen3_5_moe_text" if moe else "qwen3_5_text")
    del config["torch_dtype"], config["architectures"]
    width = MOE | {"shared_expert_intermediate_size": 48} if moe else {"intermediate_size": 96}
    rope = {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000.0,
        "rope_type": "default",
    }
    return (
        config
        | {"attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "head_dim": 32}
        | {"full_attention_interval": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL]}
        | {"mamba_ssm_dtype": "float32", "pad_token_id": None, "partial_rotary_factor": 0.25}
        | {"rope_parameters": rope, "mtp_num_hidden_layers": 0}
        | DELTA
        | width
        | fields
    )


def _composite(text: dict[str, Any]) -> dict[str, Any]:
    """The two-level config.json of the released Qwen3.5 checkpoints."""
    outer = text["model_type"].removesuffix("_text")
    family = "Qwen3_5Moe" if "moe" in outer else "Qwen3_5"
    return {
        "architectures": [f"{family}ForConditionalGeneration"],
        "image_token_id": 248,
        "model_type": outer,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "transformers_version": "4.57.1",
        "video_token_id": 249,
        "vision_config": {
            "model_type": outer,
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        "vision_end_token_id": 251,
        "vision_start_token_id": 250,
    }


QWEN2 = _flat("qwen2", intermediate_size=96, rope_theta=1000000.0)
QWEN2_MOE = (
    _flat("qwen2_moe", intermediate_size=96, rope_theta=1000000.0)
    | MOE
    | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "norm_topk_prob": False}
)
QWEN3 = _flat(
    "qwen3", intermediate_size=96, head_dim=32, attention_bias=False, rope_theta=1000000.0
)
QWEN3_MOE = _flat("qwen3_moe", intermediate_size=96, rope_theta=1000000.0) | MOE
QWEN3_NEXT = (
    _flat("qwen3_next", intermediate_size=96, head_dim=32, rope_theta=10000000.0)
    | MOE
    | DELTA
    | {"attention_bias": False, "decoder_sparse_step": 1, "full_attention_interval": 4}
    | {"mlp_only_layers": [], "partial_rotary_factor": 0.25, "rope_scaling": None}
    | {"shared_expert_intermediate_size": 48}
)
# The original context is short, so that 150 tokens pass it and the ramp is not trivial.
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
NESTED = "model.language_model."

_moe_full_1_2 = _text_3_5(True, layer_types=[LINEAR, FULL, FULL, LINEAR], num_experts_per_tok=3)
_moe_text = _text_3_5(
    True,
    architectures=["Qwen3_5MoeForCausalLM"],
    dtype="float16",
    mtp_num_hidden_layers=1,
    linear_num_value_heads=6,
)
_moe_yarn = _text_3_5(True, attention_bias=True, tie_word_embeddings=True, vocab_size=257)
_moe_yarn["rope_parameters"] |= YARN | {"rope_type": "yarn", "rope_theta": 10000.0}

CASES: dict[str, Case] = {
    "qwen2": Case(
        QWEN2 | {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2},
        "q, k and v bias; the sliding window fields must be ignored",
        seed=7,
    ),
    "qwen2_sliding": Case(
        QWEN2 | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        "layers from max_window_layers on slide; same weights as qwen2",
        seed=7,
    ),
    "qwen2_moe": Case(
        QWEN2_MOE | {"mlp_only_layers": [1], "qkv_bias": True, "num_experts_per_tok": 3},
        "weights of the top 3 not renormalised, a dense layer, a shared expert, q/k/v bias",
        seed=17,
    ),
    "qwen2_moe_sliding": Case(
        QWEN2_MOE
        | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3}
        | {"norm_topk_prob": True, "qkv_bias": False},
        "even layers below max_window_layers slide, no bias, top-k weights renormalised",
        seed=57,
    ),
    "qwen3": Case(
        QWEN3 | {"attention_bias": True},
        "query/key norms, heads x head_dim != hidden, bias on all four projections",
        seed=10,
    ),
    "qwen3_yarn": Case(
        QWEN3 | {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn"} | YARN},
        "YaRN in the old rope_scaling form",
        seed=11,
    ),
    "qwen3_linear": Case(
        {key: value for key, value in QWEN3.items() if key != "rope_theta"}
        | {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}
        | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 3}
        | {"tie_word_embeddings": True},
        "linear scaling in the new rope_parameters form, tied head, one sliding layer",
        seed=7,
    ),
    "qwen3_moe_sparse": Case(
        QWEN3_MOE | {"norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 24},
        "renormalised top-k, every second layer sparse, head_dim given",
        seed=4,
    ),
    "qwen3_moe_tied": Case(
        {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
        | {"num_local_experts": 8, "mlp_only_layers": [0], "tie_word_embeddings": True}
        | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 20},
        "norm_topk_prob absent (false), num_local_experts, head_dim absent (hidden / heads), "
        "dense layer 0, tied head, bias, every layer slides",
        seed=193,
    ),
    "qwen3_next": Case(
        QWEN3_NEXT,
        "interleaved in_proj_qkvz and in_proj_ba, ratio 2, norm_topk_prob absent (true)",
        seed=43,
    ),
    "qwen3_next_yarn": Case(
        QWEN3_NEXT
        | {"full_attention_interval": 2, "mlp_only_layers": [2], "num_experts_per_tok": 3}
        | {"linear_num_value_heads": 6, "linear_value_head_dim": 24, "rope_theta": 10000.0}
        | {"rope_scaling": {"type": "yarn"} | YARN},
        "YaRN with the legacy key `type` and partial rotary, ratio 3, value head dim != key head "
        "dim, interval 2, a dense layer",
        seed=50,
    ),
    "qwen3_5": Case(
        _composite(
            _text_3_5(False, tie_word_embeddings=True, linear_num_key_heads=4, rms_norm_eps=1e-5)
        ),
        "dense, composite config, tied head, as many key as value heads",
        prefix=NESTED,
        seed=5,
    ),
    "qwen3_5_moe": Case(
        _composite(_moe_full_1_2),
        "composite config, fused experts, ratio 2, full attention at layers 1 and 2; A_log and "
        "linear_attn.norm in float32 with values that bfloat16 cannot hold",
        prefix=NESTED,
        experts="fused",
        stored_as={"A_log": "float32", "linear_attn.norm.weight": "float32"},
        seed=76,
    ),
    "qwen3_5_moe_text": Case(
        _moe_text,
        "flat config over keys under model.language_model., per-expert, float16, MTP announced "
        "but absent, ratio 3",
        prefix=NESTED,
        stored="float16",
        seed=13,
    ),
    "qwen3_5_moe_yarn": Case(
        _composite(_moe_yarn),
        "YaRN inside text_config.rope_parameters, tied head, attention bias, odd vocabulary",
        prefix=NESTED,
        experts="fused",
        seed=80,
    ),
}
