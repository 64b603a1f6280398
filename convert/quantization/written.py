"""Codes read again from the shards that a run has finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from qwen_jax.checkpoint.header import TensorInfo, read_header
from qwen_jax.checkpoint.keys import speller
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from ..methods import Codes, dequantise
from .choice import Choice
from .packed import unpacked
from .tensors import NATIVE


class WrittenCodes:
    """The codes in a work folder, as far as it has got.

    Args:
        work: the folder; a shard has its name there when it is complete.
        choice: what is in codes.
    """

    def __init__(self, work: Path, choice: Choice) -> None:
        self._work, self._choice = work, choice
        self._key = speller(NATIVE.prefix)

    def read(self, paths: list[str]) -> dict[str, Array] | None:
        """What tensors stand for, float32, by tree path; None if one is not there yet."""
        folder = TensorFolder(self._work, self._tensors(), ())
        found = {}
        for path in paths:
            scheme, key = self._choice.scheme.tensors[path], self._key(path)
            if any(f"{key}.{part}" not in folder.tensors for part in scheme.parts):
                return None
            arrays = {part: folder.read(f"{key}.{part}") for part in scheme.parts}
            values = unpacked(arrays["codes"], self._choice.tree[path].shape[-1])
            codes = Codes(jnp.asarray(values), _wide(arrays["scale"]), _wide(arrays.get("zero")))
            factor = arrays.get("input_scale")
            wide = dequantise(codes, scheme.format)
            found[path] = wide if factor is None else wide * jnp.asarray(factor)[..., None, :]
        return found

    def _tensors(self) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for file in sorted(self._work.glob("model-*.safetensors")):
            try:
                found |= read_header(file, file.name)
            except CheckpointError:
                continue  # it is being replaced; what it holds is not there yet
        return found


def _wide(array: np.ndarray | None) -> Any:
    return None if array is None else jnp.asarray(array.astype(np.float32))
