"""Tokens sorted into classes by their text."""

from __future__ import annotations

import unicodedata

import numpy as np
from jaxtyping import Int

from ..text import Tokenizer

CLASSES = (
    "word, capital",
    "word",
    "word, continued",
    "number",
    "punctuation",
    "space",
    "special",
    "other",
)
"""What `token_classes` tells apart. "Word" begins with a space or a line; "continued" does not."""


def token_classes(tokens: Int[np.ndarray, " N"], tokenizer: Tokenizer) -> Int[np.ndarray, " N"]:
    """The class of each token, as an index of `CLASSES`.

    It depends on the token alone, not on what stands around it. A mixed token goes by its first
    character that is no space.
    """
    unique, inverse = np.unique(np.asarray(tokens), return_inverse=True)
    classes = [_class_of(int(token), tokenizer) for token in unique]
    return np.array(classes, np.int64)[inverse]


def shown(token: int, tokenizer: Tokenizer) -> str:
    """A token for a reader: spaces as a middle dot, line ends as an arrow, the rest as it is."""
    text = tokenizer.decode([token]) or (tokenizer.id_to_token(token) or str(token))
    text = text.replace(" ", "\u00b7").replace("\n", "\u21b5").replace("\t", "\u2192")
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _class_of(token: int, tokenizer: Tokenizer) -> int:
    if token in tokenizer.special_ids:
        return CLASSES.index("special")
    text = tokenizer.decode([token])
    if not text or "\ufffd" in text:
        return CLASSES.index("other")
    bare = text.lstrip()
    if not bare:
        return CLASSES.index("space")
    kind = unicodedata.category(bare[0])
    if kind[0] in "LM":
        if bare == text:
            return CLASSES.index("word, continued")
        return CLASSES.index("word, capital" if kind == "Lu" else "word")
    if kind[0] == "N":
        return CLASSES.index("number")
    return CLASSES.index("punctuation" if kind[0] in "PS" else "other")
