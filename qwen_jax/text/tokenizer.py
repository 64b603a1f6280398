"""Text to token ids and back, as the tokenizer files of a model folder say."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import RequestError
from .chat import ChatTemplate
from .folder import read_tokenizer
from .unicode import require_unicode


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: a printable byte stands for itself, the others for U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """A byte-level BPE tokenizer with its special tokens and chat template.

    Made by `Tokenizer.from_folder`.

    Args:
        backend: The tokenizer of the `tokenizers` library; its decoder must be byte-level.
        special_tokens: The named special tokens ("eos_token" and the like).
        chat_templates: Jinja sources by name; "default" is the one for plain chats.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._templates = {
            name: ChatTemplate(source, self._special_tokens)
            for name, source in (chat_templates or {}).items()
        }

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """Reads the tokenizer of a model folder; None where it has no `tokenizer.json`.

        `tokenizer_config.json` has the last word on the flags of added tokens, as in transformers.
        The chat template is `chat_template.jinja`, else what `tokenizer_config.json` has, else
        `chat_template.json`.

        Raises:
            CheckpointError: A file is damaged, or the files contradict each other; names the file.
        """
        files = read_tokenizer(Path(folder))
        if files is None:
            return None
        return cls(
            files.backend, special_tokens=files.special_tokens, chat_templates=files.chat_templates
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included; head rows from here are padding."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of `eos_token` in `tokenizer_config.json`, if any; other files may name more."""
        token_id = self.backend.token_to_id(self._special_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)

    @cached_property
    def special_token_ids(self) -> dict[str, int]:
        """The ids of special tokens by their text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special_tokens` leaves out."""
        return frozenset(self.special_token_ids.values())

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's entry, in GPT-2's spelling of bytes ("Ġthe"); None if it is no token."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of an entry of the vocabulary, or None."""
        return self.backend.token_to_id(require_unicode(token, "the token"))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token's text, maybe part of a character; empty for an id of no token."""
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token, spelled as it reads
            return token.encode("utf-8")

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Special tokens written out in it are recognised; none is added.

        Raises:
            RequestError: `text` is not a string of valid Unicode.
        """
        return self.backend.encode(require_unicode(text, "the text"), add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids. Bytes that are not UTF-8 become U+FFFD; ids of no token add none.

        Raises:
            RequestError: `token_ids` are not non-negative integers.
        """
        try:
            ids = [operator.index(token_id) for token_id in token_ids]
        except TypeError as error:
            raise RequestError(f"token ids must be a list of integers ({error})") from None
        if any(token_id < 0 for token_id in ids):
            raise RequestError(
                f"token id {min(ids)} is negative; ids count from 0 to {self.vocab_size - 1}"
            )
        known = [token_id for token_id in ids if token_id < self.vocab_size]
        return self.backend.decode(known, skip_special_tokens=bool(skip_special_tokens))

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._templates)

    def apply_chat_template(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt that the model's chat template makes of a conversation, ready for `encode`.

        Args:
            messages: Dictionaries with a "role" and the fields of OpenAI's chat messages; see
                `normalize_messages`.
            add_generation_prompt: Ends with the opening of the assistant's answer.
            tools: JSON schemas of the tools that the model may call.
            enable_thinking: Handed to the template; None leaves the choice to it. Templates that do
                not know it ignore it.
            **kwargs: Further variables for the template, such as `preserve_thinking`.

        Raises:
            RequestError: There is no template, a message is malformed, or the template refuses it.
        """
        return self._template(tools is not None).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            enable_thinking=enable_thinking,
            **kwargs,
        )

    def _template(self, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise RequestError(
                "the model folder has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json), as base models often have none; give a plain prompt "
                "instead of messages"
            )
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise RequestError(
                f"the chat templates of the model folder are named {sorted(self._templates)}, none "
                "'default'; rename one in tokenizer_config.json, or give a plain prompt instead"
            )
        return self._templates["default"]
