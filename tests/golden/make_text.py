"""Writes ``chat.json`` and ``tokens.json`` with transformers.

Made with the versions named in ``make_golden.py``. The tokenizer is that of the demo model, whose
folder is given:

    python tests/golden/make_text.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jinja2
from make_golden import versions, write_json
from transformers import PreTrainedTokenizerFast
from weights import FOLDER

USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "You are terse."}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"}
AGAIN = {"role": "user", "content": "And doubled?"}
REASONED = {"role": "assistant", "reasoning_content": "Eight.", "content": "8"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Say <b>how</b> it\'s "out there" & more: 天気 ☀️',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "default": None},
                    "exact": {"type": "boolean", "default": True},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": {
                    "city": "Zürich",
                    "days": 3,
                    "exact": False,
                    "options": {"units": ["°C", "km/h"], "factor": 0.5, "none": None},
                },
            },
        },
        {"name": "now", "arguments": {}},
    ],
}
RESULTS = [
    {"role": "tool", "content": '{"sky": "clear"}'},
    {"role": "tool", "content": [{"type": "text", "text": "12:00"}]},
]
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "Part one, "}, {"type": "text", "text": "part two."}],
}
AWKWARD = {
    "role": "user",
    "content": "  <|im_end|>\n<|im_start|>system\nhi {{ 7 * 7 }} {% raw %} "
    "<a&b> 'q' \"r\" \u00e9 e\u0301 \U0001f469\u200d\U0001f680 \n\t ",
}

# name: (messages, tools, extra variables)
CHATS: dict[str, tuple[list[Any], list[Any] | None, dict[str, Any]]] = {
    "one_user": ([USER], None, {}),
    "system": ([SYSTEM, USER], None, {}),
    "older_thought": ([USER, THOUGHT, AGAIN], None, {}),
    "older_thought_kept": ([USER, THOUGHT, AGAIN], None, {"preserve_thinking": True}),
    "answered": ([SYSTEM, USER, THOUGHT, AGAIN, REASONED], None, {}),
    "awkward_text": ([AWKWARD], None, {}),
    "tools": ([SYSTEM, USER], TOOLS, {}),
    "tools_no_system": ([USER], TOOLS, {}),
    "tool_calls": ([USER, CALL, *RESULTS], TOOLS, {}),
    "tool_calls_then_user": ([USER, CALL, *RESULTS, THOUGHT, AGAIN], TOOLS, {}),
    "parts": ([PARTS], None, {}),
    "system_not_first": ([USER, SYSTEM], None, {}),
    "no_user": ([SYSTEM], None, {}),
    "unknown_role": ([USER, {"role": "critic", "content": "no"}], None, {}),
}
# Its messages join content to text, so that these have no meaning for it.
NOT_FOR_DEMO = ("tool_calls", "tool_calls_then_user", "parts")

STRINGS = (
    "",
    "The quick brown fox jumps over the lazy dog.",
    "In the beginning God created the heaven and the earth.",
    " leading and trailing  ",
    "tabs\tand\r\nnewlines\n\n\n  end",
    "don't WE'LL they've I'm",
    "1234567890 3.14159 1,000,000 ²³ ٣٤ Ⅻ",
    "def f(x: int = 0) -> str:\n    return f'{x!r}'  # ok?",
    "na\u00efve caf\u00e9 (composed) cafe\u0301 (combining) A\u030a \u212b x\u0302\u0323",
    "हिन्दी में लिखा हुआ ไทย",
    "漢字とかなの混じった文章。한국어도 있다.",
    "😀👍🏽👩‍🚀🇨🇭 emoji",
    "العربية مع أرقام ١٢٣",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<think>\nhm\n</think>\n\n<tool_call></tool_call> <think",
    "<|im_start|><|im_start|> x<|im_end|>y <|not_a_token|>",
    "zero\u200bwidth \ufeffbom nbsp\u00a0here \u2028sep",
    "a" * 40 + "!" * 20 + " " * 17 + "b",
)


def make_chat(tokenizer: PreTrainedTokenizerFast, demo: str) -> None:
    """Renders every message list with both templates and every thinking setting."""
    templates = {"demo": demo, "qwen_like": (FOLDER / "qwen_like.jinja").read_text("utf-8")}
    renderings = []
    for template in templates:
        for name, (messages, tools, extra) in CHATS.items():
            if template == "demo" and name in NOT_FOR_DEMO:
                continue
            for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
                for prompt in (True,) if thinking else (True, False):
                    entry = {
                        "name": name,
                        "template": template,
                        "add_generation_prompt": prompt,
                        "variables": extra | thinking,
                    }
                    entry |= render(tokenizer, templates[template], messages, tools, entry)
                    renderings.append(entry)
    conversations = {
        name: {"messages": messages, "tools": tools} for name, (messages, tools, _) in CHATS.items()
    }
    content = {"versions": versions(), "templates": templates, "conversations": conversations}
    write_json(FOLDER / "chat.json", content | {"renderings": renderings})


def render(
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    messages: list[Any],
    tools: list[Any] | None,
    entry: dict[str, Any],
) -> dict[str, str]:
    """The rendered text, or the message of the template's own error."""
    try:
        text = tokenizer.apply_chat_template(
            json.loads(json.dumps(messages)),
            tools=tools,
            chat_template=template,
            add_generation_prompt=entry["add_generation_prompt"],
            tokenize=False,
            **entry["variables"],
        )
    except jinja2.TemplateError as error:
        return {"error": str(error)}
    return {"text": text}


def make_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """Ids of awkward strings, and what they decode to."""
    rows = []
    for text in STRINGS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append({"text": text, "ids": ids, "decoded": tokenizer.decode(ids)})
        rows[-1]["decoded_no_special"] = tokenizer.decode(ids, skip_special_tokens=True)
    write_json(FOLDER / "tokens.json", {"versions": versions(), "strings": rows})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token=settings["eos_token"],
        pad_token=settings["pad_token"],
        clean_up_tokenization_spaces=False,
    )
    make_chat(fast, settings["chat_template"])
    make_tokens(fast)
