"""Windows score each token once, with the context that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_jax.errors import RequestError
from qwen_jax.evaluate import Document, Windows


def document(tokens: int, first: int = 0) -> Document:
    """Every id is its own position, so that a batch says what it holds."""
    return Document("text", np.arange(first, first + tokens, dtype=np.int32))


def scored(windows: Windows, batch_size: int) -> list[tuple[int, int, int]]:
    """(window, target, how many tokens of context) of each scored token."""
    found = []
    for batch in windows.batches(batch_size):
        rows, columns = np.divmod(batch.positions, windows.window)
        ahead = columns + 1
        # What is scored is the token behind the position of its logits.
        assert (batch.tokens[rows, ahead] == batch.targets).all()
        assert (ahead < batch.lengths[rows]).all()
        found += zip(batch.numbers.tolist(), batch.targets.tolist(), ahead.tolist(), strict=True)
    return found


@given(st.integers(2, 12), st.data())
def test_with_a_stride_every_token_but_the_first_is_scored_once(window, data):
    stride = data.draw(st.integers(1, window - 1))
    tokens = data.draw(st.integers(window, 60))
    windows = Windows([document(tokens)], window=window, stride=stride)
    found = scored(windows, data.draw(st.integers(1, 4)))
    assert [target for _, target, _ in found] == list(range(1, tokens))
    assert windows.scored == tokens - 1
    # Only the start of the text has less context than window - stride.
    assert all(context >= min(target, window - stride) for _, target, context in found)


@given(st.integers(2, 12), st.integers(1, 4), st.data())
def test_by_default_each_window_stands_alone(window, batch_size, data):
    tokens = data.draw(st.integers(window, 60))
    windows = Windows([document(tokens)], window=window)
    found = scored(windows, batch_size)
    expected = [(t // window, t, t % window) for t in range(tokens) if t % window]
    assert found == expected


def test_last_window_is_padded_and_last_batch_filled_up():
    windows = Windows([document(11, first=1)], window=4)
    first, second = windows.batches(2)
    assert first.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert second.tokens.tolist() == [[9, 10, 11, 0], [0, 0, 0, 0]]
    assert (first.lengths.tolist(), second.lengths.tolist()) == ([4, 4], [3, 0])
    assert second.targets.tolist() == [10, 11]


def test_windows_end_with_their_document():
    windows = Windows([document(6), document(5, first=100)], window=4, stride=2)
    assert [target for _, target, _ in scored(windows, 3)] == [1, 2, 3, 4, 5, 101, 102, 103, 104]
    assert windows.tokens == 11


def test_first_windows_can_be_taken_alone():
    windows = Windows([document(40)], window=4, max_windows=3)
    assert (len(windows), windows.tokens, windows.scored) == (3, 12, 9)
    assert windows.describe(2) == "window 2 (tokens 8 to 11 of text)"


def test_digest_depends_on_tokens_and_on_what_is_scored():
    def digest(tokens=40, first=0, window=8, stride=None, max_windows=None):
        documents = [document(tokens, first)]
        return Windows(documents, window=window, stride=stride, max_windows=max_windows).digest

    assert digest() == digest()
    others = [
        digest(tokens=44),
        digest(first=1),
        digest(window=10),
        digest(stride=4),
        digest(max_windows=2),
    ]
    assert len({digest(), *others}) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 1}, "window is 1; .* from 2 on"),
        ({"window": 8, "stride": 0}, "stride is 0; accepted are 1 to 8"),
        ({"window": 8, "stride": 9}, "stride is 9; accepted are 1 to 8"),
        ({"window": 8, "max_windows": 0}, "max_windows is 0"),
        ({"window": 21}, "text has 20 tokens, less than a window of 21"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(RequestError, match=words):
        Windows([document(20)], **arguments)


def test_no_text_and_no_batch_are_refused():
    with pytest.raises(RequestError, match="there is no text"):
        Windows([])
    with pytest.raises(RequestError, match="batch_size is 0"):
        list(Windows([document(20)], window=8).batches(0))
