"""Documents cut into windows, and windows into batches of one shape."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import RequestError
from ..whole_number import check_whole
from .texts import Document

DEFAULT_WINDOW = 512


@dataclasses.dataclass(frozen=True)
class Span:
    """One window.

    Attributes:
        document: number of the document.
        begin: its first token there.
        length: its tokens, at least 2.
        first: the first of them that is scored, counted from `begin`; at least 1.
    """

    document: int
    begin: int
    length: int
    first: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """Windows of one forward pass. R is the number of tokens scored in them.

    Attributes:
        tokens: int32 [B, T], padded on the right.
        lengths: int32 [B]; 0 in rows that no window was left for.
        positions: int32 [R], where the logits that predict a scored token are in [B * T].
        targets: int32 [R], the scored tokens.
        numbers: int32 [R], the window of each.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    numbers: np.ndarray


class Windows:
    """Windows over documents, each of at most `window` tokens, begun `stride` tokens apart.

    The rule is transformers' for strided perplexity. A window never reaches over the end of a
    document, and nothing is put in front of it. Of its tokens those are scored that no earlier
    window has scored, given the tokens before them in the window. So with a stride below the window
    every token but a document's first is scored once, with at least window - stride tokens of
    context after the first window; with a stride of one window each window stands alone, and its
    first token is not scored. The last window of a document holds what is left.

    Args:
        documents: at least one must fill a window.
        window: tokens of a window, from 2 on.
        stride: tokens from one window to the next; the window if None.
        max_windows: keep this many of the first windows; all if None.

    Raises:
        RequestError: a number outside its range, or documents that are all shorter than a window.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        window: int = DEFAULT_WINDOW,
        stride: int | None = None,
        max_windows: int | None = None,
    ) -> None:
        stride = window if stride is None else stride
        check_whole("window", window, 2)
        if not 1 <= stride <= window:
            raise RequestError(f"stride is {stride}; accepted are 1 to {window}, the window")
        if max_windows is not None:
            check_whole("max_windows", max_windows, 1)
        _refuse_short(documents, window)
        self.documents = tuple(documents)
        self.window, self.stride = window, stride
        spans = [
            span
            for number, document in enumerate(documents)
            for span in _spans(number, len(document.tokens), window, stride)
        ]
        self.spans = tuple(spans[:max_windows])

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def tokens(self) -> int:
        """Tokens that the windows cover, each counted once."""
        ends = {span.document: span.begin + span.length for span in self.spans}
        return sum(ends.values())

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        return sum(span.length - span.first for span in self.spans)

    @property
    def digest(self) -> str:
        """SHA-256 of the windows' tokens and of which are scored."""
        digest = hashlib.sha256()
        for span in self.spans:
            digest.update(np.array([span.length, span.first], "<i4").tobytes())
            digest.update(self._tokens(span).astype("<i4").tobytes())
        return digest.hexdigest()

    def describe(self, number: int) -> str:
        """A window for a reader."""
        span = self.spans[number]
        name = self.documents[span.document].name
        return f"window {number} (tokens {span.begin} to {span.begin + span.length - 1} of {name})"

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """The windows in order, `batch_size` at a time; every batch has the same shape.

        Raises:
            RequestError: a batch size below 1.
        """
        check_whole("batch_size", batch_size, 1)
        for begin in range(0, len(self.spans), batch_size):
            yield self._batch(begin, batch_size)

    def _batch(self, begin: int, rows: int) -> Batch:
        tokens = np.zeros((rows, self.window), np.int32)
        lengths = np.zeros(rows, np.int32)
        positions, targets, numbers = [], [], []
        for row, span in enumerate(self.spans[begin : begin + rows]):
            tokens[row, : span.length] = self._tokens(span)
            lengths[row] = span.length
            scored = np.arange(span.first, span.length)
            positions.append(row * self.window + scored - 1)
            targets.append(tokens[row, scored])
            numbers.append(np.full(len(scored), begin + row))
        joined = [np.concatenate(part).astype(np.int32) for part in (positions, targets, numbers)]
        return Batch(tokens, lengths, *joined)

    def _tokens(self, span: Span) -> np.ndarray:
        return self.documents[span.document].tokens[span.begin : span.begin + span.length]


def _refuse_short(documents: Sequence[Document], window: int) -> None:
    if not documents:
        raise RequestError("there is no text; give at least one document")
    longest = max(documents, key=lambda document: len(document.tokens))
    if len(longest.tokens) < window:
        which = "" if len(documents) == 1 else f", the longest of {len(documents)} documents,"
        raise RequestError(
            f"{longest.name}{which} has {len(longest.tokens)} tokens, less than a window of "
            f"{window}; give a longer text or a smaller window"
        )


def _spans(document: int, tokens: int, window: int, stride: int) -> Iterator[Span]:
    scored = 0
    for begin in range(0, tokens, stride):
        end = min(begin + window, tokens)
        first = max(scored - begin, 1)
        if begin + first < end:
            yield Span(document, begin, end - begin, first)
        scored = end
        if end == tokens:
            return
