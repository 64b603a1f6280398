"""The one check that every text from outside passes: it must be a string that UTF-8 can carry."""

from __future__ import annotations

from ..errors import RequestError


def require_unicode(text: object, what: str) -> str:
    """Returns `text`, a string of valid Unicode.

    Args:
        text: The value to check.
        what: What the value is, to begin the message with ("the prompt").

    Raises:
        RequestError: It is not a string, or it holds a lone surrogate. Python puts those where
            bytes of a command line or a file name are not valid UTF-8, and JSON can escape them.
    """
    if not isinstance(text, str):
        raise RequestError(f"{what} is of type {type(text).__name__}; give a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at "
            f"character {error.start}, as bytes that are not UTF-8 give on a command line; "
            "give text in UTF-8"
        ) from None
    return text
