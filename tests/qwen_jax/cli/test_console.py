"""Progress where standard error is no terminal."""

from __future__ import annotations

import pytest

from qwen_jax.cli.console import Notes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, to be set."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_progress_is_told_in_lines_ten_seconds_and_a_tenth_apart(clock, capsys):
    with Notes().progress("writing x", 10_000_000) as advance:
        for seconds, nbytes in ((9, 4_000_000), (20, 1_000_000), (25, 2_000_000), (31, 500_000)):
            clock[0] = seconds
            advance(nbytes)
        clock[0] = 60
        advance(-1_000_000)
        advance(3_500_000)
    assert capsys.readouterr().err.splitlines() == [
        "writing x: 5.0 MB of 10.0 MB, 20 s to go",
        "writing x: 7.5 MB of 10.0 MB, 10 s to go",
    ]


def test_nothing_is_told_when_quiet(clock, capsys):
    with Notes(quiet=True).progress("writing x", 100) as advance:
        clock[0] = 50
        advance(50)
    assert capsys.readouterr().err == ""
