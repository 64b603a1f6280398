"""`QwenConfig`: the architecture of a text model, to and from Hugging Face's `config.json`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .configuration.checks import check_config
from .configuration.families import FAMILIES, LINEAR
from .configuration.field_reader import Findings
from .configuration.presets import preset_fields
from .configuration.rope_parameters import RopeParameters
from .configuration.spellings import load_config_file, read_fields, write_fields
from .errors import ConfigError

__all__ = ["QwenConfig", "RopeParameters"]


@dataclass(frozen=True, kw_only=True)
class QwenConfig:
    """Architecture of a Qwen text model, in Hugging Face's field names.

    Frozen and hashable, so that it can be a static argument of `jax.jit`. Construct it with
    `from_hf` or `preset`, and vary it with `dataclasses.replace`.

    Attributes:
        model_type: `qwen2`, `qwen2_moe`, `qwen3`, `qwen3_moe`, `qwen3_next`, `qwen3_5_text` or
            `qwen3_5_moe_text`.
        vocab_size: Rows of the embedding table.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Number of decoder layers.
        num_attention_heads: Query heads of an attention layer.
        num_key_value_heads: Key and value heads of an attention layer.
        head_dim: Width of an attention head.
        intermediate_size: Width of a dense feed-forward block, or one a layer; None where the type
            has none.
        rms_norm_eps: Added to the mean square in every norm.
        max_position_embeddings: Context length the model is made for, in tokens.
        tie_word_embeddings: Whether the output head is the embedding table.
        hidden_act: Activation of the feed-forward blocks; always `silu`.
        qkv_bias: Whether q, k and v projections have a bias.
        attention_bias: Whether q, k, v and o projections have a bias.
        layer_types: `full_attention`, `sliding_attention` or `linear_attention` for each layer.
        sliding_window: Tokens a sliding layer sees, itself included; None where no layer slides.
        rope_parameters: Rotary position parameters.
        linear_num_key_heads: Key heads of a linear attention layer; 0 where the type has none.
        linear_num_value_heads: Value heads of a linear attention layer.
        linear_key_head_dim: Width of a key head of linear attention.
        linear_value_head_dim: Width of a value head of linear attention.
        linear_conv_kernel_dim: Taps of the causal convolution of linear attention.
        mamba_ssm_dtype: Dtype that the cache keeps the state of linear attention in, `float32` or
            `bfloat16`; computed in float32 either way.
        num_experts: Routed experts of a sparse layer; 0 makes every layer dense.
        num_experts_per_tok: Experts that one token uses.
        moe_intermediate_size: Width of a routed expert, or one a layer.
        expert_group_widths: Widths of routed experts in groups of as many experts each, by id: with
            8 experts and two widths, experts 0 to 3 have the first. () where all have
            `moe_intermediate_size`, else that is the largest of them. No released model has it.
        shared_expert_intermediate_size: Width of the shared expert, or one a layer; 0 for none.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to 1.
        decoder_sparse_step: Layer i is sparse only if i + 1 is a multiple of this.
        mlp_only_layers: Layers that are dense all the same.
        router_aux_loss_coef: Weight of the load balancing loss in training.
        mtp_num_hidden_layers: Multi-token prediction layers the configuration announces.
        bos_token_id: Id of the token that begins a text.
        eos_token_id: Ids that end a text.
        pad_token_id: Id of the padding token.
        dtype: Dtype of parameters and activations, `float32` or `bfloat16`.
        implementation: Implementation that every operation of the model is to use, `triton` or
            `reference`; None for the first that takes a call. No part of the architecture: it is
            neither read from a `config.json` nor written to one.

    Raises:
        ConfigError: Values are out of range, contradict each other, or do not exist in the model
            type. One error names them all.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int | tuple[int, ...] | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    qkv_bias: bool = False
    attention_bias: bool = False
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rope_parameters: RopeParameters
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    mamba_ssm_dtype: str = "float32"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | tuple[int, ...] = 0
    expert_group_widths: tuple[int, ...] = ()
    shared_expert_intermediate_size: int | tuple[int, ...] = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.0
    mtp_num_hidden_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    implementation: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be built, and fill the one default that depends on the model type."""
        findings = Findings()
        check_config(self, findings)
        findings.raise_problems(
            "QwenConfig", "Correct these fields in the config.json or in the call that made them."
        )
        section = FAMILIES[self.model_type].mrope_section
        if self.rope_parameters.mrope_section is None and section is not None:
            rope = replace(self.rope_parameters, mrope_section=section)
            object.__setattr__(self, "rope_parameters", rope)

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> QwenConfig:
        """Read a Hugging Face configuration.

        Every spelling that released files use is understood: composite or flat, `rope_scaling` or
        `rope_parameters`, `dtype` or `torch_dtype`. What a file leaves out has the default of its
        model type in transformers. In a composite file the outer `tie_word_embeddings` governs;
        where it is missing, the inner one does. The end tokens of both levels count. Fields without
        influence on the text model are ignored.

        Args:
            source: A model folder, a `config.json`, or its content as a dict.

        Returns:
            The configuration.

        Raises:
            ConfigError: The file is missing or no JSON object, the model type is unknown, or fields
                are malformed or ask for a forward pass that is not implemented. One error names all
                such fields.

        Warns:
            UserWarning: A value is missing that should not be, is contradicted elsewhere in the
                file, or has no effect.
        """
        values, name = (
            (source, "the given configuration")
            if isinstance(source, Mapping)
            else load_config_file(source)
        )
        findings = Findings()
        fields = read_fields(values, findings)
        findings.raise_problems(name, "Correct these fields; nothing was loaded.")
        try:
            config = cls(**fields)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        for note in findings.notes:
            warnings.warn(f"{name}: {note}", UserWarning, stacklevel=2)
        return config

    def to_hf(self) -> dict[str, Any]:
        """Return a flat `config.json` object that transformers reads, of the causal language model.

        `from_hf` of the result equals this configuration. Widths given one a layer are written as
        lists, which transformers does not read.
        """
        return write_fields(self)

    @classmethod
    def preset(cls, name: str) -> QwenConfig:
        """Return the configuration of a released model, such as `qwen3.6-35b-a3b`.

        Raises:
            ConfigError: There is no such preset; the message lists the names.
        """
        return cls.from_hf(preset_fields(name))

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised for each head."""
        return FAMILIES[self.model_type].qk_norm

    @property
    def zero_centred_norm(self) -> bool:
        """Whether norms scale by (1 + weight); the gated norm of linear attention never does."""
        return FAMILIES[self.model_type].zero_centred

    @property
    def attn_gate(self) -> bool:
        """Whether `q_proj` also makes a gate for the output of attention, head by head."""
        return FAMILIES[self.model_type].zero_centred

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of each head that rotate."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def is_moe(self) -> bool:
        """Whether any layer is sparse."""
        return any(self.is_sparse(layer) for layer in range(self.num_hidden_layers))

    @property
    def is_hybrid(self) -> bool:
        """Whether any layer is linear attention."""
        return LINEAR in self.layer_types

    @property
    def key_dim(self) -> int:
        """Width of the keys of a linear attention layer, all heads together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of the values of a linear attention layer, all heads together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution of a linear attention layer: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    def is_sparse(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) has routed experts, not a dense block."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    def width(self, name: str, layer: int) -> int:
        """Return a width at one layer.

        Args:
            name: `intermediate_size`, `moe_intermediate_size` or `shared_expert_intermediate_size`.
            layer: Index from 0.

        Returns:
            The width; 0 where the model type has none.
        """
        value: int | tuple[int, ...] | None = getattr(self, name)
        if isinstance(value, tuple):
            return value[layer]
        return value or 0
