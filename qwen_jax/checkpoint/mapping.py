"""The one table between keys in Hugging Face folders and paths in the parameter tree.

A tree path is the key of a text-only checkpoint without its `model.`. `MODEL_ROWS`, `LAYER_ROWS`
and `MTP_ROWS` list every tree tensor with its shape and the condition under which a model has it;
`FORMS` lists the ways in which some are stored otherwise. `tensors` expands both over the layers
and experts of a model; loading and converting follow them from keys to paths, exporting back.

Letters in shapes: V vocabulary, D hidden, N query heads, K key/value heads, H head dim, G rows of
q_proj per query row (2 with an output gate), Hk/Hv and Dk/Dv heads and head dims of linear
attention, R = Hv/Hk, C convolution channels, W its width, E experts, and F, Fs, Fd the width of
an expert, the shared expert and a dense MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from .keys import HEAD, MTP, HeadPrefix, Prefix

if TYPE_CHECKING:
    from ..config import QwenConfig


class Row(NamedTuple):
    """One tensor of the tree: path, shape, when a layer has it, and whether it stays float32."""

    path: str
    shape: str
    when: Callable[[QwenConfig, int], bool]
    float32: bool = False


def _always(config: QwenConfig, layer: int) -> bool:
    return True


def _untied(config: QwenConfig, layer: int) -> bool:
    return not config.tie_word_embeddings


def _linear(config: QwenConfig, layer: int) -> bool:
    return config.layer_types[layer] == "linear_attention"


def _attention(config: QwenConfig, layer: int) -> bool:
    return not _linear(config, layer)


def _qkv_bias(config: QwenConfig, layer: int) -> bool:
    return _attention(config, layer) and config.qkv_bias


def _output_bias(config: QwenConfig, layer: int) -> bool:
    return _attention(config, layer) and config.attention_bias


def _qk_norm(config: QwenConfig, layer: int) -> bool:
    return _attention(config, layer) and config.qk_norm


def _sparse(config: QwenConfig, layer: int) -> bool:
    return config.is_sparse(layer)


def _one_width(config: QwenConfig, layer: int) -> bool:
    return _sparse(config, layer) and not config.expert_group_widths


def _dense(config: QwenConfig, layer: int) -> bool:
    return not config.is_sparse(layer)


def _shared(config: QwenConfig, layer: int) -> bool:
    return _sparse(config, layer) and config.width("shared_expert_intermediate_size", layer) > 0


EMBEDDING = "embed_tokens.weight"

MODEL_ROWS = (
    Row(EMBEDDING, "V D", _always),
    Row("norm.weight", "D", _always),
    Row(HEAD, "V D", _untied),
)

# Under `layers.{i}.`, and under `mtp.layers.{i}.` for a multi-token prediction layer.
LAYER_ROWS = (
    Row("input_layernorm.weight", "D", _always),
    Row("post_attention_layernorm.weight", "D", _always),
    Row("self_attn.q_proj.weight", "G*N*H D", _attention),
    Row("self_attn.k_proj.weight", "K*H D", _attention),
    Row("self_attn.v_proj.weight", "K*H D", _attention),
    Row("self_attn.o_proj.weight", "D N*H", _attention),
    Row("self_attn.q_proj.bias", "G*N*H", _qkv_bias),
    Row("self_attn.k_proj.bias", "K*H", _qkv_bias),
    Row("self_attn.v_proj.bias", "K*H", _qkv_bias),
    Row("self_attn.o_proj.bias", "D", _output_bias),
    Row("self_attn.q_norm.weight", "H", _qk_norm),
    Row("self_attn.k_norm.weight", "H", _qk_norm),
    Row("linear_attn.in_proj_qkv.weight", "C D", _linear),
    Row("linear_attn.in_proj_z.weight", "Hv*Dv D", _linear),
    Row("linear_attn.in_proj_b.weight", "Hv D", _linear),
    Row("linear_attn.in_proj_a.weight", "Hv D", _linear),
    Row("linear_attn.conv1d.weight", "C 1 W", _linear),
    Row("linear_attn.A_log", "Hv", _linear, float32=True),
    Row("linear_attn.dt_bias", "Hv", _linear, float32=True),
    Row("linear_attn.norm.weight", "Dv", _linear, float32=True),
    Row("linear_attn.out_proj.weight", "D Hv*Dv", _linear),
    Row("mlp.gate_proj.weight", "Fd D", _dense),
    Row("mlp.up_proj.weight", "Fd D", _dense),
    Row("mlp.down_proj.weight", "D Fd", _dense),
    Row("mlp.gate.weight", "E D", _sparse),
    Row("mlp.experts.gate_up_proj", "E 2*F D", _one_width),
    Row("mlp.experts.down_proj", "E D F", _one_width),
    Row("mlp.shared_expert.gate_proj.weight", "Fs D", _shared),
    Row("mlp.shared_expert.up_proj.weight", "Fs D", _shared),
    Row("mlp.shared_expert.down_proj.weight", "D Fs", _shared),
    Row("mlp.shared_expert_gate.weight", "1 D", _shared),
)


def group_rows(config: QwenConfig) -> tuple[Row, ...]:
    """Of experts of unequal width, under `layers.{i}.`: Eg and F0, F1, ... are those of a group."""
    rows = []
    for group in range(len(config.expert_group_widths)):
        path = f"mlp.experts.groups.{group}."
        rows.append(Row(f"{path}gate_up_proj", f"Eg 2*F{group} D", _sparse))
        rows.append(Row(f"{path}down_proj", f"Eg D F{group}", _sparse))
    return tuple(rows)


# Under `mtp.`, beside its layers: the multi-token prediction head, which shares the embedding and
# the output head.
MTP_ROWS = (
    Row("fc.weight", "D 2*D", _always),
    Row("pre_fc_norm_embedding.weight", "D", _always),
    Row("pre_fc_norm_hidden.weight", "D", _always),
    Row("norm.weight", "D", _always),
)


class Part(NamedTuple):
    """One stored tensor: `blocks` equal blocks, in each the rows of `segments` in turn.

    The rows of a tree tensor are used up in the order of the table. `{e}` in the key stands for
    an expert number; the tree tensor then has an expert axis in front, which the stored one
    lacks.
    """

    key: str
    segments: tuple[tuple[str, str], ...]
    blocks: str = "1"


class Form(NamedTuple):
    """Another way to store some tree tensors, used where `option` of a `Layout` is `value`."""

    option: str
    value: str
    parts: tuple[Part, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The tree tensors that are stored so, under `layers.{i}.`."""
        return tuple(dict.fromkeys(path for part in self.parts for path, _ in part.segments))

    @property
    def stacked(self) -> bool:
        """Whether the tree tensors have an expert axis that the stored ones lack."""
        return "{e}" in self.parts[0].key


