"""The host's side of a generation: ids to text as it becomes certain, stop strings, rates."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from .compile_time import running_time
from .decode import FinishReason
from .text import Detokenizer, StopMatcher, Tokenizer


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """A generation, or one piece of it when streamed.

    Attributes:
        text: new text. In a stream the part that became certain with this piece, which may be
            empty.
        tokens: new ids, a stop token included; of this piece in a stream.
        logprobs: log-probability of each of `tokens` under the model's own distribution over the
            tokenizer's ids.
        finish_reason: "stop" (a stop token or string), "length" (max_tokens), or None while the row
            goes on.
        prompt_tokens: length of the prompt.
        generation_tokens: tokens generated so far.
        prompt_tps: prompt tokens a second, all rows together; compilation left out.
        generation_tps: generated tokens a second of this row, first token and compilation left out.
        index: number of the prompt in the batch.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"] | None
    prompt_tokens: int
    generation_tokens: int
    prompt_tps: float
    generation_tps: float
    index: int = 0


class Transcript:
    """The host's side of one generation: ids to text, stop strings, timing."""

    def __init__(
        self, index: int, prompt_tokens: int, tokenizer: Tokenizer | None, stops: Sequence[str]
    ):
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.prompt_tps = 0.0
        self.count = 0
        self.finished = False
        self._detokenizer = (
            None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens=True)
        )
        self._stops = StopMatcher(stops)
        self._first_token_at = 0.0

    def take(
        self, tokens: np.ndarray, logprobs: np.ndarray, count: int, reason: int
    ) -> Iterator[GenerationResult]:
        """Pieces for the tokens that are new since the last call."""
        while self.count < count and not self.finished:
            column, self.count = self.count, self.count + 1
            if column == 0:
                self._first_token_at = running_time()
            last = self.count == count and reason != FinishReason.RUNNING
            stopped_by_id = last and reason == FinishReason.STOP
            text, stopped = self._text(
                None if stopped_by_id else int(tokens[self.index, column]), last
            )
            why = "stop" if stopped or stopped_by_id else "length" if last else None
            self.finished = why is not None
            yield self.piece(
                text, [int(tokens[self.index, column])], [float(logprobs[self.index, column])], why
            )

    def _text(self, token: int | None, last: bool) -> tuple[str, bool]:
        """Text that became certain, and whether a stop string ended it."""
        if self._detokenizer is None:
            return "", False
        new = "" if token is None else self._detokenizer.add(token)
        if last:
            new += self._detokenizer.finish()
        text, stopped = self._stops.feed(new)
        if last and not stopped:
            text += self._stops.finish()
        return text, stopped

    def piece(
        self,
        text: str,
        tokens: list[int],
        logprobs: list[float],
        finish_reason: Literal["stop", "length"] | None,
    ) -> GenerationResult:
        """A piece with this row's counts and rates."""
        elapsed = running_time() - self._first_token_at
        rate = (self.count - 1) / elapsed if self.count > 1 and elapsed > 0 else 0.0
        return GenerationResult(
            text,
            tokens,
            logprobs,
            finish_reason,
            self.prompt_tokens,
            self.count,
            self.prompt_tps,
            rate,
            self.index,
        )


def join(pieces: list[GenerationResult]) -> GenerationResult:
    """All pieces of a row as one result."""
    return dataclasses.replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=[value for piece in pieces for value in piece.logprobs],
    )
