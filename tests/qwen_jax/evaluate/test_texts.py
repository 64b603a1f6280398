"""Files of text and of ids become documents, or are refused by name."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.evaluate import read_documents

TEXT = "And Moses said\r\nunto Pharaoh: é"


def test_text_is_tokenised_as_it_is(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    (document,) = read_documents(tmp_path / "a.txt", tokenizer, 4096)
    assert document.tokens.tolist() == tokenizer.encode(TEXT)
    assert tokenizer.decode(document.tokens) == TEXT


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_ids_of_any_integer_dtype(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.array([5, 4095, 0], dtype))
    (document,) = read_documents(tmp_path / "a.npy", None, 4096)
    assert (document.tokens.tolist(), document.tokens.dtype) == ([5, 4095, 0], np.int32)


def test_rows_and_lines_are_documents(tmp_path, tokenizer):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, 4]]))
    assert [d.tokens.tolist() for d in read_documents(tmp_path / "a.npy", None, 9)] == [
        [1, 2],
        [3, 4],
    ]
    lines = [[1, 2, 3], {"tokens": [4]}, {"text": "Moses"}]
    (tmp_path / "a.jsonl").write_text("\n".join([*map(json.dumps, lines), ""]))
    documents = read_documents(tmp_path / "a.jsonl", tokenizer, 4096)
    assert [d.tokens.tolist() for d in documents] == [[1, 2, 3], [4], tokenizer.encode("Moses")]
    assert documents[1].name.endswith("a.jsonl line 2")
    for name in ("a.npy", "a.jsonl"):
        (tmp_path / f"{name}.xz").write_bytes(lzma.compress((tmp_path / name).read_bytes()))
    packed = read_documents(tmp_path / "a.jsonl.xz", tokenizer, 4096)
    assert [d.tokens.tolist() for d in packed] == [d.tokens.tolist() for d in documents]
    packed = read_documents(tmp_path / "a.npy.xz", None, 9)
    assert [d.tokens.tolist() for d in packed] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8: byte 0xff at 0"),
        ("a.txt", b"", "holds no token"),
        ("a.npy", b"no array", "not a .npy file"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.jsonl", b"[]", "line 1 holds no token"),
        ("a.jsonl", b"[1]\n3", "line 2 holds 3"),
        ("a.jsonl", b"[1.5]", "holds float64 values"),
        ("a.jsonl", b"[[1]]", "accepted are token ids"),
        ("a.jsonl", b"[1, [2]]", "lists of unequal length"),
        ("a.jsonl", b'{"tokens": "abc"}', "holds 'abc'"),
        ("a.jsonl", b'{"ids": [1]}', 'accepted is one of "tokens"'),
        ("a.jsonl", b'{"text": "a", "tokens": [1]}', 'accepted is one of "tokens"'),
        ("a.jsonl", b'{"text": 3}', "text is 3"),
        ("a.jsonl", b'\n{"text": "a \\ud800"}', r"line 2: .*lone surrogate U\+D800"),
        ("a.jsonl", b"[1, 4096]", "id 4096 at 1 is outside the vocabulary; accepted are 0 to 4095"),
        ("a.jsonl", b"[-1]", "id -1 at 0"),
    ],
)
def test_refusals(tmp_path, tokenizer, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RequestError, match=words):
        read_documents(tmp_path / name, tokenizer, 4096)


def test_missing_files_arrays_of_other_shapes_and_text_without_tokenizer(tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        read_documents(tmp_path / "none.txt", None, 9)
    np.save(tmp_path / "a.npy", np.zeros((1, 2, 3), np.int32))
    with pytest.raises(RequestError, match=r"\(1, 2, 3\)"):
        read_documents(tmp_path / "a.npy", None, 9)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(RequestError, match="has no tokenizer; give token ids"):
        read_documents(tmp_path / "a.txt", None, 9)
