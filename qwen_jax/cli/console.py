"""What a command prints: text or JSON to standard output, notes to standard error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any


class Notes:
    """Remarks on standard error; silent under `--quiet`."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        """Print one remark."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar to advance by so many bytes, on a terminal; nothing elsewhere."""
        if self._quiet or not sys.stderr.isatty():
            yield lambda advance: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda advance: bar.advance(task, advance)


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
