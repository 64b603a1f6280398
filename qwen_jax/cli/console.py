"""What a command prints: text or JSON to standard output, notes to standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


class Notes:
    """Remarks on standard error; silent under `--quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def __call__(self, text: str) -> None:
        """Print one remark."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar to advance by so many bytes, on a terminal; now and then a line elsewhere."""
        if self.quiet or not sys.stderr.isatty():
            yield _Lines(self, title, total).advance
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda advance: bar.advance(task, advance)


class _Lines:
    """Progress where no bar can be drawn: a line each tenth, ten seconds apart at least."""

    def __init__(self, notes: Notes, title: str, total: int) -> None:
        self._notes, self._title, self._total = notes, title, max(total, 1)
        self._begin = self._last = time.monotonic()
        self._done, self._told = 0, 0.0

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now, share = time.monotonic(), self._done / self._total
        if share < self._told + 0.1 or now < self._last + 10 or share >= 1:
            return
        self._told, self._last = share, now
        left = (now - self._begin) * (1 / share - 1)
        amounts = f"{size(self._done)} of {size(self._total)}"
        self._notes(f"{self._title}: {amounts}, {duration(left)} to go")


def duration(seconds: float) -> str:
    """A time for a reader: "0.4 s", "12 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def write_text(text: str) -> None:
    """Text to standard output, at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def write_json(value: Any) -> None:
    """One JSON object to standard output; a number that JSON cannot hold is written as null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def accept_any_text() -> None:
    """Let an output whose encoding lacks a character show a replacement instead of failing."""
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def dim(text: str) -> str:
    """Text in a faint style, on a terminal that has one."""
    styled = (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
    return f"\x1b[2m{text}\x1b[0m" if styled and text else text


def size(nbytes: float) -> str:
    """Bytes for a reader: "69.3 GB", "20.5 kB"."""
    return scaled(nbytes, "B")


def scaled(value: float, unit: str) -> str:
    """A number with a decimal prefix before its unit."""
    if value < 1000:
        return f"{value:,.0f} {unit}"
    power = min(int(math.log10(value) // 3), 4)
    return f"{value / 1000**power:,.1f} {' kMGT'[power]}{unit}"


def table(rows: dict[str, str]) -> str:
    """Names and values, one pair a line, aligned."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())
