"""Stop strings, looked for in text rather than in tokens, so that token borders do not matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import RequestError
from .unicode import require_unicode


class StopMatcher:
    """Cuts a stream of text before the first stop string, and never lets a part of one out.

    The text stops at the first character that completes a stop string; of several that this
    character completes, the longest is taken. So the outcome depends on the text alone, not on how
    it was cut into pieces. Text that may yet begin a stop string is held back until it cannot.

    Args:
        stops: The stop strings, in any order; a single string is taken as one of them. With none,
            nothing stops.

    Raises:
        RequestError: A stop string is empty, not a string, or not valid Unicode.
    """

    def __init__(self, stops: str | Sequence[str] | None = ()) -> None:
        stops = (stops,) if isinstance(stops, str) else tuple(stops or ())
        for stop in stops:
            if not require_unicode(stop, "a stop string"):
                raise RequestError(
                    "a stop string is empty, which would stop before any text; leave it out"
                )
        self._searches = [_Search(stop) for stop in stops]
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matched

    def feed(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text.

        Returns:
            The text that may be shown now, and whether a stop string was met. Once it was, all
            further text is dropped.
        """
        if self._matched is not None:
            return "", True
        for end, character in enumerate(text, 1):
            complete = [search.pattern for search in self._searches if search.step(character)]
            if complete:
                self._matched = max(complete, key=len)
                shown = (self._held + text[:end])[: -len(self._matched)]
                self._held = ""
                return shown, True
        text = self._held + text
        shown = len(text) - max((search.length for search in self._searches), default=0)
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """Returns the text held back, when no more will come; empty after a stop."""
        held, self._held = self._held, ""
        for search in self._searches:
            search.length = 0
        return held


def stop_token_ids(stops: Sequence[str], special: Mapping[str, int]) -> list[int]:
    """The ids of stop strings that are special tokens, which generated text leaves out.

    Args:
        stops: The stop strings.
        special: The tokenizer's special tokens by text.

    Raises:
        RequestError: A stop string has a special token in it and other text: no text ever has both.
    """
    for stop in stops:
        inside = next((text for text in special if text in stop), stop)
        if inside != stop and stop not in special:
            raise RequestError(
                f"stop string {stop!r} has the special token {inside!r} in it, which is no part of "
                f"generated text, so that it is never found; give {inside!r} alone"
            )
    return [special[stop] for stop in stops if stop in special]


class _Search:
    """How much of `pattern` the text ends with, a character at a time (Knuth, Morris, Pratt)."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.length = 0
        # borders[n]: length of the longest proper prefix of pattern[: n + 1] that also ends it.
        self._borders = [0] * len(pattern)
        for n in range(1, len(pattern)):
            self._borders[n] = self._longest(self._borders[n - 1], pattern[n])

    def step(self, character: str) -> bool:
        """Takes one character; says whether the text now ends with the whole pattern."""
        self.length = self._longest(self.length, character)
        return self.length == len(self.pattern)

    def _longest(self, length: int, character: str) -> int:
        while length and self.pattern[length] != character:
            length = self._borders[length - 1]
        return length + 1 if self.pattern[length] == character else 0
