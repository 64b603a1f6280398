"""Tokens added to a model's vocabulary: rows of its tables, and its tokenizer."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwen_jax.checkpoint.keys import HEAD
from qwen_jax.checkpoint.mapping import EMBEDDING
from qwen_jax.checkpoint.problems import Problems
from qwen_jax.errors import CheckpointError
from qwen_jax.text import Tokenizer

from .added_tokens import ADVICE, Entry, quote, read_entries, shares
from .tokenizer_files import AddedToken, add_to_files, files

if TYPE_CHECKING:
    from qwen_jax.config import QwenConfig

Reader = Callable[[str, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class NewToken(AddedToken):
    """A token to add, and what its rows are made of.

    Attributes:
        pieces: ids of existing tokens, at least one.
        weights: their shares of 1.
    """

    pieces: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens to add to a model.

    Attributes:
        tokens: in the order of their ids, which follow the tokenizer's last one.
        old_size: rows of the model's tables, which may be more than its tokenizer has ids.
        tied: whether the output head is the embedding table.
    """

    tokens: tuple[NewToken, ...]
    old_size: int
    tied: bool

    @property
    def count(self) -> int:
        """Number of tokens added."""
        return len(self.tokens)

    @property
    def size(self) -> int:
        """Rows of the tables afterwards.

        Rows that the tokenizer does not use are taken first. Beyond them the tables grow by just
        the rows needed: a further row would be a token without meaning, which programs that do not
        mask it might draw.
        """
        return max(self.old_size, self.tokens[-1].id + 1)

    @property
    def config_changes(self) -> dict[str, Any]:
        """Fields of the text model's configuration that change."""
        return {"vocab_size": self.size} if self.size > self.old_size else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should be told."""
        first, last = self.tokens[0].id, self.tokens[-1].id
        ids = f"id {first}" if first == last else f"ids {first} to {last}"
        rows = "in rows of the tables that the tokenizer left free"
        if self.size > self.old_size:
            rows = f"the tables grow from {self.old_size} to {self.size} rows to hold the last id"
        return (f"{self.count} added tokens have {ids}: {rows}",)

    def edit(self, read: Reader) -> VocabularyEdit:
        """Makes the rows of the new tokens.

        Args:
            read: gives rows [n, D] of a table as it is so far, from its tree path and row numbers
                (int64 [n], ascending). Asked for `embed_tokens.weight`, and for `lm_head.weight`
                unless that is tied.

        Returns:
            The change of the two tables.
        """
        used = np.unique([piece for token in self.tokens for piece in token.pieces])
        paths = (EMBEDDING,) if self.tied else (EMBEDDING, HEAD)
        means = {path: self._means(used, read(path, used)) for path in paths}
        return VocabularyEdit(self, means)

    def _means(self, used: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Float32 [count, D]: of each token the weighted mean of its pieces' rows."""
        means = np.zeros((self.count, rows.shape[1]), np.float32)
        for mean, token in zip(means, self.tokens, strict=True):
            for piece, weight in zip(token.pieces, token.weights, strict=True):
                row = rows[np.searchsorted(used, piece)].astype(np.float32)
                mean += np.float32(weight) * row
        return means

    def write_tokenizer(self, folder: Path) -> None:
        """Adds the tokens to the tokenizer files of a folder, which are as the source has them.

        Raises:
            CheckpointError: a file is damaged, or the tokenizer does not take a token for what it
                is; `read_added_tokens` has tried both on a copy.
        """
        add_to_files(folder, self.tokens)


