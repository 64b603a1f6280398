"""The files beside the weights: which go along, and the configuration that is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_jax.checkpoint.native import RECORD
from qwen_jax.checkpoint.safetensors_io import INDEX
from qwen_jax.configuration.families import FAMILIES

if TYPE_CHECKING:
    from qwen_jax.config import QwenConfig

CONFIG = "config.json"

_TAKEN = (".json", ".jinja", ".txt", ".md", ".model", ".tiktoken")
_TAKEN_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
# Made anew, or true of the source's weights only.
_LEFT = (
    CONFIG,
    INDEX,
    RECORD,
    "quantize_config.json",
    "quantization_config.json",
    "quant_config.json",
    "recipe.yaml",
)
_WEIGHTS = (".safetensors",)


def side_files(source: Path) -> tuple[list[str], list[str]]:
    """Lists files of a folder that go along unchanged, and those that stay behind.

    Tokenizer, chat template, generation and processor settings, licence and model card go along.

    Returns:
        Names of both kinds; weights, the index and what is written anew are in neither.
    """
    taken, left = [], []
    for file in sorted(source.iterdir()):
        name = file.name
        if name in _LEFT or name.startswith(".") or file.suffix in _WEIGHTS or not file.is_file():
            continue
        known = file.suffix in _TAKEN or file.stem in _TAKEN_NAMES
        (taken if known and not name.endswith(".index.json") else left).append(name)
    return taken, left


def copy_side_files(source: Path, names: Sequence[str], destination: Path) -> None:
    """Copies files by name; links are followed, since caches of downloads are built of them."""
    for name in names:
        shutil.copyfile(source / name, destination / name)


def write_config(values: Mapping[str, Any], folder: Path) -> None:
    """Writes `config.json`."""
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def written_config(
    raw: Mapping[str, Any], config: QwenConfig, *, vision: bool, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Gives the content of `config.json` for converted weights.

    The source's fields stay as they are, but for the quantisation, which is undone. Without the
    vision tower a composite configuration is reduced to its text part, so that nothing announces
    weights that are not there.

    Args:
        raw: the source's `config.json`.
        config: the same, read, with `tie_word_embeddings` as the weights want it.
        vision: whether the vision tower is written too.
        changes: fields of the text model that conversion changes, such as `vocab_size`.
    """
    text = raw.get("text_config")
    composite = isinstance(text, dict)
    inner = _without_quantisation(text if composite else raw) | dict(changes)
    inner["tie_word_embeddings"] = config.tie_word_embeddings
    if not composite:
        return inner
    if vision:
        outer = _without_quantisation(raw) | {"text_config": inner}
        return outer | {"tie_word_embeddings": config.tie_word_embeddings}
    return {
        **inner,
        "architectures": [FAMILIES[config.model_type].architecture],
        "model_type": config.model_type,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_id),
        "pad_token_id": config.pad_token_id,
        **{name: raw[name] for name in ("dtype", "torch_dtype") if name in raw},
    }


def _without_quantisation(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "quantization_config"}


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else list(ids) or None
