"""The tokenizer of a folder: ids as transformers gives them, and damaged folders named."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen_jax.text
from qwen_jax.errors import CheckpointError, RequestError
from qwen_jax.text import Detokenizer, Tokenizer

DEMO = Path(qwen_jax.text.__path__[0]).parent / "demo"
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tokens.json").read_text("utf-8"))
THINK, IM_START, IM_END = 4092, 4090, 4091


@cache
def demo() -> Tokenizer:
    return load(DEMO)


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return demo()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, tmp_path / name)
    return tmp_path


def edit(
    folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "tokenizer_config.json"
):
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))


def test_special_tokens_in_the_text_are_recognised_and_none_is_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("") == []
    ids = tokenizer.encode("<|im_start|>user\n<think></think><|im_end|>")
    assert ids[0] == IM_START and ids[-3:] == [THINK, THINK + 1, IM_END]
    assert tokenizer.decode(ids) == "<|im_start|>user\n<think></think><|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n<think></think>"


@pytest.mark.parametrize("row", GOLDEN["strings"], ids=lambda row: ascii(row["text"][:20]))
def test_ids_and_texts_are_those_of_transformers(tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    assert tokenizer.encode(row["text"]) == row["ids"]
    for skip, text in ((False, row["decoded"]), (True, row["decoded_no_special"])):
        assert tokenizer.decode(row["ids"], skip_special_tokens=skip) == text
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join([*map(detokenizer.add, row["ids"]), detokenizer.finish()]) == text


def test_the_demo_knows_its_own_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 4096
    assert tokenizer.eos_token_ids == (IM_END,)
    assert tokenizer.special_ids == {4089, 4090, 4091}
    assert tokenizer.id_to_token(THINK) == "<think>" and tokenizer.token_to_id("<think>") == THINK
    assert tokenizer.id_to_token(259) == "Ġth" and tokenizer.token_bytes(259) == b" th"
    assert tokenizer.id_to_token(4096) is None and tokenizer.id_to_token(-1) is None
    assert tokenizer.token_bytes(4096) == b"" and tokenizer.token_to_id("no such token") is None


def test_flags_of_the_configuration_win(folder: Path) -> None:
    # U+0338 joins ">" when the text is normalised, so only the raw text has the token in it.
    assert THINK in load(folder).encode("a<think>\u0338b")
    (folder / "tokenizer_config.json").unlink()
    without = load(folder)
    assert THINK not in without.encode("a<think>\u0338b")
    assert without.eos_token_ids == () and not without.has_chat_template


def test_a_token_can_be_declared_special_or_not(folder: Path) -> None:
    edit(folder, lambda c: c["added_tokens_decoder"]["4090"].update(special=False))
    edit(folder, lambda c: c["added_tokens_decoder"]["4092"].update(special=True))
    tokenizer = load(folder)
    assert tokenizer.special_ids == {4089, 4091, 4092}
    assert tokenizer.decode([4090, 4091, 4092, 5], skip_special_tokens=True) == "<|im_start|>&"


@pytest.mark.parametrize("eos", ["<think>", {"__type": "AddedToken", "content": "<think>"}])
def test_a_named_token_is_special(folder: Path, eos: object) -> None:
    edit(folder, lambda c: c.update(eos_token=eos))
    tokenizer = load(folder)
    assert tokenizer.eos_token_ids == (THINK,) and THINK in tokenizer.special_ids


def test_a_plain_entry_of_the_vocabulary_can_be_the_end(folder: Path) -> None:
    edit(folder, lambda c: c.update(eos_token="th"))
    tokenizer = load(folder)
    assert tokenizer.eos_token_ids == (257,) and tokenizer.vocab_size == 4096
    assert tokenizer.decode([257, 5], skip_special_tokens=True) == "&"


def test_a_token_declared_only_in_the_configuration_is_added(folder: Path) -> None:
    edit(folder, lambda c: c["added_tokens_decoder"].update({"4096": {"content": "<extra>"}}))
    tokenizer = load(folder)
    assert tokenizer.vocab_size == 4097
    assert tokenizer.encode("a<extra>b")[1] == 4096


def test_saved_truncation_and_padding_are_off(folder: Path) -> None:
    limits = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    edit(folder, lambda t: t.update(truncation=limits), "tokenizer.json")
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    edit(folder, lambda t: t.update(padding=padding), "tokenizer.json")
    assert len(load(folder).encode("0123456789")) == 10


def test_split_special_tokens_reads_them_as_text(folder: Path) -> None:
    edit(folder, lambda c: c.update(split_special_tokens=True))
    assert IM_START not in load(folder).encode("<|im_start|>")


@given(st.text())
def test_encode_then_decode_normalises_and_nothing_else(text: str) -> None:
    tokenizer = demo()
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@given(st.lists(st.integers(0, 255)))
def test_bytes_that_are_no_text_decode_as_in_python(ids: list[int]) -> None:
    tokenizer = demo()
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert len(data) == len(ids)
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_single_byte_tokens_cover_all_bytes(tokenizer: Tokenizer) -> None:
    assert {tokenizer.token_bytes(i) for i in range(256)} == {bytes([byte]) for byte in range(256)}


def test_decode_takes_arrays_and_leaves_out_ids_of_no_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(np.array([5, 4096, 6, 2**40])) == "&'"
    for ids in ([5, -1], [1.5], 5, ["5"]):
        with pytest.raises(RequestError):
            tokenizer.decode(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a\udcffb", "\ud800", b"bytes", None])
def test_encode_refuses_what_is_no_text(tokenizer: Tokenizer, text: Any) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D|of type"):
        tokenizer.encode(text)


def test_no_tokenizer_is_none_but_no_folder_is_an_error(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None
    with pytest.raises(CheckpointError, match="not a folder"):
        Tokenizer.from_folder(tmp_path / "missing")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", LFS),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"model": {}}'),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{,"),
        ("tokenizer_config.json", b'{"eos_token": 7}'),
        ("tokenizer_config.json", b'{"eos_token": "<no such token>"}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"7": "y"}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"7": {"content": "<think>"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"5000": {"content": "<far>"}}}'),
        ("tokenizer_config.json", b'{"chat_template": 1}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.json", b"{}"),
    ],
)
def test_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    if name == "chat_template.json":
        edit(folder, lambda c: c.pop("chat_template"))
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_folder(folder)


def test_dangling_link_is_no_missing_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_other_decoders_are_refused(folder: Path) -> None:
    edit(folder, lambda t: t.update(decoder={"type": "Fuse"}), "tokenizer.json")
    with pytest.raises(CheckpointError, match="Fuse; only ByteLevel"):
        Tokenizer.from_folder(folder)


def test_where_the_chat_template_is_found(folder: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    edit(folder, lambda c: c.update(chat_template="from config"))
    assert load(folder).apply_chat_template(chat) == "from config"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert load(folder).apply_chat_template(chat) == "from jinja"
    (folder / "chat_template.jinja").unlink()
    edit(folder, lambda c: c.pop("chat_template"))
    assert load(folder).apply_chat_template(chat) == "from json"


def test_named_chat_templates(folder: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit(folder, lambda c: c.update(chat_template=named))
    assert load(folder).apply_chat_template(chat) == "plain"
    assert load(folder).apply_chat_template(chat, tools=[{"name": "f"}]) == "tools"
    edit(folder, lambda c: c.update(chat_template=named[1:]))
    with pytest.raises(RequestError, match=r"\['tool_use'\], none 'default'"):
        load(folder).apply_chat_template(chat)


def test_without_template_the_way_on_is_named(folder: Path) -> None:
    edit(folder, lambda c: c.pop("chat_template"))
    tokenizer = load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="give a plain prompt instead of messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
