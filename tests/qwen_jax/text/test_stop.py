"""Stop strings: cut at the right place, whatever the pieces, and never shown in part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_jax.errors import RequestError
from qwen_jax.text import StopMatcher

LETTERS = st.sampled_from("ab🎉")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


def run(stops: object, pieces: list[str]) -> tuple[list[str], bool]:
    """What each piece, and the end, lets out; and whether a stop string was met."""
    matcher = StopMatcher(stops)  # type: ignore[arg-type]
    shown, stopped = [], False
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown.append(text)
        if stopped:
            break
    return [*shown, matcher.finish()], stopped


def first_stop(stops: list[str], text: str) -> int | None:
    """Where the text is cut: looks at each prefix of it in turn."""
    for end in range(1, len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end - max(ended)
    return None


@given(STOPS, st.lists(st.text(LETTERS, max_size=5), max_size=8))
def test_any_split_cuts_where_the_whole_text_does(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    cut = first_stop(stops, text)
    shown, stopped = run(stops, pieces)
    assert stopped == (cut is not None)
    assert "".join(shown) == text[:cut]


@given(STOPS, st.lists(st.text(LETTERS, max_size=5), max_size=8))
def test_cut_is_the_first_find_unless_one_stop_lies_within_another(
    stops: list[str], pieces: list[str]
) -> None:
    stops = [s for s in stops if not any(t in s[:-1] for t in stops if not s.startswith(t))]
    text = "".join(pieces)
    found = [text.find(stop) for stop in stops if stop in text]
    assert "".join(run(stops, pieces)[0]) == text[: min(found, default=len(text))]


@given(STOPS, st.lists(st.text(LETTERS, max_size=5), max_size=8))
def test_text_is_held_only_while_it_may_begin_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher, fed, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        if stopped:
            return
        fed, shown = fed + piece, shown + text
        begun = [stop[:n] for stop in stops for n in range(1, len(stop))]
        held = max((len(start) for start in begun if fed.endswith(start)), default=0)
        assert shown == fed[: len(fed) - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "stopped"),
    [
        (["BCDE"], ["AB", "CD", "EF!"], ["A", "", "", ""], True),
        (["BCDE"], ["AB", "CD", "F!"], ["A", "", "BCDF!", ""], False),
        (["BCDE"], ["AB", "CD"], ["A", "", "BCD"], False),
        (["CD"], ["ABCDEF"], ["AB", ""], True),
        (["BCDE", "BC"], ["AB", "CD", "EF!"], ["A", "", ""], True),
        (["D", "BCD"], ["AB", "CD"], ["A", "", ""], True),
        (["BCDE", "C"], ["AB", "CD", "EF!"], ["A", "B", ""], True),
        (["E", "C"], ["ABCDEF"], ["AB", ""], True),
        (["aab"], ["aa", "aab"], ["", "aa", ""], True),
        (["🎉🎉"], ["hi🎉", "🎉!"], ["hi", "", ""], True),
        (["é"], ["cafe\u0301 café"], ["cafe\u0301 caf", ""], True),
        ("\n\n", ["one\n", "two\n", "\nthree"], ["one", "\ntwo", "", ""], True),
        ((), ["anything", ""], ["anything", "", ""], False),
        (None, ["anything"], ["anything", ""], False),
    ],
)
def test_cases(stops: object, pieces: list[str], expected: list[str], stopped: bool) -> None:
    assert run(stops, pieces) == (expected, stopped)


def test_matched_names_the_stop_and_later_text_is_dropped() -> None:
    matcher = StopMatcher(["never", "END"])
    assert matcher.matched is None
    assert matcher.feed("the END and") == ("the ", True)
    assert matcher.matched == "END"
    assert matcher.feed("more") == ("", True)
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "message"),
    [([""], "empty"), ("x\udcff", "U\\+DCFF"), ([3], "of type int"), (["ok", None], "NoneType")],
)
def test_refuses(stops: object, message: str) -> None:
    if stops == "x\udcff":
        stops = [stops]
    with pytest.raises(RequestError, match=message):
        StopMatcher(stops)  # type: ignore[arg-type]
