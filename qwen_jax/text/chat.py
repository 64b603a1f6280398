"""Chat templates: Jinja programs that come with a model and make a prompt of a conversation.

They are code from strangers, so they run in Jinja's immutable sandbox on plain data. What they may
use is what transformers offers them, since they are written and tested against it. The sandbox
keeps them from Python and from files; it does not bound the time or the memory that they take.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from ..errors import RequestError
from .messages import normalize_messages, plain_data


class ChatTemplate:
    """One chat template.

    Args:
        source: The Jinja source; compiled at first use, so a broken one harms no plain prompt.
        special_tokens: Named special tokens ("bos_token" and the like) which the template can read.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        tools: object = None,
        enable_thinking: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`; arguments and errors as in `Tokenizer.apply_chat_template`."""
        variables = (
            {"documents": None}
            | self._special_tokens
            | plain_data(kwargs, "the template variables")
        )
        variables["messages"] = normalize_messages(messages)
        variables["tools"] = _tools(tools)
        variables["add_generation_prompt"] = bool(add_generation_prompt)
        if enable_thinking is not None:
            if not isinstance(enable_thinking, bool):
                raise RequestError(
                    f"enable_thinking is {enable_thinking!r}; accepted is True, False or None"
                )
            variables["enable_thinking"] = enable_thinking
        try:
            return self._compiled.render(variables)
        except _RaisedByTemplate as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}; change them, or give a plain "
                "prompt instead"
            ) from error
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}; "
                "mend the template, or give plain text instead of messages"
            ) from error
        except Exception as error:  # a template may raise anything that an expression can
            raise RequestError(
                f"the chat template failed with {type(error).__name__}: {error}; "
                "change the messages or the template's variables, or give a plain prompt instead"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.source)


def _tools(tools: object) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of dictionaries, each the JSON schema of one tool")
    return plain_data(tools, "tools")


class _RaisedByTemplate(jinja2.TemplateError):
    """What `raise_exception` in a template raises."""


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it. Jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's name and type

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Dict:
    """Makes dictionaries for templates, without handing them the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without private names.

    Python's protocols (`__html__`, `__call__`) would use those past the checks of the sandbox.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # a template may name a variable "self"
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold the private name {name!r}")


@cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
