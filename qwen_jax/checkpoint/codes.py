"""Tensors in codes as folders hold them: `KEY.codes`, `KEY.scale` and what else a scheme says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from ..errors import CheckpointError
from ..quant.abstract import abstract_qtensor, why_not
from ..quant.scheme import Scheme, TensorScheme
from .header import DTYPES
from .keys import MTP
from .plan import Source
from .problems import Problems, show
from .safetensors_io import TensorFolder
from .tensors import StoredTensor, TreeTensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def compare_codes(
    folder: TensorFolder,
    stored: Sequence[StoredTensor],
    scheme: Scheme,
    tree: Mapping[str, TreeTensor],
    problems: Problems,
) -> tuple[Scheme, set[str]]:
    """Reports tensors that a scheme names, and the folder lacks or has otherwise.

    Args:
        folder: the folder.
        stored: the tensors of a folder without codes.
        scheme: what `config.json` says.
        tree: the tensors of the model.
        problems: told what is wrong.

    Returns:
        The scheme of the tensors in the tree, and the keys that belong to them.
    """
    absent = [path for path in scheme.tensors if path not in tree]
    # A multi-token prediction head that is not loaded is no fault.
    problems.add(
        "named by quantization_config, but not in the model",
        *(show(path) for path in absent if not path.startswith(MTP)),
    )
    here = {path: how for path, how in scheme.tensors.items() if path in tree}
    used: set[str] = set()
    for tensor in stored:
        path = next((piece.path for piece in tensor.pieces if piece.path in here), None)
        if path is None:
            continue
        if any(piece.expert is not None or piece.path != path for piece in tensor.pieces):
            text = f"{show(tensor.key)} holds {show(path)}, which quantization_config has in codes"
            problems.add("in another layout than the tree's", text)
            used.add(tensor.key)
            continue
        how = here[path]
        if fault := why_not(path, tensor.shape, how.format.group_size):
            problems.add("quantization_config", fault)
            continue
        used |= compare_parts(folder, tensor, how, problems)
    return dataclasses.replace(scheme, tensors=here), used


def read_codes(folder: TensorFolder, source: Source) -> dict[str, np.ndarray]:
    """The arrays of a tensor in codes, as read-only views of the file.

    Args:
        folder: the folder that the source was planned for.
        source: one with a scheme.

    Raises:
        CheckpointError: a scale or factor is zero, NaN or infinite, or a zero point is no number.
    """
    assert source.scheme is not None  # the caller has asked
    arrays = {part: folder.read(f"{source.pieces[0].key}.{part}") for part in source.scheme.parts}
    for part, array in arrays.items():
        refuse_unusable(folder.path, f"{source.pieces[0].key}.{part}", part, array)
    return arrays


def refuse_unusable(path: Path, key: str, part: str, array: np.ndarray) -> None:
    """Raises if numbers of a tensor in codes make no sense.

    Args:
        path: the folder, for the message.
        key: of the array.
        part: what it is of the tensor.
        array: some of it.

    Raises:
        CheckpointError: a scale or factor is zero, NaN or infinite, or a zero point is no number.
    """
    if part == "codes":
        return
    if wrong := _count_unusable(array, zero_is=part != "zero"):
        what = "NaN or infinite" if part == "zero" else "zero, NaN or infinite"
        raise CheckpointError(
            f"{path}: {wrong} of the {array.size} numbers in {show(key)} are {what}; the weights "
            "are damaged: fetch them again, or quantise the original again"
        )


def parts_of(like: object) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of an abstract tensor in codes that it has, by name."""
    names = ("codes", "scale", "zero", "input_scale")
    return {name: leaf for name in names if (leaf := getattr(like, name)) is not None}


def compare_parts(
    folder: TensorFolder, tensor: StoredTensor, how: TensorScheme, problems: Problems
) -> set[str]:
    """Reports parts of a tensor in codes that a folder lacks, or has in another shape or dtype.

    Args:
        folder: the folder.
        tensor: key and shape of the tensor that the parts stand for.
        how: how it is in codes.
        problems: told what is wrong.

    Returns:
        The keys of the parts.
    """
    expected = parts_of(abstract_qtensor(tensor.shape, how))
    for part, leaf in expected.items():
        key, dtype = f"{tensor.key}.{part}", _NAMES[np.dtype(leaf.dtype)]
        info = folder.tensors.get(key)
        if info is None:
            problems.add("missing", f"{show(key)} (quantization_config has it in codes)")
            continue
        if info.shape != leaf.shape:
            form = how.format
            problems.add(
                "misshapen",
                f"{show(key)} has shape {list(info.shape)}, expected {list(leaf.shape)} for "
                f"{form.bits} bits in groups of {form.group_size}",
            )
        if info.dtype != dtype:
            problems.add("dtype", f"{show(key)} is {info.dtype}; accepted: {dtype}")
    return {f"{tensor.key}.{part}" for part in expected}


def _count_unusable(array: np.ndarray, *, zero_is: bool) -> int:
    """How many numbers are NaN or infinite, or zero where that is unusable; from their bits."""
    bits = array.view(np.uint16 if array.itemsize == 2 else np.uint32)
    exponent = 0x7F80 if array.itemsize == 2 else 0x7F800000
    exponent = bits.dtype.type(exponent)
    wrong = np.count_nonzero((bits & exponent) == exponent)
    if zero_is:
        # Left of the sign nothing is set.
        wrong += np.count_nonzero((bits << bits.dtype.type(1)) == 0)
    return int(wrong)