_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"
_SHARED = "mlp.shared_expert."
_QKV, _Z, _B, _A = (f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
_QKVZ = ((_QKV, "Dk"), (_QKV, "Dk"), (_QKV, "R*Dv"), (_Z, "R*Dv"))

# Under `layers.{i}.` and `mtp.layers.{i}.`
FORMS = (
    Form(
        "experts",
        "per_expert",
        (
            Part("mlp.experts.{e}.gate_proj.weight", ((_GATE_UP, "F"),)),
            Part("mlp.experts.{e}.up_proj.weight", ((_GATE_UP, "F"),)),
        ),
    ),
    Form("experts", "per_expert", (Part("mlp.experts.{e}.down_proj.weight", ((_DOWN, "D"),)),)),
    Form(
        "linear_projections",
        "interleaved",
        (Part("linear_attn.in_proj_qkvz.weight", _QKVZ, blocks="Hk"),),
    ),
    Form(
        "linear_projections",
        "interleaved",
        (Part("linear_attn.in_proj_ba.weight", ((_B, "R"), (_A, "R")), blocks="Hk"),),
    ),
    Form(
        "shared_expert",
        "merged",
        (
            Part(
                f"{_SHARED}gate_up_proj.weight",
                ((f"{_SHARED}gate_proj.weight", "Fs"), (f"{_SHARED}up_proj.weight", "Fs")),
            ),
        ),
    ),
)


Experts = Literal["fused", "per_expert"]


@dataclass(frozen=True)
class Layout:
    """How a folder names and groups the tensors of a model; the defaults are the tree's form."""

    prefix: Prefix = "model."
    head_prefix: HeadPrefix = ""
    experts: Experts = "fused"
    linear_projections: Literal["split", "interleaved"] = "split"
    shared_expert: Literal["split", "merged"] = "split"
    mtp_experts: Experts = "fused"

    def option(self, name: str, place: str) -> str:
        """The value of a `Form`'s option for tensors under `place`."""
        in_mtp = name == "experts" and place.startswith(MTP)
        return self.mtp_experts if in_mtp else getattr(self, name)
