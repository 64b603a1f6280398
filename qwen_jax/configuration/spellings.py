"""From the spellings of Hugging Face's `config.json` to the fields of `QwenConfig`, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .families import COMPOSITE_TYPES, DTYPES, FAMILIES, MAY_BE_ZERO, WIDTHS, Default, Family
from .field_reader import FieldReader, Findings, is_integer, is_sequence, show
from .layer_kinds import read_layer_types
from .rope_parameters import read_rope_parameters

if TYPE_CHECKING:
    from ..config import QwenConfig

# Far beyond any model: what makes a list of layers must not be made for a damaged file.
_MOST_LAYERS = 10_000

MODEL_TYPES = tuple(FAMILIES) + tuple(COMPOSITE_TYPES)

# Switches that no released Qwen text model sets, with the values under which nothing changes.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "is_causal": (True,),
    "use_bidirectional_attention": (False,),
    "per_layer_config": ({}, []),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "hidden_activation": ("silu",),
    "mlp_bias": (False,),
    "n_shared_experts": (0,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "attention_sinks": (0, False),
}


def load_config_file(path: str | os.PathLike[str]) -> tuple[Mapping[str, object], str]:
    """Read a `config.json`.

    Args:
        path: The file, or the folder that holds it.

    Returns:
        The object in the file, and the file's name for messages.

    Raises:
        ConfigError: The file is missing or unreadable, or is not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        values: object = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist; give a folder with a config.json, or the file itself"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} holds {show(values)}; a model configuration is a JSON object with a model_type"
        )
    return values, str(file)


def read_fields(values: Mapping[str, object], findings: Findings) -> dict[str, Any]:
    """Return the arguments of `QwenConfig` for the object of a `config.json`.

    Args:
        values: The object, composite (with a `text_config`) or flat.
        findings: Where problems and notes are recorded. After a problem the result is incomplete.
    """
    model_type, text = _text_level(values, findings)
    if model_type is None:
        return {}
    family = FAMILIES[model_type]
    reader = FieldReader(text, findings)
    _refuse_switches(family, values, text, findings)
    read: dict[str, Any] = {"model_type": model_type} | dict(family.fixed)
    for name, default in family.defaults.items():
        read[name] = _read_one(reader, name, default)
    read["num_key_value_heads"] = _kv_heads(reader, read)
    read["head_dim"] = _head_dim(reader, read)
    if "num_experts" in family.defaults:
        read["num_experts"] = _num_experts(reader, read["num_experts"])
    if "mtp_num_hidden_layers" in family.defaults and reader.given("num_nextn_predict_layers"):
        read["mtp_num_hidden_layers"] = reader.integer("num_nextn_predict_layers", 0, 0)
    read.setdefault("qkv_bias", read.get("attention_bias", False))
    read["tie_word_embeddings"] = _tied(values, text, findings)
    if read["num_hidden_layers"] > _MOST_LAYERS:
        reader.refuse("num_hidden_layers", f"at most {_MOST_LAYERS}")
        return {}
    read["layer_types"], read["sliding_window"] = read_layer_types(
        reader, family, read["num_hidden_layers"]
    )
    read["rope_parameters"] = read_rope_parameters(
        text,
        findings,
        default_partial_rotary_factor=family.partial_rotary_factor,
        max_position_embeddings=read["max_position_embeddings"],
    )
    if read["rope_parameters"].partial_rotary_factor != 1.0 == family.partial_rotary_factor:
        findings.notes.append(
            f"partial_rotary_factor is used; transformers rotates the whole head of {model_type}"
        )
    if read.get("mamba_ssm_dtype") == "bfloat16":
        findings.notes.append("mamba_ssm_dtype bfloat16 is used; transformers keeps float32")
    both = (text, values) if text is not values else (text,)
    read["bos_token_id"] = next(iter(_token_ids("bos_token_id", both, findings)), None)
    read["pad_token_id"] = next(iter(_token_ids("pad_token_id", both, findings)), None)
    read["eos_token_id"] = _token_ids("eos_token_id", both, findings)
    read["dtype"] = _dtype(both, findings)
    return read


def write_fields(config: QwenConfig) -> dict[str, Any]:
    """Return the flat `config.json` object of a configuration, as transformers reads it."""
    family = FAMILIES[config.model_type]
    written: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": config.tie_word_embeddings,
        "layer_types": list(config.layer_types),
        "rope_parameters": config.rope_parameters.to_hf(),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_id) or None,
        "pad_token_id": config.pad_token_id,
        "dtype": config.dtype,
    }
    if len(config.eos_token_id) == 1:
        written["eos_token_id"] = config.eos_token_id[0]
    for name in family.defaults:
        value: object = getattr(config, name)
        written[name] = list(value) if isinstance(value, tuple) else value
    if not config.expert_group_widths:  # of research alone
        written.pop("expert_group_widths", None)
    if family.sliding is not None:
        written["use_sliding_window"] = config.sliding_window is not None
        written["sliding_window"] = config.sliding_window
    return written


