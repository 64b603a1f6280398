"""The files beside the weights: which go along, and the configuration that is written."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_jax.checkpoint.index import INDEX
from qwen_jax.checkpoint.native import RECORD
from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.configuration.families import FAMILIES
from qwen_jax.errors import CheckpointError

if TYPE_CHECKING:
    from qwen_jax.config import QwenConfig

CONFIG = "config.json"
REPORT = "quantization_report.json"

_TAKEN = (".json", ".jinja", ".txt", ".md", ".model", ".tiktoken")
_TAKEN_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
# What the weights of a folder are read by.
SETTINGS = (CONFIG, RECORD, "quantize_config.json", "quant_config.json")
# Made anew, or true of the source's weights only.
_REPLACED = (
    *SETTINGS,
    INDEX,
    REPORT,
    "quantization_config.json",
    "recipe.yaml",
    "hf_quant_config.json",
)
_WEIGHTS = (".safetensors",)
_DTYPES = ("dtype", "torch_dtype")
_QUANTISATION = ("quantization_config", "compression_config")
_PIECE = 1 << 20


def side_files(source: Path) -> tuple[list[str], list[str]]:
    """Lists files of a folder that go along unchanged, and those that stay behind.

    Tokenizer, chat template, generation and processor settings, licence and model card go along;
    links are followed, since caches of downloads are built of them. Folders stay behind.

    Returns:
        Names of both kinds; weights, the index and what is written anew are in neither.

    Raises:
        CheckpointError: what should go along is a folder, a link that leads nowhere or the like.
    """
    taken, left, problems = [], [], Problems()
    for file in sorted(source.iterdir()):
        name = file.name
        if name in _REPLACED or name.startswith(".") or file.suffix in _WEIGHTS:
            continue
        known = file.suffix in _TAKEN or file.stem in _TAKEN_NAMES
        known = known and not name.endswith(".index.json")
        if known and not file.is_file():
            kind = "a link that leads nowhere" if not file.exists() else "not a regular file"
            problems.add("side files", f"{show(name)}: {kind}")
            continue
        (taken if known else left).append(name + "/" * file.is_dir())
    problems.raise_if_any(
        f"{source} has side files that cannot be copied", "Download them again, or delete them."
    )
    return taken, left


def copy_side_files(source: Path, names: Sequence[str], destination: Path) -> None:
    """Copies files by name.

    Raises:
        CheckpointError: a file of the source is gone, or cannot be read.
        OSError: the destination cannot be written.
    """
    for name in names:
        try:
            stream = (source / name).open("rb")
        except OSError as error:
            text = f"{show(source / name)} cannot be read: {error.strerror}"
            raise CheckpointError(text) from error
        with stream, (destination / name).open("xb") as copy:
            shutil.copyfileobj(stream, copy, _PIECE)


def write_config(values: Mapping[str, Any], folder: Path) -> None:
    """Writes `config.json`."""
    (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="ascii")


def write_report(values: Mapping[str, Any], folder: Path) -> None:
    """Writes `quantization_report.json`; a number that JSON cannot hold is written as null."""
    text = json.dumps(_finite(values), indent=2, ensure_ascii=False) + "\n"
    (folder / REPORT).write_text(text, encoding="utf-8")


def written_config(
    raw: Mapping[str, Any],
    config: QwenConfig,
    *,
    vision: bool,
    changes: Mapping[str, Any],
    dequantised: bool,
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
        dequantised: whether matrices became bfloat16, which float16 would narrow again.
    """
    if dequantised:
        raw = _as_bfloat16(raw)
    text = raw.get("text_config")
    composite = isinstance(text, dict)
    inner = _without_quantisation(text if composite else raw) | dict(changes)
    inner["tie_word_embeddings"] = config.tie_word_embeddings
    if not composite:
        return inner
    if vision:
        outer = _without_quantisation(raw) | {"text_config": inner}
        return outer | {"tie_word_embeddings": config.tie_word_embeddings}
    # That of the text part goes before the outer one.
    stated = any(inner.get(name) for name in _DTYPES)
    return {
        **inner,
        "architectures": [FAMILIES[config.model_type].architecture],
        "model_type": config.model_type,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_id),
        "pad_token_id": config.pad_token_id,
        **({} if stated else {name: raw[name] for name in _DTYPES if name in raw}),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_bfloat16(raw: Mapping[str, Any]) -> dict[str, Any]:
    text = raw.get("text_config")
    inner = {"text_config": _as_bfloat16(text)} if isinstance(text, dict) else {}
    return {**raw, **inner, **{name: "bfloat16" for name in _DTYPES if name in raw}}


def _without_quantisation(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _QUANTISATION}


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    return ids[0] if len(ids) == 1 else list(ids) or None
