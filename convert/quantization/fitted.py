"""The tensors of a folder in codes, some of them with other codes than they have there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen_jax.checkpoint.assemble import stored_dtype
from qwen_jax.checkpoint.keys import speller
from qwen_jax.checkpoint.plan import LoadPlan

from ..outputs import copies
from ..writing import OutputTensor
from .tensors import NATIVE, output_tensors


class _Maker:
    """Gives tensors in codes: those that were packed anew, others as the source has them."""

    def __init__(self, load: LoadPlan, packed: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        self._load, self._packed = load, packed
        self._key = speller(NATIVE.prefix)

    def chunks(self, path: str, part: str) -> Iterator[np.ndarray]:
        """See `quantization.tensors.Maker`."""
        if path in self._packed:
            return iter((self._packed[path][part],))
        return self.kept(f"{self._key(path)}.{part}")

    def remark(self, path: str) -> dict[str, Any]:
        """Nothing: the report is made from the fit."""
        return {}

    def kept(self, key: str) -> Iterator[np.ndarray]:
        """A tensor of the source."""
        (tensor,) = copies(self._load.folder, [key])
        return tensor.chunks()


def fitted_tensors(
    load: LoadPlan, packed: Mapping[str, Mapping[str, np.ndarray]]
) -> list[OutputTensor]:
    """The tensors to be written, arranged as `quantize` arranges them.

    Args:
        load: where the tensors of the source are.
        packed: the parts of tensors with new codes, by tree path and name; others stay.
    """
    maker = _Maker(load, packed)
    tree = {
        source.path: jax.ShapeDtypeStruct(
            source.shape,
            # Of one in codes, only the shape is looked at.
            jnp.bfloat16 if source.scheme else stored_dtype(load.folder, source),
        )
        for source in load.sources
    }
    return output_tensors(
        load.config,
        load.mtp_layers,
        tree,
        load.scheme,
        kept=maker.kept,
        maker=lambda path: maker,
    )