def _text_level(
    values: Mapping[str, object], findings: Findings
) -> tuple[str | None, Mapping[str, object]]:
    """Return the family's name and the object with the text fields."""
    text = values.get("text_config")
    if text is None:
        text = values
    if not isinstance(text, Mapping):
        findings.refuse("text_config", text, "an object")
        return None, {}
    stated = [level["model_type"] for level in (values, text) if level.get("model_type")]
    names = [COMPOSITE_TYPES.get(name, name) if isinstance(name, str) else "" for name in stated]
    unknown = [stated[i] for i, name in enumerate(names) if name not in FAMILIES]
    if unknown or not names:
        seen = unknown[0] if unknown else values.get("model_type")
        findings.refuse("model_type", seen, ", ".join(MODEL_TYPES))
        return None, text
    if len(set(names)) > 1:
        findings.refuse("text_config.model_type", stated[1], f"the type that fits {stated[0]!r}")
        return None, text
    return names[0], text


def _refuse_switches(
    family: Family, values: Mapping[str, object], text: Mapping[str, object], findings: Findings
) -> None:
    """Refuse custom code and values that ask for another forward pass than the family's."""
    if values.get("auto_map") or text.get("auto_map"):
        findings.refuse(
            "auto_map",
            values.get("auto_map") or text.get("auto_map"),
            "no custom code: only the built-in architectures run here",
        )
    for name, accepted in (_NEUTRAL | dict(family.neutral)).items():
        if text.get(name) is not None and text[name] not in accepted:
            choices = ", ".join(show(value) for value in accepted) or "null"
            findings.refuse(name, text[name], f"{choices} (or leave it out)")
    if text is not values:
        beside = [
            name for name in ("rope_parameters", "rope_scaling", "rope_theta") if values.get(name)
        ]
        if beside:
            findings.notes.append(f"{beside} beside text_config has no effect; put it inside")
    if text.get("dual_chunk_attention_config"):
        findings.notes.append(
            "dual_chunk_attention_config is not used: attention is the ordinary one"
        )


def _read_one(reader: FieldReader, name: str, default: Default) -> Any:
    """Read a field by the type of its default."""
    minimum = 0 if name in MAY_BE_ZERO else 1
    if isinstance(default, bool):
        return reader.flag(name, default)
    if isinstance(default, float):
        return reader.number(name, default)
    if isinstance(default, str):
        return reader.values[name] if reader.given(name) else default
    if isinstance(default, tuple):
        return reader.integers(name)
    if default is None:
        return reader.optional_integer(name, minimum)
    if name in WIDTHS:
        return reader.widths(name, default, minimum)
    if name == "num_key_value_heads":
        return reader.optional_integer(name, minimum) or default
    return reader.integer(name, default, minimum)


def _kv_heads(reader: FieldReader, read: Mapping[str, Any]) -> int:
    """A null stands for one key head a query head, as in files of before grouped queries."""
    null = "num_key_value_heads" in reader.values and not reader.given("num_key_value_heads")
    return read["num_attention_heads"] if null else read["num_key_value_heads"]


def _head_dim(reader: FieldReader, read: Mapping[str, Any]) -> int:
    """Without a value of the file or the family, the heads share the hidden width."""
    if read["head_dim"] is not None:
        return read["head_dim"]
    hidden, heads = read["hidden_size"], read["num_attention_heads"]
    if hidden % heads:
        reader.findings.refuse(
            "hidden_size", hidden, f"a multiple of num_attention_heads {heads} without head_dim"
        )
    return hidden // heads


def _num_experts(reader: FieldReader, read: int) -> int:
    """Files saved by transformers 5 hold the number of experts under another name."""
    if not reader.given("num_local_experts"):
        return read
    local = reader.integer("num_local_experts", read, 0)
    if reader.given("num_experts") and local != read:
        reader.refuse("num_local_experts", f"the value of num_experts, {read}")
    return local


def _tied(values: Mapping[str, object], text: Mapping[str, object], findings: Findings) -> bool:
    """The outer flag of a composite file governs; where it is missing, the inner one does."""
    inner = FieldReader(text, findings).flag("tie_word_embeddings", False)
    if text is values or values.get("tie_word_embeddings") is None:
        return inner
    outer = FieldReader(values, findings).flag("tie_word_embeddings", False)
    if outer != inner and text.get("tie_word_embeddings") is not None:
        findings.notes.append(
            f"tie_word_embeddings is {outer} at the top level, which is used, "
            f"but {inner} in text_config"
        )
    return outer


def _token_ids(
    name: str, levels: tuple[Mapping[str, object], ...], findings: Findings
) -> tuple[int, ...]:
    """Return the ids of all levels in order, each once; an int, a list and null are accepted."""
    ids: dict[int, None] = {}
    for level in levels:
        value = level.get(name)
        for item in value if is_sequence(value) else () if value is None else (value,):
            if is_integer(item, 0):
                ids[item] = None
            elif not is_integer(item, -1):
                findings.refuse(name, value, "a token id, a list of token ids, or null")
                break
    return tuple(ids)


def _dtype(levels: tuple[Mapping[str, object], ...], findings: Findings) -> str:
    """Return the stated dtype; float16 becomes bfloat16, whose range the residual stream needs."""
    stated = [level.get(name) for level in levels for name in ("dtype", "torch_dtype")]
    value = next((item for item in stated if item is not None), "bfloat16")
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    if name == "float16":
        findings.notes.append(
            "dtype float16 is read as bfloat16: float16 overflows in the residual stream"
        )
        return "bfloat16"
    if name not in DTYPES:
        findings.refuse("dtype", value, "bfloat16, float32, or float16 (read as bfloat16)")
        return "bfloat16"
    return name
