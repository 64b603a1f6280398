"""Log-probabilities of a base model in a file, so that the base runs once for many comparisons."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from ..checkpoint.safetensors_io import open_folder
from ..errors import RequestError
from ..text import Tokenizer
from .perplexity import nll
from .scores import Scores, padded, row_slices
from .windows import Windows

FORMAT = "qwen-jax base log-probabilities"
FORMAT_VERSION = "2"
_NAME = "log_probabilities"
_HASHED_AT_ONCE = 4
_MEANINGS = {
    "model": "the digest of the base's files",
    "dtype": "the base's dtype",
    "tokens": "the digest of text and windows",
    "vocabulary": "the vocabulary",
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """What log-probabilities are of; all of it is compared before stored ones are used.

    Attributes:
        model: `model_digest` of the base's folder.
        dtype: that the base ran in.
        tokens: digest of the windows.
        vocabulary: size of the vocabulary, and digest of the tokenizer's entries or "no tokenizer".
    """

    model: str
    dtype: str
    tokens: str
    vocabulary: str

    @classmethod
    def of(
        cls,
        folder: Path,
        dtype: str,
        windows: Windows,
        tokenizer: Tokenizer | None,
        vocab_size: int,
    ) -> Origin:
        """Reads all weights of the folder, to hash them."""
        entries = "no tokenizer"
        if tokenizer is not None:
            vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
            entries = _sha256(json.dumps(vocabulary, sort_keys=True))
        return cls(model_digest(folder), dtype, windows.digest, f"{vocab_size} {entries}")


def model_digest(folder: Path) -> str:
    """SHA-256 over the SHA-256 of config.json and of every file that holds weights.

    Raises:
        CheckpointError: the folder is not that of a model.
    """
    names = ["config.json", *open_folder(folder).shards]

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        return _sha256("\n".join(pool.map(digest, names)))


def store(
    path: Path, scores: Iterable[Scores], origin: Origin, windows: Windows, vocab_size: int
) -> None:
    """Write the log-probabilities of all scored tokens, as a safetensors file.

    They are float32, [scored tokens, V], and written as they come. A file that is not complete
    never has the final name.

    Args:
        path: a file that does not exist yet.
        scores: from `score`.
        origin: what they are of.
        windows: what they are over.
        vocab_size: V.

    Raises:
        RequestError: the disk has no room for them, or another command is writing the file.
        OSError: the file cannot be written.
        FloatingPointError: NaN or infinite logits.
    """
    refuse_unless_room(path, windows, vocab_size)
    partial = path.with_name(f"{path.name}.partial")
    try:
        file = partial.open("xb")
    except FileExistsError:
        raise RequestError(
            f"{partial} exists: another command is writing it, or was stopped; delete it if none is"
        ) from None
    digest = hashlib.sha256()
    try:
        with file:
            # The digest is known at the end; until then as many other characters are in its place.
            file.write(_header(origin, windows, vocab_size, "0" * 64))
            for part in scores:
                nll(part, "base")
                rows = _bytes(np.asarray(part.log_probabilities)[: len(part.targets)])
                digest.update(rows)
                file.write(rows)
            file.seek(0)
            file.write(_header(origin, windows, vocab_size, digest.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def stored_bytes(windows: Windows, vocab_size: int) -> int:
    """Bytes of the log-probabilities in a file."""
    return windows.scored * vocab_size * 4


def refuse_unless_room(path: Path, windows: Windows, vocab_size: int) -> None:
    """Raise `RequestError` if there is no such folder, or its disk has no room for the file."""
    if not path.parent.is_dir():
        raise RequestError(f"{path.parent} is not a folder; give a file in one that exists")
    needed, free = stored_bytes(windows, vocab_size), shutil.disk_usage(path.parent).free
    if needed > free:
        raise RequestError(
            f"the log-probabilities need {needed / 1e9:.1f} GB, but the disk of {path} has "
            f"{free / 1e9:.1f} GB; give fewer windows, or another disk"
        )


def read(
    path: Path, origin: Origin, windows: Windows, vocab_size: int, batch_size: int
) -> Iterator[Scores]:
    """What `score` with the base model would yield, from a file.

    Raises:
        RequestError: the file is damaged, or not of this model, text, windows or vocabulary. Values
            with another checksum are told behind the last of them, so that they are read once.
    """
    digest = refuse_other(path, origin, (windows.scored, vocab_size))
    return _read(path, windows, batch_size, digest)


def _read(path: Path, windows: Windows, batch_size: int, digest: str) -> Iterator[Scores]:
    found = hashlib.sha256()
    with safe_open(path, framework="numpy") as file:
        stored, begin = file.get_slice(_NAME), 0
        for batch in windows.batches(batch_size):
            for rows in row_slices(batch):
                targets = batch.targets[rows]
                some = stored[begin : begin + len(targets)]
                found.update(_bytes(some))
                begin += len(targets)
                values = jnp.asarray(padded(some))
                yield Scores(values, targets, batch.numbers[rows], windows.describe)
    if found.hexdigest() != digest:
        raise RequestError(
            f"{path} is damaged: its log-probabilities have another checksum than when they were "
            "written; delete it to have them computed anew"
        )


def refuse_other(path: Path, origin: Origin, shape: tuple[int, int]) -> str:
    """Raise `RequestError` unless the file holds log-probabilities of this origin and shape.

    Returns:
        The SHA-256 of the log-probabilities, as the file says.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            stored = file.get_slice(_NAME) if _NAME in file.keys() else None
            found = None if stored is None else (tuple(stored.get_shape()), stored.get_dtype())
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path} is not a file of base log-probabilities ({error}); give another name, or "
            "delete it to have it written"
        ) from error
    advice = "give the command that wrote it, or another name to have them computed anew"
    kind = (metadata.get("format"), metadata.get("format_version"))
    if kind != (FORMAT, FORMAT_VERSION):
        raise RequestError(
            f"{path} is of format {kind[0]!r}, version {kind[1]!r}; accepted is {FORMAT!r}, "
            f"version {FORMAT_VERSION}; {advice}"
        )
    expected = dataclasses.asdict(origin)
    differing = [
        f"{_MEANINGS[name]} is {metadata.get(name)!r:.24} there, {value!r:.24} here"
        for name, value in expected.items()
        if metadata.get(name) != value
    ]
    if differing:
        raise RequestError(f"{path} does not fit: {'; '.join(differing)}; {advice}")
    if found != (shape, "F32"):
        raise RequestError(f"{path} holds {found}, but {shape} in F32 is needed; {advice}")
    return metadata.get("sha256", "")


def _header(origin: Origin, windows: Windows, vocab_size: int, digest: str) -> bytes:
    """The length and the text of a safetensors header; of one length for all digests."""
    content = {
        "__metadata__": {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "sha256": digest,
            **dataclasses.asdict(origin),
        },
        _NAME: {
            "dtype": "F32",
            "shape": [windows.scored, vocab_size],
            "data_offsets": [0, stored_bytes(windows, vocab_size)],
        },
    }
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(rows: np.ndarray) -> bytes:
    return rows.astype("<f4", copy=False).tobytes()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
