"""Ids of a row as text while it grows, and what is left when it ends."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_jax.decode import FinishReason
from qwen_jax.transcript import Transcript, join

# The demo's vocabulary has these characters in several tokens each.
TEXT = "né 🎉 中!"


def texts_of(transcript: Transcript, ids: list[int], step: int, reason: FinishReason) -> list[str]:
    """The text of each piece, the row being looked at every `step` tokens."""
    tokens, logprobs = np.array([ids]), np.zeros((1, len(ids)), np.float32)
    pieces = []
    for count in sorted({*range(step, len(ids), step), len(ids)}):
        now = reason if count == len(ids) else FinishReason.RUNNING
        pieces += transcript.take(tokens, logprobs, count, now)
    assert join(pieces).tokens == ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(ids) - 1)
    return [piece.text for piece in pieces]


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_row_that_ends_inside_a_character_says_so_once(tokenizer, step):
    ids = tokenizer.encode(TEXT)
    cut_off = 0
    for count in range(1, len(ids) + 1):
        transcript = Transcript(0, 1, tokenizer, ["!!"])
        texts = texts_of(transcript, ids[:count], step, FinishReason.LENGTH)
        assert "".join(texts) == tokenizer.decode(ids[:count])
        assert not any("\ufffd" in text for text in texts[:-1])
        cut_off += texts[-1].endswith("\ufffd")
    assert cut_off >= 3


def test_an_end_token_brings_out_what_was_held_back(tokenizer):
    (end,) = tokenizer.eos_token_ids
    ids = [*tokenizer.encode("so!"), end]
    transcript = Transcript(0, 1, tokenizer, ["!!"])
    assert "".join(texts_of(transcript, ids, 1, FinishReason.STOP)) == "so!"
