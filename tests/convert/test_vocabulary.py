"""Added tokens: the new rows of the tables, and the tokenizer files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.tokenizer_files import AddedToken
from convert.vocabulary import NewToken, Vocabulary, read_added_tokens
from qwen_jax.checkpoint.keys import HEAD
from qwen_jax.checkpoint.mapping import EMBEDDING
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.config import QwenConfig
from qwen_jax.generation import _sampled_ids
from qwen_jax.text import Tokenizer
from tests.convert.new_tokens import NEW

BF16 = np.dtype(ml_dtypes.bfloat16)
STORED = {EMBEDDING: "model.language_model.embed_tokens.weight", HEAD: "lm_head.weight"}


# --- The rows


def rows_of(arrays: dict[str, np.ndarray]) -> Callable[[str, np.ndarray], np.ndarray]:
    return lambda path, indices: arrays[path][indices]


def tokens(first: int, *made_of: tuple[tuple[int, ...], tuple[float, ...]]) -> tuple[NewToken, ...]:
    return tuple(
        NewToken(first + number, f"token {number}", False, *parts)
        for number, parts in enumerate(made_of)
    )


def test_row_is_the_weighted_mean_rounded_once():
    # In bfloat16 numbers from 1 to 2 are 1/128 apart, from 256 to 512 they are 2 apart.
    table = np.array([[1, 256], [2, 258], [1 + 1 / 128, 0], [-3, 1]], BF16)
    parts = (
        ((2,), (1.0,)),
        ((0, 1), (0.5, 0.5)),
        # 1 + 3/512 lies above the middle; a sum of rounded products would be 1.
        ((0, 2), (0.25, 0.75)),
        # The same piece twice counts twice: (1 + 1 - 3) / 3.
        ((0, 0, 3), (1 / 3, 1 / 3, 1 / 3)),
        ((1, 3), (1.0, 0.0)),
    )
    edit = Vocabulary(tokens(4, *parts), 4, tied=True).edit(rows_of({EMBEDDING: table}))
    new = edit.extra_rows(EMBEDDING, BF16)
    assert new.dtype == BF16
    expected = [
        [1 + 1 / 128, 0],
        [1.5, 256],  # 257 is a tie, and 256 the even one
        [1 + 1 / 128, 64],
        [-0.333984375, 171],  # -1/3 and 171 in eight bits
        [2, 258],
    ]
    assert new.astype(np.float32).tolist() == expected


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
def test_runs_of_any_length_give_the_same_table(dtype):
    random = np.random.default_rng(5)
    old = {path: random.normal(size=(10, 3)).astype(dtype) for path in (EMBEDDING, HEAD)}
    kept = {path: table.copy() for path, table in old.items()}
    # Ids 7 to 11: three in free rows, two beyond the end.
    parts = [((number, 9), (0.5, 0.5)) for number in range(5)]
    edit = Vocabulary(tokens(7, *parts), 10, tied=False).edit(rows_of(old))
    assert edit.paths == {EMBEDDING, HEAD}
    for path, table in old.items():
        half = (table[:5].astype(np.float64) + table[9].astype(np.float64)) / 2
        expected = np.concatenate([table[:7], half.astype(np.float32).astype(dtype)])
        assert edit.shape(path, (10, 3)) == expected.shape
        for step in (1, 2, 3, 4, 7, 8, 10, 99):
            runs = [edit.apply(path, at, table[at : at + step]) for at in range(0, 10, step)]
            whole = np.concatenate([*runs, edit.extra_rows(path, dtype)])
            assert whole.dtype == dtype
            assert whole.tobytes() == expected.tobytes()
        assert table.tobytes() == kept[path].tobytes()


def test_table_that_does_not_grow_gets_no_rows():
    table = np.eye(6, dtype=np.float32)
    edit = Vocabulary(tokens(3, ((0,), (1.0,))), 6, tied=True).edit(rows_of({EMBEDDING: table}))
    assert edit.paths == {EMBEDDING}
    assert edit.shape(EMBEDDING, (6, 6)) == (6, 6)
    assert edit.extra_rows(EMBEDDING, table.dtype).shape == (0, 6)
    assert edit.apply(EMBEDDING, 0, table)[3].tolist() == table[0].tolist()


def test_rows_of_the_demo(added, demo_path):
    stored = open_folder(demo_path)
    tables = {path: stored.read(key) for path, key in STORED.items()}
    vocabulary = added(*NEW)
    edit = vocabulary.edit(rows_of(tables))
    for path, table in tables.items():
        assert edit.apply(path, 0, table).tobytes() == table.tobytes()
        new = edit.extra_rows(path, table.dtype).astype(np.float64)
        for row, token in zip(new, vocabulary.tokens, strict=True):
            pieces = table[list(token.pieces)].astype(np.float64)
            exact = np.average(pieces, axis=0, weights=token.weights)
            # Half a unit in the last of bfloat16's eight bits, and float32's own error.
            assert np.all(np.abs(row - exact) <= np.abs(exact) * 2**-8 + 1e-7)
        assert new[3].tolist() == table[5].astype(np.float64).tolist()


# --- The tokenizer


@pytest.fixture(scope="module")
def extended(
    demo_path: Path, demo_config: QwenConfig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Vocabulary]:
    """A folder that has all that a folder may have about tokens, the new ones added; read only."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path / name, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    old = {token["content"]: int(i) for i, token in config["added_tokens_decoder"].items()}
    config["additional_special_tokens"] = ["<|im_start|>"]
    files = {
        "tokenizer_config.json": config,
        "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": []},
        "added_tokens.json": old,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    file.write_text(json.dumps(NEW))
    vocabulary = read_added_tokens(file, folder, demo_config)
    vocabulary.write_tokenizer(folder)
    return folder, vocabulary


