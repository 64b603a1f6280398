"""The think block of a reply, told from the answer while both are still being written."""

from __future__ import annotations

from typing import Literal

OPEN, CLOSE = "<think>", "</think>"

Part = tuple[Literal["thought", "tag", "answer"], str]


class ThinkParser:
    """Splits a reply into thought and answer, whatever the borders of its pieces.

    A reply has at most one think block, at its beginning. Some templates end the prompt inside it,
    so that the reply never opens it.

    Args:
        prompt: what the reply follows.
    """

    def __init__(self, prompt: str = "") -> None:
        self._waiting = ""
        self._state: Literal["start", "thought", "answer"] = "start"
        if prompt.rstrip().endswith(OPEN):
            self._state = "thought"
        self._parts: dict[str, list[str]] = {"thought": [], "answer": []}

    @property
    def thought(self) -> str:
        """The think block so far, without its tags and surrounding white space."""
        return "".join(self._parts["thought"]).strip()

    @property
    def answer(self) -> str:
        """The answer so far, without the white space before it."""
        return "".join(self._parts["answer"]).lstrip()

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of the reply; returns the parts that are certain now."""
        self._waiting += text
        return self._parse(end=False)

    def finish(self) -> list[Part]:
        """The rest, when no more will come."""
        return self._parse(end=True)

    def _parse(self, *, end: bool) -> list[Part]:
        parts: list[Part] = []
        if self._state == "start":
            stripped = self._waiting.lstrip()
            if stripped.startswith(OPEN):
                cut = self._waiting.index(OPEN) + len(OPEN)
                parts.append(("tag", self._waiting[:cut]))
                self._waiting, self._state = self._waiting[cut:], "thought"
            elif end or not OPEN.startswith(stripped):
                self._state = "answer"
            else:
                return parts
        if self._state == "thought":
            before, tag, after = self._waiting.partition(CLOSE)
            held = 0 if tag or end else _overlap(before, CLOSE)
            parts.append(("thought", before[: len(before) - held]))
            self._waiting = before[len(before) - held :]
            if tag:
                parts.append(("tag", tag))
                self._waiting, self._state = after, "answer"
        if self._state == "answer":
            parts.append(("answer", self._waiting))
            self._waiting = ""
        for kind, text in parts:
            self._parts.get(kind, []).append(text)
        return [part for part in parts if part[1]]


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag` that `text` ends with."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