@dataclass(frozen=True)
class VocabularyEdit:
    """The change that added tokens make to the embedding table and the output head.

    Attributes:
        vocabulary: the tokens.
        means: by tree path the new rows in float32, [count, D].
    """

    vocabulary: Vocabulary
    means: dict[str, np.ndarray] = field(repr=False)

    @property
    def paths(self) -> frozenset[str]:
        """Tree paths of the tables."""
        return frozenset(self.means)

    def shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape [V, D] afterwards."""
        return (self.vocabulary.size, *shape[1:])

    def apply(self, path: str, start: int, rows: np.ndarray) -> np.ndarray:
        """The run of rows from `start` on, with the rows of new tokens in their place."""
        first = self.vocabulary.tokens[0].id
        begin, end = max(start - first, 0), max(start + len(rows) - first, 0)
        new = self.means[path][begin:end]
        if not len(new):
            return rows
        changed = rows.copy()
        at = first + begin - start
        changed[at : at + len(new)] = new.astype(rows.dtype)
        return changed

    def extra_rows(self, path: str, dtype: np.dtype) -> np.ndarray:
        """The rows [n, D] beyond the old end of the table, if any."""
        return self.means[path][self.vocabulary.old_size - self.vocabulary.tokens[0].id :].astype(
            dtype
        )


def read_added_tokens(file: Path, folder: Path, config: QwenConfig) -> Vocabulary:
    """Reads a file of tokens to add, and finds what they are made of.

    Args:
        file: see `convert.added_tokens`.
        folder: the model's folder, for its tokenizer.
        config: the model, with `tie_word_embeddings` as its weights want it.

    Returns:
        The tokens with their ids. That the tokenizer takes them has been tried on a copy.

    Raises:
        CheckpointError: the file is malformed or has tokens that the vocabulary has already or
            pieces that it has not (all faults in one error), or the folder has no tokenizer.
    """
    entries = read_entries(file)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, to which tokens could be added; add the tokenizer's "
            "files to the folder, or leave out the added tokens"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the embedding "
            f"table only {config.vocab_size} rows; take both from one model"
        )
    problems = Problems()
    tokens = [
        _new_token(tokenizer.vocab_size + number, entry, tokenizer, problems)
        for number, entry in enumerate(entries)
    ]
    problems.raise_if_any(f"{file} does not fit the tokenizer of {folder}", ADVICE)
    vocabulary = Vocabulary(
        tuple(filter(None, tokens)), config.vocab_size, config.tie_word_embeddings
    )
    _rehearse(vocabulary, folder)
    return vocabulary


def _new_token(
    token_id: int, entry: Entry, tokenizer: Tokenizer, problems: Problems
) -> NewToken | None:
    """The token of an entry; None where something is wrong with it."""
    where, text = f"{entry.place}: {quote(entry.token)}", entry.token
    split = tokenizer.encode(text)
    known = tokenizer.token_to_id(text)
    if known is None and len(split) == 1:
        known = split[0]
    if known is not None:
        problems.add("tokens that the vocabulary has already", f"{where} is token {known}")
        return None
    normalizer = tokenizer.backend.normalizer
    normal = text if normalizer is None else normalizer.normalize_str(text)
    if normal != text:
        problems.add("tokens that the tokenizer spells otherwise", f"{where} as {quote(normal)}")
        return None
    pieces: Sequence[int | None] = split
    if entry.pieces is not None:
        pieces = [_find(piece, tokenizer) for piece in entry.pieces]
        unknown = [p for p, found in zip(entry.pieces, pieces, strict=True) if found is None]
        for piece in unknown:
            problems.add("pieces that are not tokens", f"{where}: {_describe(piece, tokenizer)}")
    if entry.weights is not None and len(entry.weights) != len(pieces):
        problems.add(
            "weights of another number than pieces",
            f"{where}: {len(entry.weights)} weights for the pieces "
            + " + ".join(quote(tokenizer.decode([i])) for i in split),
        )
        return None
    if not pieces:
        problems.add("tokens that the tokenizer splits into nothing", f"{where}; give pieces")
    ids = tuple(piece for piece in pieces if piece is not None)
    if len(ids) < len(pieces) or not ids:
        return None
    return NewToken(token_id, text, entry.special, ids, shares(entry.weights, len(ids)))


def _find(piece: str | int, tokenizer: Tokenizer) -> int | None:
    """The id of a piece: an id, a text that is one token, or an entry in GPT-2's spelling."""
    if isinstance(piece, int):
        return piece if tokenizer.id_to_token(piece) is not None else None
    ids = tokenizer.encode(piece)
    return ids[0] if len(ids) == 1 else tokenizer.token_to_id(piece)


def _describe(piece: str | int, tokenizer: Tokenizer) -> str:
    if isinstance(piece, int):
        return f"id {piece} (ids with a token are below {tokenizer.vocab_size})"
    parts = " + ".join(quote(tokenizer.decode([i])) for i in tokenizer.encode(piece))
    return f"{quote(piece)}, which is {parts}"


def _rehearse(vocabulary: Vocabulary, folder: Path) -> None:
    """Adds the tokens to a copy of the tokenizer, before anything large is read."""
    with tempfile.TemporaryDirectory(prefix="qwen-jax-") as copy:
        for name in files():
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(copy) / name)
        try:
            vocabulary.write_tokenizer(Path(copy))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(copy, str(folder))) from None
