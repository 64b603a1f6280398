"""Chat templates: what they may rely on, what messages are refused, and what the sandbox stops."""

from __future__ import annotations

import copy
import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

import qwen_jax.text
from qwen_jax.errors import RequestError
from qwen_jax.text import ChatTemplate, Tokenizer, normalize_messages

DEMO = Path(qwen_jax.text.__path__[0]).parent / "demo"
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "chat.json").read_text("utf-8"))
USER = {"role": "user", "content": "Hello"}


def render(source: str, messages: object = (USER,), **variables: Any) -> str:
    return ChatTemplate(source, {"eos_token": "<|im_end|>"}).render(messages, **variables)


def rendering_id(rendering: dict[str, Any]) -> str:
    options = [f"{key}={value}" for key, value in rendering["variables"].items()]
    prompt = ["prompt"] if rendering["add_generation_prompt"] else []
    return "-".join([rendering["template"], rendering["name"], *options, *prompt])


@pytest.mark.parametrize("rendering", GOLDEN["renderings"], ids=rendering_id)
@pytest.mark.parametrize("spelling", [dict, json.dumps])
def test_prompts_are_those_of_transformers(rendering: dict[str, Any], spelling: Any) -> None:
    conversation = copy.deepcopy(GOLDEN["conversations"][rendering["name"]])
    for message in conversation["messages"]:
        for call in message.get("tool_calls", []):
            function = call.get("function", call)
            function["arguments"] = spelling(function["arguments"])
    template = ChatTemplate(GOLDEN["templates"][rendering["template"]])
    options = {"add_generation_prompt": rendering["add_generation_prompt"], **conversation}
    if "error" in rendering:
        with pytest.raises(RequestError, match=re.escape(rendering["error"])):
            template.render(**options, **rendering["variables"])
    else:
        assert template.render(**options, **rendering["variables"]) == rendering["text"]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ({"add_generation_prompt": False}, ""),
    ],
)
def test_the_demo_template(options: dict[str, bool], end: str) -> None:
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None and tokenizer.has_chat_template
    chat = [{"role": "system", "content": "Be brief."}, USER]
    start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, **options) == start + end


def test_blocks_leave_no_blank_lines() -> None:
    lines = ["{% for m in messages %}", "    {% if m.role %}", "{{ m.content }}", "    {% endif %}"]
    source = "\n".join([*lines, "{% endfor %}", ""])
    assert render(source) == "Hello\n"


def test_loops_can_be_left_and_namespaces_written() -> None:
    source = (
        "{% set ns = namespace(n=0) %}"
        "{% for x in range(9) %}"
        "{% if x == 1 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}"
    )
    assert render(source) == "5"


def test_templates_can_make_dictionaries() -> None:
    assert (
        render("{{ dict(a=1, **dict.fromkeys('bc', 2)) | tojson }}") == '{"a": 1, "b": 2, "c": 2}'
    )


def test_tojson_is_plain_json() -> None:
    tool = {"name": "<é>", "b": [1, 2.5, None, True], "a": "it's & so"}
    assert render("{{ tools[0] | tojson }}", tools=[tool]) == json.dumps(tool, ensure_ascii=False)
    assert render("{{ tools[0] | tojson(indent=2) }}", tools=[tool]) == json.dumps(
        tool, ensure_ascii=False, indent=2
    )
    options = "ensure_ascii=true, separators=(',', ':'), sort_keys=true"
    assert render(f"{{{{ tools[0] | tojson({options}) }}}}", tools=[tool]) == json.dumps(
        tool, separators=(",", ":"), sort_keys=True
    )


def test_variables_of_the_template() -> None:
    names = "{{ eos_token }} {{ tools is none }} {{ documents is none }} "
    names += "{{ enable_thinking is defined }}"
    assert render(names) == "<|im_end|> True True False"
    assert (
        render(names, tools=[], eos_token="x", documents=[{"title": "t"}]) == "x False False False"
    )
    assert render("{{ missing }}|{{ preserve_thinking }}", preserve_thinking=True) == "|True"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_generation_blocks_are_transparent() -> None:
    source = (
        "{% set x = 1 %}{% for m in messages %}\n"
        "{%- generation %}{{ m.content }}{% set x = 2 %}{{ x }}{% endgeneration %}"
        "{{ x }}{% endfor %}"
    )
    assert render(source) == "Hello21"


