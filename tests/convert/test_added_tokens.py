"""The file of tokens to add: what it may ask for, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from convert.added_tokens import read_entries, shares
from convert.vocabulary import NewToken, read_added_tokens
from qwen_jax.errors import CheckpointError
from qwen_jax.text import Tokenizer
from tests.convert.new_tokens import NEW


def test_ids_follow_the_last_one_and_pieces_are_found(added, demo_path):
    tokenizer = Tokenizer.from_folder(demo_path)
    assert tokenizer is not None
    vocabulary = added(*NEW)
    assert [token.id for token in vocabulary.tokens] == [*range(4096, 4103)]
    assert vocabulary.count == 7
    tool, word, prophet, town, *_ = vocabulary.tokens
    assert tool == NewToken(4096, "<|tool|>", True, tool.pieces, tool.weights)
    assert word.pieces == tuple(tokenizer.encode("Nebuchadnezzar"))
    assert sum(word.weights) == pytest.approx(1) and len(set(word.weights)) == 1
    assert prophet.pieces == (tokenizer.token_to_id("Ġthe"), tokenizer.token_to_id("Ġof"))
    assert prophet.weights == (0.25, 0.75)
    assert (town.pieces, town.weights, town.special) == ((5,), (1.0,), False)


def test_list_and_lines_are_the_same(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"\n  {json.dumps(list(NEW), indent=1)}\n")
    listed = read_entries(file)
    file.write_text("\ufeff" + "\r\n\n".join(json.dumps(entry) for entry in NEW) + "\n")
    lines = read_entries(file)
    assert [entry.place for entry in listed] == [f"entry {n}" for n in range(1, 8)]
    assert [entry.place for entry in lines] == [f"line {n}" for n in range(1, 15, 2)]
    assert [dataclasses.replace(entry, place="") for entry in lines] == [
        dataclasses.replace(entry, place="") for entry in listed
    ]


def test_table_grows_only_beyond_its_free_rows(added):
    vocabulary = added(*NEW, vocab_size=4103)
    assert (vocabulary.size, vocabulary.config_changes) == (4103, {})
    assert "ids 4096 to 4102: in rows of the tables that the tokenizer left" in vocabulary.notes[0]
    vocabulary = added(*NEW, vocab_size=4102)
    assert (vocabulary.size, vocabulary.config_changes) == (4103, {"vocab_size": 4103})
    assert "the tables grow from 4102 to 4103 rows" in vocabulary.notes[0]
    assert added("one token").notes[0].startswith("1 added tokens have id 4096")


def test_piece_may_be_spelled_as_in_the_vocabulary(added):
    by_text = added({"token": "x y", "pieces": [" the", "<|im_end|>", "\n"]})
    by_entry = added({"token": "x y", "pieces": ["Ġthe", 4091, "Ċ"]})
    assert by_text == by_entry


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1, 1], [0.5, 0.5]), ([0, 7], [0, 1]), ([1e308, 1e308], [0.5, 0.5]), ([1e-320, 0], [1, 0])],
)
def test_weights_become_shares(weights, expected):
    assert shares(weights, 2) == pytest.approx(expected)


def test_weights_may_go_with_the_pieces_of_the_text(added):
    (token,) = added({"token": "the end", "weights": [1, 3]}).tokens
    assert token.weights == (0.25, 0.75)


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        (5, "entry 1: a JSON number, where a text or an object"),
        (None, "a JSON null, where a text or an object"),
        ([], "a JSON list, where"),
        ({}, "token is a JSON null"),
        ("", "token is an empty text"),
        ({"token": 3}, "token is a JSON number"),
        ({"token": "x\ud800"}, "token is not valid Unicode"),
        ({"token": "x y", "peices": [1], "a\nb": 1}, r"unknown fields peices, 'a\nb'; known are"),
        ({"token": "x y", "special": 1}, "special is a JSON number"),
        ({"token": "x y", "pieces": []}, "pieces is an empty list"),
        ({"token": "x y", "pieces": "the"}, "pieces is a JSON text"),
        ({"token": "x y", "pieces": [True]}, "a piece is a JSON true or false"),
        ({"token": "x y", "pieces": [1.5]}, "a piece is a JSON number, where a text"),
        ({"token": "x y", "pieces": [""]}, "a piece is an empty text"),
        ({"token": "x y", "pieces": [1], "weights": [1, 2]}, "2 weights for 1 pieces"),
        ({"token": "x y", "pieces": [1], "weights": 1}, "weights is a JSON number"),
        ({"token": "x y", "pieces": [1], "weights": []}, "the weights sum to 0"),
        ({"token": "x y", "pieces": [1, 2], "weights": [0, 0.0]}, "the weights sum to 0"),
        ({"token": "x y", "pieces": [1, 2], "weights": [2, -1]}, "a weight is -1"),
        ({"token": "x y", "pieces": [1], "weights": [float("nan")]}, "a weight is NaN"),
        ({"token": "x y", "pieces": [1], "weights": [float("inf")]}, "a weight is Infinity"),
        ({"token": "x y", "pieces": [1], "weights": [10**400]}, "a weight is 1000"),
        ({"token": "x y", "pieces": [1], "weights": [True]}, "a weight is true"),
        ({"token": "x y", "pieces": [1], "weights": ["1"]}, 'a weight is "1"'),
    ],
)
def test_faulty_entry_is_refused(tokens_refused, entry, part):
    message = tokens_refused(entry)
    assert part in message
    assert len(message.splitlines()) < 8


def test_entries_that_do_not_fit_the_tokenizer_are_refused(tokens_refused):
    unfit: dict[str, Any] = {
        "'the' is token": "the",
        "' the' is token": " the",
        "'Ġthe' is token": "Ġthe",
        "'<|im_end|>' is token 4091": "<|im_end|>",
        "'<think>' is token 4092": "<think>",
        "'cafe\u0301 au lait' as 'café au lait'": "cafe\u0301 au lait",
        "'a b': id 4096 (ids with a token are below 4096)": {"token": "a b", "pieces": [4096]},
        "'c d': id -1": {"token": "c d", "pieces": [-1]},
        "'e f': id 1000": {"token": "e f", "pieces": [10**30]},
        "'g h': 'Hello', which is 'H' +": {"token": "g h", "pieces": ["Hello"]},
        "'the end': 3 weights for the pieces 'the' + ' end'": {
            "token": "the end",
            "weights": [1, 2, 3],
        },
    }
    message = tokens_refused(*unfit.values())
    for number, part in enumerate(unfit, 1):
        assert f"entry {number}: {part}" in message


def test_tokens_that_the_tokenizer_cannot_have_are_refused(tokens_refused):
    message = tokens_refused("Straße", "x<|im_end|>y", " Straße")
    assert "as other text (1):\n    'Straße' as 'Stra\ufffde'\n" in message
    assert "cut (1):\n    'x<|im_end|>y' is read as 'x' + '<|im_end|>' + 'y'\n" in message


def test_all_faults_of_a_kind_are_told_together(tokens_refused):
    message = tokens_refused("a b", "", "a b", {"token": "c d", "weights": [-1]}, 7)
    parts = ("faulty entries (3)", "entry 2:", "entry 4:", "entry 5:", "entry 3: 'a b', as entry 1")
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ("", ["holds no tokens"]),
        (" \n\n", ["holds no tokens"]),
        ("[]", ["holds no tokens"]),
        ('["a b",\n "c d"', ["is not JSON", "line 2, column 7"]),
        ('["a b"]\n["c d"]', ["is not JSON", "Extra data at line 2"]),
        ('"a b"\n{"token": \n"c d" x\n', ["line 2: Expecting value at", "line 3: Extra data at c"]),
        ('{"token": "a b", "token": "c d"}', ["line 1: duplicate keys: token"]),
        ("a b\n", ["line 1: Expecting value at column 1"]),
        ("[" * 100_000, ["is not JSON: maximum recursion depth"]),
        (b'"\xff"', ["cannot be read as UTF-8"]),
    ],
)
def test_malformed_file_is_refused(tokens_refused, raw, parts):
    message = tokens_refused(raw=raw)
    assert [part for part in parts if part not in message] == []
    assert "tokens.json" in message and "Accepted are a JSON list" in message


def test_missing_file_is_refused(demo_path, demo_config, tmp_path):
    for file in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_added_tokens(file, demo_path, demo_config)


def test_folder_without_a_fitting_tokenizer_is_refused(tokens_refused, tokenizer_folder):
    message = tokens_refused("a b", folder=tokenizer_folder, vocab_size=4095)
    assert "ids up to 4095, but the embedding table only 4095 rows" in message
    (tokenizer_folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in tokens_refused("a b", folder=tokenizer_folder)