def test_each_token_has_one_id_and_its_text_back(extended):
    folder, vocabulary = extended
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.vocab_size == 4103
    for token in vocabulary.tokens:
        assert tokenizer.encode(token.text) == [token.id]
        assert tokenizer.decode([token.id]) == token.text
        assert tokenizer.token_bytes(token.id).decode() == token.text
        around = tokenizer.encode(f"1{token.text}2")
        assert around == [*tokenizer.encode("1"), token.id, *tokenizer.encode("2")]
        assert (token.id in tokenizer.special_ids) is token.special
        shown = tokenizer.decode(around, skip_special_tokens=True)
        assert shown == ("12" if token.special else f"1{token.text}2")
    assert tokenizer.encode("a cafe\u0301") == [*tokenizer.encode("a"), 4101]


def test_other_text_is_encoded_as_before(extended, demo_path):
    before, after = Tokenizer.from_folder(demo_path), Tokenizer.from_folder(extended[0])
    assert before is not None and after is not None
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    chat = (
        "<|im_start|>user\n<tool_call>{}</tool_call> na\u00efve e\u0301<think>\n</think><|im_end|>"
    )
    for text in (*readme.split("\n\n"), chat, "Nebuchad nezzar <|tool |> Jeremiad 東京", ""):
        assert after.encode(text) == before.encode(text)
        assert after.decode(after.encode(text)) == before.decode(before.encode(text))
    assert after.eos_token_ids == before.eos_token_ids
    messages = [{"role": "user", "content": "Hello"}]
    assert after.apply_chat_template(messages) == before.apply_chat_template(messages)


def test_every_file_knows_the_tokens(extended):
    folder, vocabulary = extended
    read = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    by_id = {token.id: token for token in vocabulary.tokens}
    listed = {entry["id"]: entry for entry in read["tokenizer"]["added_tokens"]}
    declared = read["tokenizer_config"]["added_tokens_decoder"]
    assert list(listed) == [*range(4089, 4103)] == [int(i) for i in declared]
    for i, token in by_id.items():
        assert listed[i] == {"id": i, **declared[str(i)]}
        assert (listed[i]["content"], listed[i]["special"]) == (token.text, token.special)
        assert read["added_tokens"][token.text] == i
    special = [token.text for token in vocabulary.tokens if token.special]
    assert read["tokenizer_config"]["additional_special_tokens"] == ["<|im_start|>", *special]
    assert read["special_tokens_map"] == {
        "eos_token": "<|im_end|>",
        "additional_special_tokens": special,
    }
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


def test_same_tokens_are_not_added_twice(extended, tokens_refused):
    message = tokens_refused(*NEW, folder=extended[0], vocab_size=4103)
    assert "that the vocabulary has already (7)" in message
    assert "entry 2: 'Nebuchadnezzar' is token 4097" in message


def test_further_tokens_follow(extended, added):
    further = {"token": "x y", "pieces": ["Nebuchadnezzar", 4096]}
    vocabulary = added(further, folder=extended[0], vocab_size=4103)
    assert (vocabulary.tokens[0].id, vocabulary.tokens[0].pieces) == (4103, (4097, 4096))


def test_ids_beyond_the_tokenizer_are_still_not_sampled(extended, demo_config):
    tokenizer = Tokenizer.from_folder(extended[0])
    for rows, expected in ((4101, 4101), (4103, 4103), (4500, 4103)):
        model: Any = SimpleNamespace(config=dataclasses.replace(demo_config, vocab_size=rows))
        assert _sampled_ids(model, tokenizer) == expected


def test_folder_needs_no_file_but_the_tokenizer(tokenizer_folder, added):
    folder = tokenizer_folder
    (folder / "tokenizer_config.json").unlink()
    vocabulary = added(*NEW, folder=folder)
    vocabulary.write_tokenizer(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "tokenizer.json"]


def test_source_behind_links_stays_as_it_is(tokenizer_folder, added, tmp_path):
    folder = tokenizer_folder
    linked = tmp_path / "linked"
    linked.mkdir()
    os.link(folder / "tokenizer.json", linked / "tokenizer.json")
    (linked / "tokenizer_config.json").symlink_to(folder / "tokenizer_config.json")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    added("x y", folder=linked).write_tokenizer(linked)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    tokenizer = Tokenizer.from_folder(linked)
    assert tokenizer is not None and tokenizer.encode("x y") == [4096]


def test_damaged_tokenizer_is_refused_before_anything_is_written(tokens_refused, tokenizer_folder):
    folder = tokenizer_folder
    (folder / "special_tokens_map.json").write_text("{")
    message = tokens_refused("x y", folder=folder)
    assert f"{folder / 'special_tokens_map.json'} cannot be read" in message
    (folder / "special_tokens_map.json").write_text("[]")
    assert "is not a JSON object" in tokens_refused("x y", folder=folder)


def test_flags_follow_the_kind():
    assert AddedToken(7, "x", True).flags() == {
        "content": "x",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    assert AddedToken(7, "x", False).flags()["normalized"] is True


@pytest.mark.reference
def test_transformers_agrees(extended, demo_path):
    from transformers import AutoTokenizer

    folder, vocabulary = extended
    after, before = (AutoTokenizer.from_pretrained(path) for path in (folder, demo_path))
    assert len(after) == 4103
    for token in vocabulary.tokens:
        assert after.encode(token.text) == [token.id]
        assert after.decode([token.id]) == token.text
        assert (token.text in after.all_special_tokens) is token.special
    text = "In the beginning <think>naïve</think> e\u0301 Straße"
    assert after.encode(text) == before.encode(text)
