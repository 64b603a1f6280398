"""The tensors of a folder in codes: for some tensors of the tree, those of their codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from qwen_jax.checkpoint.header import DTYPES
from qwen_jax.checkpoint.keys import HEAD, MTP
from qwen_jax.checkpoint.mapping import EMBEDDING, Layout
from qwen_jax.checkpoint.tensors import stored_tensors
from qwen_jax.config import QwenConfig
from qwen_jax.quant import Scheme, TensorScheme, abstract_qtensor

from ..writing import OutputTensor

NATIVE = Layout()

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LAYER = re.compile(r"layers\.(\d+)\.")


class Maker(Protocol):
    """What makes tensors in codes, when they are written."""

    def chunks(self, path: str, part: str) -> Iterator[np.ndarray]:
        """Yields one of the parts of a tensor, as `TensorScheme.parts` names them."""
        ...

    def remark(self, path: str) -> dict[str, Any]:
        """What is reported of a tensor whose codes were made."""
        ...


def output_tensors(
    config: QwenConfig,
    mtp_layers: int,
    tree: Mapping[str, jax.ShapeDtypeStruct],
    scheme: Scheme,
    *,
    kept: Callable[[str], Iterator[np.ndarray]],
    maker: Callable[[str], Maker],
) -> list[OutputTensor]:
    """Lists the tensors to be written, in the order in which layers are solved.

    Embedding first, then the layers, final norm and head, and the multi-token prediction head; each
    of these is a part of its own, so that its shards are finished before the next one is begun.

    Args:
        config: of the model.
        mtp_layers: layers of the multi-token prediction head.
        tree: shape of each tensor by tree path, and dtype of those that are not in codes.
        scheme: of those that are.
        kept: yields a tensor that stays, by its key; called when it is written.
        maker: gives what makes a tensor in codes, by tree path; likewise.
    """
    stored = stored_tensors(config, NATIVE, mtp_layers)
    keys = {tensor.pieces[0].path: key for key, tensor in stored.items()}
    found = []
    for path in sorted(keys, key=_place):
        if path in scheme.tensors:
            shape = tree[path].shape
            found += _coded(path, keys[path], shape, scheme.tensors[path], maker)
            continue
        leaf = tree[path]
        code = _CODES[np.dtype(leaf.dtype)]
        key = keys[path]
        found.append(OutputTensor(key, code, leaf.shape, partial(kept, key), part_of(path)))
    return found


def _coded(
    path: str,
    key: str,
    shape: tuple[int, ...],
    scheme: TensorScheme,
    maker: Callable[[str], Maker],
) -> list[OutputTensor]:
    stored = abstract_qtensor(shape, scheme)
    found = []
    for part in scheme.parts:
        leaf = getattr(stored, part)
        found.append(
            OutputTensor(
                f"{key}.{part}",
                _CODES[np.dtype(leaf.dtype)],
                leaf.shape,
                lambda part=part: maker(path).chunks(path, part),
                part_of(path),
                (lambda: maker(path).remark(path)) if part == "codes" else None,
            )
        )
    return found


def part_of(path: str) -> str:
    """Which part of the model a tree path belongs to; parts are written one after the other."""
    if path == EMBEDDING:
        return "embedding"
    if path.startswith(MTP):
        return "mtp"
    match = _LAYER.match(path)
    return f"layer {match[1]}" if match else "head"


def path_of_codes(key: str) -> str:
    """The tree path of the tensor whose codes have a key."""
    path = key.removesuffix(".codes")
    return path if path == HEAD or path.startswith(MTP) else path.removeprefix(NATIVE.prefix)


def _place(path: str) -> tuple[int, int]:
    """Where a tensor comes in the order of writing; `sorted` keeps the tree's within a part."""
    match = _LAYER.match(path)
    if match:
        return 1, int(match[1])
    return (0 if path == EMBEDDING else 3 if path.startswith(MTP) else 2), 0
