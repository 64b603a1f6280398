"""What the tensors of an adapter file are held against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.checkpoint.tensors import StoredTensor

from .keys import AdapterKey
from .settings import AdapterSettings

NO_TENSOR = "match no tensor of the model"
CANNOT = "cannot be merged"
LACKING = "incomplete"
MISSHAPEN = "misshapen"


@dataclass(frozen=True)
class Inputs:
    """An adapter file, its settings, the model, and the faults found so far.

    Attributes:
        folder: the adapter file.
        settings: its settings.
        known: every tensor of the model in every layout, by key without a prefix.
        problems: receives everything that does not fit.
    """

    folder: TensorFolder
    settings: AdapterSettings
    known: Mapping[str, StoredTensor]
    problems: Problems

    def shape(self, key: AdapterKey) -> tuple[int, ...]:
        """The shape of a tensor of the file."""
        return self.folder.tensors[key.key].shape

    def read(self, key: AdapterKey) -> np.ndarray:
        """A tensor of the file, as a view of it; nothing is read yet."""
        return self.folder.read(key.key)

    def fits(self, key: AdapterKey, expected: tuple[int, ...], note: str = "") -> bool:
        """Whether a tensor of the file has a shape; reports it if not."""
        shape = self.shape(key)
        if shape != expected:
            text = f"{show(key.key)} has shape {list(shape)}, expected {list(expected)}{note}"
            self.problems.add(MISSHAPEN, text)
        return shape == expected
