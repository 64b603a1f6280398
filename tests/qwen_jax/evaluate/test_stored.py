"""Stored log-probabilities stand in for the base, and for no other."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qwen_jax.errors import RequestError
from qwen_jax.evaluate import Windows, divergence, score
from qwen_jax.evaluate.stored import Origin, model_digest, read, store

ORIGIN = Origin("m", "float32", "t", "61 no tokenizer")


@pytest.fixture(scope="module")
def windows(random_text) -> Windows:
    return Windows([random_text(45)], window=20, stride=15)


@pytest.fixture
def file(tmp_path, sparse, windows):
    path = tmp_path / "base"
    store(path, score(sparse, windows, batch_size=2), ORIGIN, windows, 61)
    return path


def test_stored_scores_are_those_of_the_model(file, sparse, windows):
    stored = load_file(file)["log_probabilities"]
    assert (stored.shape, stored.dtype) == ((44, 61), np.float32)
    assert not file.with_name("base.partial").exists()
    base = read(file, ORIGIN, windows, 61, 2)
    assert divergence(base, score(sparse, windows, batch_size=2)).max_kl == 0
    # Any batch size reads the same rows.
    rows = [
        part.log_probabilities[: len(part.targets)] for part in read(file, ORIGIN, windows, 61, 1)
    ]
    assert (np.concatenate(rows) == stored).all()


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("model", "digest of the base's files is 'm' there, 'x' here"),
        ("dtype", "dtype is 'float32' there"),
        ("tokens", "digest of text and windows is 't' there"),
        ("vocabulary", "vocabulary is '61 no"),
    ],
)
def test_another_origin_is_refused(file, windows, field, words):
    with pytest.raises(RequestError, match=words):
        read(file, dataclasses.replace(ORIGIN, **{field: "x"}), windows, 61, 2)


def test_other_files_are_refused(tmp_path, file, windows):
    other = tmp_path / "other"
    save_file({"log_probabilities": np.zeros((44, 61), np.float32)}, other)
    with pytest.raises(RequestError, match="is of format None"):
        read(other, ORIGIN, windows, 61, 2)
    other.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(RequestError, match="not a file of base log-probabilities"):
        read(other, ORIGIN, windows, 61, 2)
    with pytest.raises(RequestError, match=r"holds \(\(44, 61\), 'F32'\), but \(44, 62\)"):
        read(file, ORIGIN, windows, 62, 2)


@pytest.mark.parametrize("place", [-4, -20 * 61 * 4, -44 * 61 * 4])
def test_a_changed_value_is_refused(file, sparse, windows, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    base = read(file, ORIGIN, windows, 61, 2)
    with pytest.raises(RequestError, match="damaged: its log-probabilities have another checksum"):
        divergence(base, score(sparse, windows, batch_size=2))


def test_the_checksum_is_that_of_the_values(file):
    with safe_open(file, framework="numpy") as opened:
        digest = opened.metadata()["sha256"]
    assert digest == hashlib.sha256(file.read_bytes()[-44 * 61 * 4 :]).hexdigest()


def test_nothing_is_left_of_a_run_that_failed(tmp_path, windows, sparse):
    path = tmp_path / "base"

    def failing():
        yield from score(sparse, windows, batch_size=2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store(path, failing(), ORIGIN, windows, 61)
    assert os.listdir(tmp_path) == []
    (tmp_path / "base.partial").touch()
    with pytest.raises(RequestError, match=r"base.partial exists"):
        store(path, iter(()), ORIGIN, windows, 61)


def test_nan_is_never_stored(tmp_path, windows, sparse):
    def broken():
        for part in score(sparse, windows, batch_size=2):
            yield dataclasses.replace(part, log_probabilities=part.log_probabilities * jnp.nan)

    with pytest.raises(FloatingPointError, match="base: NaN"):
        store(tmp_path / "base", broken(), ORIGIN, windows, 61)
    assert os.listdir(tmp_path) == []


def test_room_is_asked_for_first(tmp_path, windows, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RequestError, match=r"need 0\.0 GB, but the disk"):
        store(tmp_path / "base", iter(()), ORIGIN, windows, 61)
    with pytest.raises(RequestError, match="is not a folder"):
        store(tmp_path / "none" / "base", iter(()), ORIGIN, windows, 61)


def test_digest_of_a_model_sees_one_changed_byte(tmp_path, demo_path):
    folder = tmp_path / "demo"
    shutil.copytree(demo_path, folder)
    digest = model_digest(folder)
    assert digest == model_digest(demo_path)
    (weights,) = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = model_digest(folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert len({digest, changed, model_digest(folder)}) == 3