@pytest.mark.parametrize(
    "content",
    [{}, {"content": None}, {"content": ""}, {"content": []}, {"content": [{"text": ""}]}],
)
def test_missing_content_is_empty(content: dict[str, Any]) -> None:
    message = {"role": "assistant", **content}
    assert render("{{ '[' + messages[0].content.strip() + ']' }}", [message]) == "[]"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, "two", {"text": " three"}]
    assert normalize_messages([{"role": "tool", "content": parts}])[0]["content"] == "one two three"


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": {"é": [null]}}', {"b": 1, "a": {"é": [None]}}),
        ({"b": 1, "a": {"é": [None]}}, {"b": 1, "a": {"é": [None]}}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        (None, {}),
        ({}, {}),
    ],
)
def test_arguments_of_tool_calls_become_a_dictionary(
    arguments: object, expected: dict[str, Any], nested: bool
) -> None:
    call: dict[str, Any] = {"name": "f", "arguments": arguments}
    messages = [USER, {"role": "assistant", "tool_calls": [{"function": call} if nested else call]}]
    source = (
        "{% for c in messages[1].tool_calls %}"
        "{% if c.function %}{% set c = c.function %}{% endif %}"
        "{{ c.name }}{{ c.arguments | tojson }}{% endfor %}"
    )
    assert render(source, messages) == "f" + json.dumps(expected, ensure_ascii=False)
    assert call["arguments"] is arguments


def test_absent_arguments_become_a_dictionary() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    call = normalize_messages([message])[0]["tool_calls"][0]
    assert call == {"id": "1", "function": {"name": "f", "arguments": {}}}


def test_null_fields_are_left_out_and_reasoning_is_found() -> None:
    message = {
        "role": "assistant",
        "content": "c",
        "tool_calls": None,
        "name": None,
        "reasoning": "r",
    }
    assert normalize_messages([message]) == [
        {
            "role": "assistant",
            "content": "c",
            "reasoning": "r",
            "reasoning_content": "r",
            "thinking": "r",
        }
    ]


def tool_call(arguments: object) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("Hello", "messages is of type str"),
        (USER, "messages is of type dict"),
        (None, "messages is of type NoneType"),
        ([USER, "Hello"], r"messages\[1\] is of type str"),
        ([{"content": "x"}], r"messages\[0\]\.role is None"),
        ([{"role": 7, "content": "x"}], r"messages\[0\]\.role is 7"),
        ([USER, {"role": "user", "content": 7}], r"messages\[1\]\.content is of type int"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\] .* type 'image' that"),
        ([{"role": "user", "content": "\ud83d"}], r"messages\[0\]\.content is not valid Unicode"),
        ([{"role": "user", "files": [object()]}], r"messages\[0\]\.files\[0\] is of type object"),
        ([{"role": "user", "content": LOOP}], r"messages\[0\] is nested too deeply"),
        ([{"role": "user", 7: "x"}], r"a key of messages\[0\] is of type int"),
        (
            [USER, tool_call('{"a": ')],
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not",
        ),
        ([tool_call('{"a": NaN}')], "NaN is no JSON number"),
        ([tool_call('{"a": "\\ud83d"}')], r"arguments\.a is not valid Unicode"),
        ([tool_call("[" * 100_000)], "is not valid JSON"),
        ([tool_call("[1]")], r"arguments is \[1\]; give a JSON object"),
        ([tool_call(3)], "arguments is 3; give a JSON object"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\]\.tool_calls is of type dict"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] is of type str"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], r"function is of type str"),
    ],
)
def test_malformed_messages_are_refused_by_index(messages: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("", messages)


def test_malformed_tools_and_variables_are_refused() -> None:
    with pytest.raises(RequestError, match="tools must be a list"):
        render("", tools=["f"])
    with pytest.raises(RequestError, match=r"the template variables\.when is of type date"):
        render("", when=datetime.date(2020, 1, 1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "{{ raise_exception('No user query found.') }}",
            "refuses these messages: No user query found.;",
        ),
        ("{% if %}", "syntax error in line 1"),
        ("\n{% for m in messages %}", "syntax error in line 2"),
        ("{{ missing.field }}", "UndefinedError: 'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% include 'other' %}", "failed with"),
    ],
)
def test_failing_templates_say_why(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ self._TemplateReference__context.environment.globals }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{% set ns = namespace(__html__=strftime_now) %}",
        "{% set ns = namespace() %}{% set ns.__html__ = strftime_now %}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_hostile_templates_are_stopped(source: str) -> None:
    with pytest.raises(RequestError, match=r"SecurityError|OverflowError|UndefinedError"):
        render(source)


@pytest.mark.parametrize(
    "name",
    [
        "raise_exception",
        "namespace",
        "messages",
        "''",
        "range",
        "lipsum",
        "cycler",
        "joiner",
        "dict",
    ],
)
def test_private_attributes_are_not_there(name: str) -> None:
    for attribute in ("__globals__", "__class__", "__init__", "__subclasses__", "gi_frame"):
        assert render(f"{{{{ {name}.{attribute} }}}}{{{{ {name}['{attribute}'] }}}}") == ""


def test_templates_get_plain_data_only() -> None:
    class Shouting(str):
        def leak(self) -> str:
            return "leaked"

    message = {"role": "user", "content": Shouting("x"), Shouting("key"): (Shouting("y"),)}
    normalized = normalize_messages([message])[0]
    assert normalized == {"role": "user", "content": "x", "key": ["y"]}
    assert {type(text) for text in (*normalized, normalized["content"], *normalized["key"])} == {
        str
    }
    with pytest.raises(RequestError, match=r"UndefinedError|SecurityError"):
        render("{{ messages[0].content.leak() }}", [message])
