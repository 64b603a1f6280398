"""Incremental text equals the text of all ids at once, and no piece ends inside a character."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen_jax.text
from qwen_jax.text import Detokenizer, Tokenizer

DEMO = Path(qwen_jax.text.__path__[0]).parent / "demo"
EMOJI = "🧑‍🚀"  # three characters of 4, 3 and 4 bytes


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo()


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token for each byte."""
    ids = {tokenizer.token_bytes(i): i for i in range(300)}
    return [ids[bytes([byte])] for byte in data]


def pieces(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


# Single bytes (ids below 256) meet often; special tokens and ids of no token are among the rest.
IDS = st.lists(st.one_of(st.integers(0, 255), st.integers(0, 4200), st.integers(4080, 4100)))


@cache
def demo() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    return tokenizer


@given(IDS, st.booleans())
def test_pieces_join_to_what_the_library_decodes(ids: list[int], skip: bool) -> None:
    tokenizer = demo()
    joined = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
    assert joined == tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.text())
def test_valid_text_never_shows_half_a_character(text: str) -> None:
    tokenizer = demo()
    ids = ids_of_bytes(tokenizer, text.encode())
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == text
    ends = {len(text[:n].encode()) for n in range(len(text) + 1)}
    done = 0
    for count, piece in enumerate(shown[:-1], 1):
        done += len(piece.encode())
        assert done == max(end for end in ends if end <= count)
    assert shown[-1] == ""


def test_cut_off_character_becomes_one_mark_at_the_end(tokenizer: Tokenizer) -> None:
    ids = ids_of_bytes(tokenizer, EMOJI.encode())
    for length in range(len(ids)):
        shown = pieces(tokenizer, ids[:length])
        assert "".join(shown) == EMOJI.encode()[:length].decode(errors="replace")
        assert "\ufffd" not in "".join(shown[:-1])


def test_invalid_byte_is_marked_as_soon_as_it_is_certain(tokenizer: Tokenizer) -> None:
    ids = ids_of_bytes(tokenizer, b"a\xffb\xf0\x9fc\xed\xa0\x80d")
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.add(i) for i in ids]
    assert shown[:6] == ["a", "\ufffd", "b", "", "", "\ufffdc"]
    assert "".join(shown) == "a\ufffdb\ufffdc\ufffd\ufffd\ufffdd"


def test_added_tokens_are_spelled_as_the_library_spells_them(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, tmp_path / name)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    # The last two are spelled in GPT-2's characters for the bytes 0xE9 and 0x20.
    for token_id, token in enumerate(["<|two words|>", "日本", "éé", "ĠqzĠ"], 4096):
        config["added_tokens_decoder"][str(token_id)] = {"content": token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None and tokenizer.vocab_size == 4100
    for first in range(4090, 4101):
        for second in (*range(4090, 4101), 161, 220):
            ids = [first, second]
            assert "".join(pieces(tokenizer, ids)) == tokenizer.backend.decode(
                ids, skip_special_tokens=False
            )


def test_each_token_is_looked_up_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = []
    token_bytes = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda i: looked_up.append(i) or token_bytes(i))
    monkeypatch.setattr(tokenizer, "backend", None)
    monkeypatch.setattr(tokenizer, "id_to_token", {5: "&", 6: "'"}.get)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add(i) for i in (5, 6, 5)] == ["&", "'", "&"]
    assert looked_up == [5, 6, 5]


def test_takes_numpy_ids_and_begins_anew_after_finish(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    ids = np.array([4090, *ids_of_bytes(tokenizer, "é".encode())], np.int32)
    assert [detokenizer.add(i) for i in ids] == ["", "", "é"]
    assert detokenizer.add(ids[1]) == "" and detokenizer.finish() == "\ufffd"
    assert [detokenizer.add(i) for i in ids[1:]] == ["", "é"]
    assert detokenizer.finish() == ""
