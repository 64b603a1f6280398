from __future__ import annotations

import json
import lzma

import numpy as np
import pytest

from convert.calibration_text import read_calibration
from qwen_jax.errors import RequestError
from qwen_jax.text import Tokenizer

TEXT = "In the beginning God created the heaven and the earth. " * 8


def test_text_plain_and_compressed_gives_the_same_windows(tmp_path, tokenizer):
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.xz"
    plain.write_text(TEXT, encoding="utf-8")
    packed.write_bytes(lzma.compress(TEXT.encode()))
    windows = read_calibration([plain], tokenizer, 4096, window=16, windows=4)
    assert windows.shape == (4, 16) and windows.dtype == np.int32
    np.testing.assert_array_equal(
        windows, read_calibration([packed], tokenizer, 4096, window=16, windows=4)
    )
    ids = tokenizer.encode(TEXT)
    assert windows[0].tolist() == ids[:16] and windows[-1].tolist() == ids[-16:]


def test_token_files_need_no_tokenizer_and_are_joined(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(10, 20).reshape(2, 5))
    (tmp_path / "c.jsonl").write_text('{"tokens": [20, 21]}\n\n{"tokens": [22, 23]}\n')
    paths = [tmp_path / name for name in ("a.npy", "b.npy", "c.jsonl")]
    windows = read_calibration(paths, None, 24, window=8, windows=9)
    np.testing.assert_array_equal(windows, np.arange(24).reshape(3, 8))


def test_messages_go_through_the_chat_template(tmp_path, demo_path):
    plain = Tokenizer.from_folder(demo_path)
    assert plain is not None
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = Tokenizer(plain.backend, chat_templates={"default": template})
    messages = [{"role": "user", "content": TEXT}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    windows = read_calibration([path], tokenizer, 4096, window=16, windows=1)
    assert windows[0].tolist() == plain.encode(f"<|im_start|>{TEXT}<|im_end|>")[:16]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"short", ["a.txt", "tokens", "32"]),
        ("a.txt.xz", b"no archive", ["a.txt.xz", "cannot be read"]),
        ("a.jsonl", b'{"messages": 3}', ["a.jsonl line 1"]),
        ("a.jsonl", b'{"tokens": [4096]}', ["4096", "4095", "tokenizer"]),
        ("missing.txt", None, ["missing.txt", "cannot be read"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, tokenizer, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        read_calibration([path], tokenizer, 4096, window=32)
    for word in words:
        assert word in str(caught.value)


def test_text_without_a_tokenizer_or_with_another_models_is_refused(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    with pytest.raises(RequestError, match="no tokenizer"):
        read_calibration([path], None, 4096)
    with pytest.raises(RequestError, match=r"4095.*another model's"):
        read_calibration([path], tokenizer, 1000)
    with pytest.raises(RequestError, match="no file holds 0 tokens"):
        read_calibration([], tokenizer, 4096)
    with pytest.raises(RequestError, match="window is 0"):
        read_calibration([path], tokenizer, 4096, window=0)


def test_a_template_without_chats_is_refused(tmp_path, tokenizer):
    """It would have no effect, without a word."""
    text, chats = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("Blessed are the meek.\n" * 4)
    message = {"role": "user", "content": "Who is blessed?"}
    chats.write_text(json.dumps({"messages": [message]}) + "\n")
    with pytest.raises(RequestError, match="holds no chat, so it has no effect"):
        read_calibration([text], tokenizer, 4096, window=4, chats=True)
    with_template = Tokenizer(
        tokenizer.backend, chat_templates={"default": "{{ messages[0].content }}"}
    )
    windows = read_calibration([text, chats], with_template, 4096, window=4, chats=True)
    assert windows.shape[1] == 4
