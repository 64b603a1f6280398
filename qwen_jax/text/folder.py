"""What the files of a model folder say about text: tokenizer, special tokens, chat templates."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders

from ..errors import CheckpointError

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of the tokenizer files of one folder.

    Attributes:
        backend: The tokenizer, with the added tokens as `tokenizer_config.json` declares them.
        special_tokens: Texts of the named special tokens that are set.
        chat_templates: Jinja sources by name.
    """

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


def read_tokenizer(folder: Path) -> TokenizerFiles | None:
    """Reads the tokenizer files of `folder`; None where it has no `tokenizer.json`.

    Raises:
        CheckpointError: The folder is missing, a file is damaged, or the files contradict each
            other.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the path of a model folder")
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):  # a dangling link is a damaged folder, not one without tokenizer
        return None
    config_path = folder / "tokenizer_config.json"
    config = _read_object(config_path) if os.path.lexists(config_path) else {}
    special_tokens = _special_tokens(config, config_path)
    backend = _build(_read_text(path), path)
    backend = _with_declared_tokens(backend, path, config, config_path, special_tokens)
    # A saved truncation would shorten prompts in silence.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = config.get("split_special_tokens") is True
    return TokenizerFiles(backend, special_tokens, _chat_templates(folder, config, config_path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as UTF-8 text ({error}); download the file again"
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}); download the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}; a JSON object is needed"
        )
    return value


def _build(text: str, path: Path) -> Tokenizer:
    try:
        backend = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(
            f"{path} is not a tokenizer file ({error}); download the file again"
        ) from error
    if not isinstance(backend.decoder, decoders.ByteLevel):
        raise CheckpointError(
            f"{path} has the decoder {type(backend.decoder).__name__}; only ByteLevel is read, "
            "which all Qwen models have"
        )
    return backend


def _text_of(token: object) -> str | None:
    """The text of a token in `tokenizer_config.json`: a string, or a dictionary with its flags."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _special_tokens(config: dict[str, Any], path: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        if config.get(name) is None:
            continue
        text = _text_of(config[name])
        if text is None:
            raise CheckpointError(
                f"{path}: {name} is {config[name]!r}; a string or an added token is needed"
            )
        tokens[name] = text
    return tokens


def _declared_tokens(config: dict[str, Any], path: Path) -> dict[int, AddedToken]:
    declared = config.get("added_tokens_decoder") or {}
    try:
        return {int(key): AddedToken(**token) for key, token in declared.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: added_tokens_decoder is malformed ({error}); download the file again"
        ) from error


def _flags(token: AddedToken) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


def _with_declared_tokens(
    backend: Tokenizer,
    path: Path,
    config: dict[str, Any],
    config_path: Path,
    special_tokens: dict[str, str],
) -> Tokenizer:
    """Gives the added tokens the ids and flags that the configuration declares.

    The flags decide in which text a token is recognised (before or after Unicode normalisation) and
    whether it is left out when special tokens are. Where they differ the tokenizer is built anew:
    adding a token again cannot take its `special` flag away.
    """
    present = {i: _flags(token) for i, token in backend.get_added_tokens_decoder().items()}
    wanted = present | {
        i: _flags(token) for i, token in _declared_tokens(config, config_path).items()
    }
    ids = {token["content"]: i for i, token in wanted.items()}
    for name, text in special_tokens.items():
        token_id = ids.get(text, backend.token_to_id(text))
        if token_id is not None:
            wanted[token_id] = wanted.get(token_id, _flags(AddedToken(text))) | {"special": True}
        elif name == "eos_token":
            raise CheckpointError(
                f"{config_path}: eos_token {text!r} is not in the vocabulary of {path.name}"
            )
    if wanted != present:
        spec = json.loads(backend.to_str())
        spec["added_tokens"] = [{"id": i} | wanted[i] for i in sorted(wanted)]
        backend = _build(json.dumps(spec), path)
    for token_id, token in wanted.items():
        if backend.token_to_id(token["content"]) != token_id:
            raise CheckpointError(
                f"{config_path} gives token {token['content']!r} the id {token_id}, but with "
                f"{path.name} it is {backend.token_to_id(token['content'])}; take both files from "
                "one model"
            )
    return backend


def _chat_templates(folder: Path, config: dict[str, Any], config_path: Path) -> dict[str, str]:
    jinja = folder / "chat_template.jinja"
    if os.path.lexists(jinja):
        return {"default": _read_text(jinja)}
    if config.get("chat_template") is not None:
        return _named_templates(config["chat_template"], config_path)
    # Older multimodal folders keep it here; transformers' tokenizers do not look, so it comes last.
    older = folder / "chat_template.json"
    if os.path.lexists(older):
        return _named_templates(_read_object(older).get("chat_template"), older)
    return {}


def _named_templates(value: object, path: Path) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {item["name"]: item["template"] for item in value}  # type: ignore[union-attr]
    except (TypeError, KeyError):
        templates = None
    if templates is None or not all(
        isinstance(text, str) for item in templates.items() for text in item
    ):
        raise CheckpointError(
            f"{path}: chat_template is of type {type(value).__name__}; a string or a list of "
            '{"name": ..., "template": ...} is needed'
        )
    return templates
