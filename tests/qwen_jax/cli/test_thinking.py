"""Thought told from answer, wherever the reply is cut into pieces."""

from __future__ import annotations

import pytest

from qwen_jax.cli.thinking import ThinkParser


def parse(prompt: str, pieces: list[str]) -> tuple[ThinkParser, list[tuple[str, str]]]:
    parser, parts = ThinkParser(prompt), []
    for piece in pieces:
        parts += parser.feed(piece)
    return parser, parts + parser.finish()


CASES = [
    ("<think>\n", "because\n</think>\n\nYes.", "because", "Yes."),
    ("assistant\n", "<think>\nbecause\n</think>\n\nYes.", "because", "Yes."),
    ("assistant\n", "\n<think></think>Yes.", "", "Yes."),
    ("assistant\n", "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
    ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("<think>\n", "no end </thin", "no end </thin", ""),
    ("<think>\n", "a </think> b </think> c", "a", "b </think> c"),
    ("assistant\n", "<thi", "", "<thi"),
    ("assistant\n", "<thinking>", "", "<thinking>"),
    ("assistant\n", "", "", ""),
    ("<think>\n", "<</think>", "<", ""),
]


@pytest.mark.parametrize(("prompt", "reply", "thought", "answer"), CASES)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 1000])
def test_thought_and_answer_do_not_depend_on_the_pieces(prompt, reply, thought, answer, width):
    pieces = [reply[i : i + width] for i in range(0, len(reply), width)]
    parser, parts = parse(prompt, pieces)
    assert (parser.thought, parser.answer) == (thought, answer)
    assert "".join(text for _, text in parts) == reply


def test_text_is_held_back_only_while_it_may_be_a_tag():
    parser = ThinkParser("<think>")
    assert parser.feed("so </th") == [("thought", "so ")]
    assert parser.feed("e") == [("thought", "</the")]
    assert parser.feed("n</think> Yes") == [
        ("thought", "n"),
        ("tag", "</think>"),
        ("answer", " Yes"),
    ]
