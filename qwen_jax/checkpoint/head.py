"""Whether a tied model's folder has an output head of its own after all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .keys import HEAD
from .mapping import EMBEDDING
from .problems import show
from .safetensors_io import TensorFolder

if TYPE_CHECKING:
    from ..config import QwenConfig

_COMPARED_ROWS = 4096


def decide_head(
    folder: TensorFolder, config: QwenConfig, found: Mapping[str, str]
) -> tuple[QwenConfig, set[str]]:
    """Decides between the configuration's tie_word_embeddings and a head in the file.

    Args:
        folder: the opened folder.
        config: its configuration.
        found: keys of the folder by tree path.

    Returns:
        The configuration as the file's head wants it, and the key of a head that is the embedding
        once more.

    Warns:
        UserWarning: the configuration says tied, but the head in the file differs and is used.
    """
    if not config.tie_word_embeddings or HEAD not in found:
        return config, set()
    if EMBEDDING in found and _same(folder, found[HEAD], found[EMBEDDING]):
        return config, {found[HEAD]}
    warnings.warn(
        f"{folder.path}: the configuration says tie_word_embeddings true, but "
        f"{show(found[HEAD])} differs from the embedding; the head in the file is used",
        stacklevel=4,
    )
    return replace(config, tie_word_embeddings=False), set()


def _same(folder: TensorFolder, first: str, second: str) -> bool:
    """Compares two tensors bit for bit, a few rows at a time."""
    a, b = folder.tensors[first], folder.tensors[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape) or len(a.shape) != 2:
        return False
    for start in range(0, a.shape[0], _COMPARED_ROWS):
        rows = slice(start, start + _COMPARED_ROWS)
        left, right = (folder.read(key, rows).view(np.uint8) for key in (first, second))
        if not np.array_equal(left, right):
            return False
    return True
