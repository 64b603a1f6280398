"""What differs between the Qwen model types: defaults of their fields, and fixed traits.

The defaults are those of the configuration classes in transformers 5.24. A file that leaves a
field out means its family's default, never another family's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"

DTYPES = ("float32", "bfloat16")
IMPLEMENTATIONS = ("triton", "reference")
# Widths that may differ from layer to layer, and all integer fields for which 0 means something.
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
MAY_BE_ZERO = (*WIDTHS, "num_experts", "num_experts_per_tok", "mtp_num_hidden_layers")

# How `use_sliding_window` chooses layers: the last ones, every other one of the first ones, or all.
SlidingRule = Literal["from_max_window_layers", "even_below_max_window_layers", "all"]
Default = int | float | bool | str | tuple[int, ...] | None


@dataclass(frozen=True)
class Family:
    """Traits of one model type.

    Attributes:
        architecture: Name of the causal language model class in transformers.
        defaults: Value of each field that the family has, where a file leaves it out. A `head_dim`
            of None stands for `hidden_size // num_attention_heads`.
        fixed: Fields the family does not let a file choose.
        neutral: The only values a file may give to switches that the family lacks; others ask for
            another forward pass.
        layer_kinds: Accepted entries of `layer_types`.
        sliding: Which layers slide when `use_sliding_window` is true; None where no layer can.
        partial_rotary_factor: Rotated fraction of each head when the file gives none.
        mrope_section: Frequencies of the time, height and width axes when the file gives none.
        qk_norm: Whether queries and keys are normalised.
        zero_centred: Whether layer norms scale by (1 + w), and attention has an output gate.
    """

    architecture: str
    defaults: Mapping[str, Default]
    fixed: Mapping[str, bool] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    layer_kinds: tuple[str, ...] = (FULL, SLIDING)
    sliding: SlidingRule | None = None
    partial_rotary_factor: float = 1.0
    mrope_section: tuple[int, ...] | None = None
    qk_norm: bool = True
    zero_centred: bool = False


_COMMON: dict[str, Default] = {
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
_DENSE: dict[str, Default] = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_ROUTED: dict[str, Default] = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "expert_group_widths": (),
}
_HYBRID: dict[str, Default] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "attention_bias": False,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 0,
}

_NO_EXPERTS: dict[str, tuple[object, ...]] = {"num_experts": (0,), "num_local_experts": (0,)}
_GATED: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True,),
    "output_gate_type": ("silu", "swish"),
    "layer_scale": (False,),
    "use_sliding_window": (False,),
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(
            architecture="Qwen2ForCausalLM",
            defaults=_COMMON | _DENSE | {"head_dim": None},
            fixed={"qkv_bias": True},
            neutral=_NO_EXPERTS,
            sliding="from_max_window_layers",
            qk_norm=False,
        ),
        "qwen2_moe": Family(
            architecture="Qwen2MoeForCausalLM",
            defaults=_COMMON
            | _ROUTED
            | {
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "head_dim": None,
                "qkv_bias": True,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
            },
            sliding="even_below_max_window_layers",
            qk_norm=False,
        ),
        "qwen3": Family(
            architecture="Qwen3ForCausalLM",
            defaults=_COMMON | _DENSE | {"head_dim": 128, "attention_bias": False},
            neutral=_NO_EXPERTS,
            sliding="from_max_window_layers",
        ),
        "qwen3_moe": Family(
            architecture="Qwen3MoeForCausalLM",
            defaults=_COMMON
            | _ROUTED
            | {
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": None,
                "attention_bias": False,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            neutral={"shared_expert_intermediate_size": (0,)},
            sliding="all",
        ),
        "qwen3_next": Family(
            architecture="Qwen3NextForCausalLM",
            defaults=_COMMON
            | _HYBRID
            | _ROUTED
            | {
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 48,
                "num_key_value_heads": 2,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "norm_topk_prob": True,
            },
            neutral=_GATED,
            layer_kinds=(FULL, LINEAR),
            partial_rotary_factor=0.25,
            zero_centred=True,
        ),
        "qwen3_5_text": Family(
            architecture="Qwen3_5ForCausalLM",
            defaults=_COMMON
            | _HYBRID
            | {
                "vocab_size": 248320,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 32,
                "num_key_value_heads": 4,
            },
            neutral=_GATED | _NO_EXPERTS,
            layer_kinds=(FULL, LINEAR),
            partial_rotary_factor=0.25,
            mrope_section=(11, 11, 10),
            zero_centred=True,
        ),
        "qwen3_5_moe_text": Family(
            architecture="Qwen3_5MoeForCausalLM",
            defaults=_COMMON
            | _HYBRID
            | {
                "vocab_size": 248320,
                "hidden_size": 2048,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "router_aux_loss_coef": 0.001,
                "expert_group_widths": (),
            },
            fixed={"norm_topk_prob": True},
            neutral=_GATED
            | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],), "norm_topk_prob": (True,)},
            layer_kinds=(FULL, LINEAR),
            partial_rotary_factor=0.25,
            mrope_section=(11, 11, 10),
            zero_centred=True,
        ),
    }
)

# The types of released composite files, whose text part has a type of its own.
COMPOSITE_TYPES: Mapping[str, str] = MappingProxyType(
    {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
)
