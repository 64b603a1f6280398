"""Weights of a source on their way to codes, read when they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from qwen_jax.checkpoint.assemble import assemble, release, runs, stored_dtype
from qwen_jax.checkpoint.parameters import abstract_parameters
from qwen_jax.checkpoint.plan import LoadPlan
from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.config import QwenConfig
from qwen_jax.model.decoder import DecoderLayer

RUN_BYTES = 64 << 20
# Sums of squares of so large weights, with those of their inputs, are still finite in float32.
LARGEST = 1e15


class Weights:
    """The tree tensors of a planned folder.

    Args:
        load: where each comes from.
    """

    def __init__(self, load: LoadPlan) -> None:
        self._load = load
        self._sources = {source.path: source for source in load.sources}

    def runs(self, path: str) -> Iterator[np.ndarray]:
        """Yields a tensor in its stored dtype, in runs of some `RUN_BYTES` along its first axis."""
        folder, source = self._load.folder, self._sources[path]
        dtype = stored_dtype(folder, source)
        for rows in runs(folder, source, RUN_BYTES):
            array = assemble(folder, source, dtype, rows)
            yield array
            del array
            release(folder, source, rows)

    def rows(self, path: str, numbers: np.ndarray) -> np.ndarray:
        """Single rows of a tensor, float32 [len(numbers), ...]."""
        folder, source = self._load.folder, self._sources[path]
        whole = assemble(folder, source, stored_dtype(folder, source))
        found = whole[numbers].astype(np.float32)
        release(folder, source)
        return found

    def whole(self, path: str) -> np.ndarray:
        """A whole tensor on the host, in its stored dtype; perhaps a view of the file."""
        folder, source = self._load.folder, self._sources[path]
        return assemble(folder, source, stored_dtype(folder, source))

    def on_device(self, path: str, dtype: np.dtype) -> Array:
        """A whole tensor on the default device."""
        parts = [jnp.array(run.astype(dtype, copy=False)) for run in self.runs(path)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def layer(self, number: int, config: QwenConfig) -> DecoderLayer:
        """A decoder layer with its weights, in the dtype of a configuration."""
        layer = DecoderLayer(config, number)
        self.fill(layer, f"layers.{number}.", config)
        return layer

    def fill(self, module: nnx.Module, place: str, config: QwenConfig) -> None:
        """Gives a fresh module its arrays.

        Args:
            module: holds shapes only.
            place: what stands before its paths in the tree.
            config: of the model that it is a part of.
        """
        targets = abstract_parameters(config)
        filled = []
        for path, variable in nnx.to_flat_state(nnx.state(module)):
            name = place + ".".join(map(str, path))
            variable.set_value(self.on_device(name, np.dtype(targets[name].dtype)))
            filled.append((path, variable))
        nnx.update(module, nnx.from_flat_state(filled))

    def refuse_bad(self) -> None:
        """Reads every tensor, and raises if a value is not finite, or larger than any model's.

        Raises:
            CheckpointError: names the tensors, and how many values of each.
        """
        problems = Problems()
        for path in self._sources:
            faults = Counter[str]()
            for run in self.runs(path):
                faults.update(_faults(run))
            found = ", ".join(f"{count} {kind}" for kind, count in faults.items() if count)
            if found:
                problems.add("not finite, or too large", f"{show(path)}: {found}")
        problems.raise_if_any(
            f"{self._load.folder.path} holds weights that no code stands for",
            "The folder is damaged, or its training went wrong: fetch it again, or use another.",
        )


def _faults(run: np.ndarray) -> dict[str, int]:
    """How many values no code stands for, by kind."""
    largest = np.asarray(min(LARGEST, float(jnp.finfo(run.dtype).max)), run.dtype)
    with np.errstate(invalid="ignore"):  # NaN is not below anything
        good = np.abs(run) <= largest
    if good.all():
        return {}
    nan, infinite = int(np.isnan(run).sum()), int(np.isinf(run).sum())
    large = good.size - int(good.sum()) - nan - infinite
    return {"NaN": nan, "infinite": infinite, f"beyond {LARGEST:g}": large}
