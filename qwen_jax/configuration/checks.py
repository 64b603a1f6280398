"""What the values of a `QwenConfig` must satisfy, each on its own and together."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from .families import DTYPES, FAMILIES, IMPLEMENTATIONS, MAY_BE_ZERO, SLIDING, WIDTHS, Family
from .field_reader import Findings, is_integer, is_number

if TYPE_CHECKING:
    from ..config import QwenConfig

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Fields that at least one model type lacks.
_OPTIONAL = frozenset(
    name for family in FAMILIES.values() for name in (*family.defaults, *family.fixed)
)


def check_config(config: QwenConfig, findings: Findings) -> None:
    """Record every value that no model can be built from."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        findings.refuse("model_type", config.model_type, ", ".join(FAMILIES))
        return
    _check_values(config, family, findings)
    if findings.problems:
        return
    _check_fields_of_family(config, family, findings)
    _check_attention(config, findings)
    _check_layer_types(config, family, findings)
    _check_linear_attention(config, findings)
    _check_experts(config, family, findings)
    _check_widths(config, findings)


def _check_values(config: QwenConfig, family: Family, findings: Findings) -> None:
    """Check each value on its own; the other checks rely on it."""
    integers = [name for name, default in family.defaults.items() if type(default) is int]
    for name in dict.fromkeys((*_SIZES, *integers)):
        value: object = getattr(config, name)
        minimum = 0 if name in MAY_BE_ZERO else 1
        if name not in WIDTHS and not is_integer(value, minimum):
            findings.refuse(name, value, f"an integer of at least {minimum}")
    if not is_number(config.rms_norm_eps) or config.rms_norm_eps <= 0:
        findings.refuse("rms_norm_eps", config.rms_norm_eps, "a number above 0")
    if not is_number(config.router_aux_loss_coef) or config.router_aux_loss_coef < 0:
        findings.refuse("router_aux_loss_coef", config.router_aux_loss_coef, "a number, 0 or more")
    if config.hidden_act != "silu":
        findings.refuse("hidden_act", config.hidden_act, "'silu'")
    if config.implementation not in (None, *IMPLEMENTATIONS):
        accepted = f"{' or '.join(IMPLEMENTATIONS)}, or None for the first that takes a call"
        findings.refuse("implementation", config.implementation, accepted)
    for name in ("dtype", "mamba_ssm_dtype"):
        if getattr(config, name) not in DTYPES:
            findings.refuse(name, getattr(config, name), " or ".join(DTYPES))
    for name in ("layer_types", "mlp_only_layers", "eos_token_id", "expert_group_widths"):
        if not isinstance(getattr(config, name), tuple):
            findings.refuse(name, getattr(config, name), "a tuple")


def _check_fields_of_family(config: QwenConfig, family: Family, findings: Findings) -> None:
    """A field that the model type lacks must hold the value under which it does nothing."""
    for item in fields(config):
        if item.name in family.defaults or item.name not in _OPTIONAL:
            continue
        expected = family.fixed.get(item.name, item.default)
        if item.name == "qkv_bias" and "qkv_bias" not in family.fixed:
            expected = config.attention_bias
        value: object = getattr(config, item.name)
        if value != expected:
            findings.refuse(item.name, value, f"{expected} with model_type {config.model_type!r}")


def _check_attention(config: QwenConfig, findings: Findings) -> None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        findings.refuse(
            "num_attention_heads", heads, f"a multiple of num_key_value_heads {kv_heads}"
        )
    if config.rotary_dim < 2 or config.rotary_dim % 2:
        partial = config.rope_parameters.partial_rotary_factor
        findings.refuse(
            "head_dim",
            config.head_dim,
            f"one whose rotary part, int(head_dim * {partial:g}), is even and above 0; "
            f"it is {config.rotary_dim}",
        )


def _check_layer_types(config: QwenConfig, family: Family, findings: Findings) -> None:
    kinds, accepted = config.layer_types, ", ".join(family.layer_kinds)
    if len(kinds) != config.num_hidden_layers:
        findings.refuse(
            "layer_types",
            f"{len(kinds)} long",
            f"{config.num_hidden_layers} entries, one for each of num_hidden_layers",
        )
    for kind in dict.fromkeys(kinds):
        if kind not in family.layer_kinds:
            findings.refuse(f"layer_types[{kinds.index(kind)}]", kind, accepted)
    if family.sliding == "all" and SLIDING in kinds and set(kinds) != {SLIDING}:
        findings.refuse("layer_types", kinds, f"one kind for all layers of {config.model_type}")
    window = config.sliding_window
    if SLIDING in kinds and not is_integer(window, 1):
        findings.refuse(
            "sliding_window",
            window,
            "an integer of at least 1, with use_sliding_window true, "
            "as layer_types has sliding_attention",
        )
    if SLIDING not in kinds and window is not None:
        findings.refuse("sliding_window", window, "null, as no entry of layer_types slides")


def _check_linear_attention(config: QwenConfig, findings: Findings) -> None:
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if keys and values % keys:
        findings.refuse(
            "linear_num_value_heads", values, f"a multiple of linear_num_key_heads {keys}"
        )


def _check_experts(config: QwenConfig, family: Family, findings: Findings) -> None:
    outside = [i for i in config.mlp_only_layers if not 0 <= i < config.num_hidden_layers]
    if outside:
        findings.refuse(
            "mlp_only_layers", outside, f"layers from 0 to {config.num_hidden_layers - 1}"
        )
    if config.num_experts == 0:
        if "num_experts" in family.defaults and "intermediate_size" not in family.defaults:
            findings.refuse("num_experts", 0, "at least 1: every layer of this type is sparse")
        return
    if not 1 <= config.num_experts_per_tok <= config.num_experts:
        findings.refuse(
            "num_experts_per_tok",
            config.num_experts_per_tok,
            f"from 1 to num_experts {config.num_experts}",
        )
    _check_expert_groups(config, findings)


def _check_expert_groups(config: QwenConfig, findings: Findings) -> None:
    widths = config.expert_group_widths
    if not widths:
        return
    if not all(is_integer(width, 1) for width in widths):
        findings.refuse("expert_group_widths", widths, "integers of at least 1")
    elif config.num_experts % len(widths):
        findings.refuse(
            "expert_group_widths",
            f"{len(widths)} long",
            f"a number of groups that divides num_experts {config.num_experts}",
        )
    elif config.moe_intermediate_size != max(widths):
        findings.refuse(
            "moe_intermediate_size",
            config.moe_intermediate_size,
            f"{max(widths)}, the largest of expert_group_widths",
        )


def _check_widths(config: QwenConfig, findings: Findings) -> None:
    """A width is one integer or one a layer, and above 0 at each layer that uses it."""
    layers = range(config.num_hidden_layers)
    for name in WIDTHS:
        value: object = getattr(config, name)
        widths = value if isinstance(value, tuple) else (value or 0,)
        if not all(is_integer(width, 0) for width in widths):
            findings.refuse(name, value, "an integer, or a list with one for each layer")
        elif isinstance(value, tuple) and len(value) != config.num_hidden_layers:
            findings.refuse(
                name,
                f"{len(value)} long",
                f"one width for each of {config.num_hidden_layers} layers",
            )
        elif name != "shared_expert_intermediate_size":
            sparse = name == "moe_intermediate_size"
            users = [i for i in layers if config.is_sparse(i) == sparse]
            if empty := [i for i in users if config.width(name, i) == 0]:
                findings.refuse(name, value, f"a width above 0 for layers {empty}, which use it")
