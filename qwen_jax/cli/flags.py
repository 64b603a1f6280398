"""Errors in the words of the command line: the flags that were given, not parameters of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import RequestError


def flag(name: str) -> str:
    """A field's name as a flag."""
    return "--" + name.replace("_", "-")


@contextmanager
def flags_of(*same: str, **fields: str) -> Iterator[None]:
    """Errors about a parameter name the flag that it comes from.

    Args:
        same: parameters whose flags are called like them.
        fields: parameter to the flag's field, for others.

    Raises:
        RequestError: what is raised inside, with flags in place of parameters. One without an
            underscore counts as the first word alone: elsewhere it is a word like others.
    """
    flags = {
        name: flag(field) for name, field in (dict(zip(same, same, strict=True)) | fields).items()
    }
    long = "|".join(name for name in flags if "_" in name)
    named = re.compile(rf"^(?:{'|'.join(flags)})\b" + (rf"|\b(?:{long})\b" if long else ""))
    try:
        yield
    except RequestError as error:
        text = named.sub(lambda match: flags[match[0]], str(error))
        if text == str(error):
            raise
        raise RequestError(text) from None


@contextmanager
def about(*flags: str) -> Iterator[None]:
    """Errors say which flags they are about.

    Raises:
        RequestError: what is raised inside, behind the flags.
    """
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{', '.join(flags)}: {error}") from None
