"""A small folder to write in tests, and the means to read its bytes again."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.writing import OutputTensor, Written, write_folder
from convert.writing.work import Finish
from qwen_jax.errors import CheckpointError

SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
CODES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}
Arrays = dict[str, np.ndarray]


def random_arrays() -> Arrays:
    """Tensors of several dtypes and shapes, with names that a JSON writer may trip over."""
    rng = np.random.default_rng(1)
    return {
        "a.weight": rng.integers(0, 256, (7, 5), np.uint8),
        'b "quoted" ü.weight': rng.standard_normal((33, 3)).astype(ml_dtypes.bfloat16),
        "c.fp8": rng.standard_normal((13, 11)).astype(ml_dtypes.float8_e4m3fn),
        "d.scalar": np.array(1.5, np.float32),
        "e.empty": np.zeros((0, 4), ml_dtypes.bfloat16),
        "f.large": rng.standard_normal((50, 40)).astype(np.float32),
        "g.odd": rng.integers(-9, 9, (3,), np.int32),
    }


def tensor(key: str, array: np.ndarray, rows: int = 9) -> OutputTensor:
    """An array as a tensor to be written, in chunks of some rows."""

    def chunks() -> Iterator[np.ndarray]:
        if not array.shape:
            yield array
            return
        for start in range(0, len(array), rows):
            yield array[start : start + rows]

    return OutputTensor(key, CODES[array.dtype], array.shape, chunks)


def three_shards(arrays: Arrays) -> list[list[OutputTensor]]:
    """The arrays as three shards of two or three tensors."""
    tensors = [tensor(key, array) for key, array in arrays.items()]
    return [tensors[:3], tensors[3:5], tensors[5:]]


def finish(folder: Path, checksums: Mapping[str, str], remarks: Mapping[str, Any]) -> None:
    """Writes a configuration and side files, one of them in a folder of its own."""
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a b c")
    (folder / "sums.json").write_text(json.dumps(dict(sorted(checksums.items()))))


def write(
    destination: Path,
    shards: Sequence[Sequence[OutputTensor]] | None = None,
    *,
    resume: bool = False,
    fingerprint: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
    finish: Finish = finish,
) -> Written:
    """`write_folder` with everything filled in."""
    return write_folder(
        destination,
        three_shards(random_arrays()) if shards is None else shards,
        fingerprint={"source": "x"} if fingerprint is None else fingerprint,
        metadata={"format": "pt"},
        index_metadata={"made_by": "a test"},
        finish=finish,
        resume=resume,
        progress=progress,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@functools.cache
def undisturbed() -> dict[str, bytes]:
    """Every file that `write` writes when nothing interrupts it."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "out")
        return contents(Path(folder) / "out")


def failing(error: BaseException, shard: int = 2) -> list[list[OutputTensor]]:
    """The usual shards, of which one raises an error after its first chunk."""
    shards = three_shards(random_arrays())
    whole = shards[shard][0]

    def chunks() -> Iterator[np.ndarray]:
        yield next(whole.chunks())
        raise error

    shards[shard][0] = OutputTensor(whole.key, whole.dtype, whole.shape, chunks)
    return shards


def interrupt(destination: Path, shard: int = 2) -> None:
    """Writes until the source turns out to be damaged, in one of the three shards."""
    with pytest.raises(CheckpointError, match="damaged"):
        write(destination, failing(CheckpointError("damaged"), shard))


def sha256(array: np.ndarray) -> str:
    """Checksum of an array's bytes."""
    return hashlib.sha256(array.tobytes()).hexdigest()
