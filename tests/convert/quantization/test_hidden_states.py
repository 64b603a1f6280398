"""Hidden states on the disk: what is not whole, or not this run's, counts as missing."""

from __future__ import annotations

import numpy as np
import pytest

from convert.quantization.hidden_states import KEPT, StateFolder
from qwen_jax.errors import CheckpointError


def states(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 5, 7), np.float32)


@pytest.fixture
def folder(tmp_path) -> StateFolder:
    return StateFolder(tmp_path / "out", {"source": "x"})


def same(first: np.ndarray, second: np.ndarray | None) -> bool:
    return second is not None and np.array_equal(first, second)


def test_the_last_few_are_kept_bit_for_bit(folder, tmp_path):
    for layer in range(1, 8):
        folder.save(layer, states(layer))
    again = StateFolder(tmp_path / "out", {"source": "x"})
    kept = range(8 - KEPT, 8)
    assert all(same(states(layer), again.load(layer)) for layer in kept)
    assert [again.load(layer) for layer in range(8 - KEPT)] == [None] * (8 - KEPT)
    assert len(list((tmp_path / "out.calibration").iterdir())) == KEPT
    again.clear()
    assert list(tmp_path.iterdir()) == []


def test_those_of_another_run_or_layer_are_not_taken(folder, tmp_path):
    folder.save(1, states(1))
    assert StateFolder(tmp_path / "out", {"source": "y"}).load(1) is None
    file = tmp_path / "out.calibration" / "hidden-00001.bin"
    file.rename(file.with_name("hidden-00002.bin"))
    assert folder.load(1) is folder.load(2) is None


@pytest.mark.parametrize("damage", ["cut", "bit", "header", "shape", "empty", "json"])
def test_damaged_ones_are_not_taken(folder, tmp_path, damage):
    folder.save(1, states(1))
    file = tmp_path / "out.calibration" / "hidden-00001.bin"
    content = bytearray(file.read_bytes())
    start = content.index(b"\n")
    match damage:
        case "cut":
            content = content[:-4]
        case "bit":
            content[-1] ^= 1
        case "header":
            content = content[start:]
        case "shape":
            content = content.replace(b"[3, 5, 7]", b"[3, 5, 99999999]")
        case "empty":
            content.clear()
        case "json":
            content[:1] = b"["
    file.write_bytes(content)
    assert folder.load(1) is None


def test_files_of_others_stay(folder, tmp_path):
    folder.save(1, states(1))
    (tmp_path / "out.calibration" / "notes").write_text("mine")
    folder.clear()
    assert [path.name for path in (tmp_path / "out.calibration").iterdir()] == ["notes"]


def test_a_place_that_cannot_be_written_is_named(folder, tmp_path):
    (tmp_path / "out.calibration").write_text("a file")
    with pytest.raises(CheckpointError, match=r"out\.calibration.*--resume"):
        folder.save(1, states(1))
