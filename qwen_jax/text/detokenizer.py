"""Text from token ids one at a time, exactly as decoding them all at once would give it.

A token of byte-level BPE is a run of bytes, which may begin or end inside a character. The bytes go
through an incremental UTF-8 decoder, so each token costs its own length only and nothing is decoded
twice.
"""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence of token ids into text as it grows.

    The pieces that `add` and at last `finish` return, joined, equal `tokenizer.decode` of all the
    ids. No piece ends inside a character; bytes that can no longer become one are U+FFFD, as in
    `decode`.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        skip_special_tokens: Leaves special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Takes the next id, returns the text that is now certain; an id of no token adds none."""
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Returns U+FFFD for an unfinished character, or ""; the next `add` begins anew."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
