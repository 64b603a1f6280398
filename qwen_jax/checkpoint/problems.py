"""Everything wrong with a folder, gathered by kind and raised as one error."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import CheckpointError

LISTED = 20
LONGEST_NAME = 200


def show(name: object) -> str:
    """Spells a name from a file so that it is safe to print: one line of bounded length."""
    text = str(name)
    text = text if text.isprintable() and text else ascii(text)
    return (
        text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}... ({len(text)} characters)"
    )


def listed(names: Iterable[object]) -> str:
    """Joins names with commas, the first `LISTED` of them and then a count of the rest."""
    names = list(names)
    text = ", ".join(show(name) for name in names[:LISTED])
    return text if len(names) <= LISTED else f"{text} and {len(names) - LISTED} more"


class Problems:
    """A growing list of faults, by kind, in the order in which the kinds were first met."""

    def __init__(self) -> None:
        self._kinds: dict[str, list[str]] = {}

    def add(self, kind: str, *items: str) -> None:
        """Records faults of one kind; none given records nothing."""
        if items:
            self._kinds.setdefault(kind, []).extend(items)

    def raise_if_any(self, what: str, advice: str) -> None:
        """Raises one error that lists every fault.

        Args:
            what: the first line: what was being read, and what is wrong with it as a whole.
            advice: the last line: what is accepted and what to do next.

        Raises:
            CheckpointError: at least one fault was recorded.
        """
        if not self._kinds:
            return
        lines = [what]
        for kind, items in self._kinds.items():
            lines.append(f"  {kind} ({len(items)}):")
            lines.extend(f"    {item}" for item in items[:LISTED])
            if len(items) > LISTED:
                lines.append(f"    ... and {len(items) - LISTED} more")
        raise CheckpointError("\n".join([*lines, advice]))
