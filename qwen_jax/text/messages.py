"""Chat messages as they come from callers, made into what chat templates can rely on.

Templates were written against one spelling each and fail, or drop text in silence, on the others:
content that is null or in parts, tool calls whose arguments are a JSON string, objects that are no
plain data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from ..errors import RequestError
from .unicode import require_unicode

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Copies messages into plain dictionaries in the one form that templates get.

    - `content` is always a string: null or absent becomes "", a list of text parts is joined
      without a separator.
    - `arguments` of tool calls are a dictionary: a JSON string is parsed; empty, null or absent
      becomes {}.
    - Reasoning under "thinking" or "reasoning" is found under "reasoning_content" too, as in
      transformers.
    - Other fields that are null are left out, as in transformers; all others are kept.

    Raises:
        RequestError: There are no messages, or one is malformed; names the index and the field.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is of type {type(messages).__name__}; "
            'give a list such as [{"role": "user", "content": "Hello"}]'
        )
    normalized = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not normalized:
        raise RequestError("messages is empty; give at least one message")
    return normalized


def plain_data(value: object, where: str) -> Any:
    """Copies a value made of dictionaries, lists and JSON scalars, so a template gets no other.

    Templates come with models and are not trusted: methods of richer objects must not reach them.

    Raises:
        RequestError: There is something else in it, or it is nested too deeply; says where.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply") from None


def _plain(value: object, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(require_unicode(value, where))
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {
            str.__str__(require_unicode(key, f"a key of {where}")): _plain(item, f"{where}.{key}")
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise RequestError(
        f"{where} is of type {type(value).__name__}; a chat template can be given dictionaries, "
        "lists, strings, numbers, booleans and None"
    )


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{where} is of type {type(message).__name__}; "
            'give a dictionary such as {"role": "user", "content": "Hello"}'
        )
    plain = {key: value for key, value in plain_data(message, where).items() if value is not None}
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise RequestError(f'{where}.role is {plain.get("role")!r}; give a string such as "user"')
    plain["content"] = _content(plain.get("content", ""), f"{where}.content")
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    reasoning = next((plain[field] for field in _REASONING_FIELDS if field in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is of type {type(content).__name__}; give a string or a list of text parts"
        )
    return "".join(_text_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _text_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    ):
        return part["text"]
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    raise RequestError(
        f"{where} is a part of type {kind!r} that holds no text; "
        'only {"type": "text", "text": "..."} is read'
    )


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} is of type {type(calls).__name__}; give a list of tool calls")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise RequestError(
            f"{where} is of type {type(call).__name__}; give a dictionary with a function"
        )
    if call.get("function") is None:
        return call | {"arguments": _arguments(call.get("arguments"), f"{where}.arguments")}
    function = call["function"]
    if not isinstance(function, dict):
        raise RequestError(
            f"{where}.function is of type {type(function).__name__}; give a dictionary"
        )
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return call | {"function": function | {"arguments": arguments}}


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = (
                json.loads(arguments, parse_constant=_refuse_constant)
                if arguments.strip()
                else None
            )
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where} is not valid JSON ({error}): {_shortened(arguments)}; "
                "give a JSON object or a dictionary"
            ) from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise RequestError(f"{where} is {_shortened(parsed)}; give a JSON object or a dictionary")
    return plain_data(parsed, where)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
