"""What every quantised format has in common: the tensors of one matrix, and how it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.problems import show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SCALE_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Quantised(ABC):
    """One quantised matrix, or stack of matrices, of a folder.

    Attributes:
        key: its logical key, that of the plain matrix.
        shape: [out, in], or [experts, out, in].
        parts: keys of the tensors that hold it, the largest first.
        format: name of the format and the width of a code.
    """

    key: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    format: str

    @abstractmethod
    def read(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray:
        """Dequantises entries `start` to `stop` of the first axis.

        Args:
            folder: the folder as it is on disk.
            start: first entry.
            stop: one past the last entry, at most `shape[0]`.

        Returns:
            bfloat16 [stop - start, ...]: the product of code and scale in float32, rounded once.

        Raises:
            CheckpointError: scales, zero points or group numbers that make no sense.
        """


class Found(NamedTuple):
    """The keys of a folder, sorted.

    Attributes:
        matrices: quantised ones, by logical key.
        plain: tensors that stand for themselves.
        skipped: numbers of tensors that are not needed, by kind.
    """

    matrices: dict[str, Quantised]
    plain: dict[str, TensorInfo]
    skipped: Counter[str]


class Parts(NamedTuple):
    """The tensors of a folder that belong to one logical key, by the role that their names give."""

    key: str
    tensors: Mapping[str, TensorInfo]

    def take(self, *roles: str) -> list[TensorInfo]:
        """Gives the tensors of some roles.

        Raises:
            CheckpointError: one of them is not there.
        """
        missing = [role for role in roles if role not in self.tensors]
        if missing:
            found = ", ".join(sorted(self.tensors))
            raise self.fault(f"has {found}, but no {' and no '.join(missing)}")
        return [self.tensors[role] for role in roles]

    def only(self, *roles: str) -> None:
        """Checks that no tensor has another role.

        Raises:
            CheckpointError: the matrix is there in two forms.
        """
        others = sorted(self.tensors.keys() - set(roles))
        if others:
            held = ", ".join(sorted(self.tensors.keys() & set(roles)))
            raise self.fault(f"is there in two forms: as {held}, and as {', '.join(others)}")

    def fault(self, text: str) -> CheckpointError:
        """Builds the error that says what is wrong with this matrix."""
        return CheckpointError(f"{show(self.key)} {text}")


def sides(info: TensorInfo, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """Gives the two sizes of a matrix after a check of its dtype and rank.

    Raises:
        CheckpointError: another dtype or rank, or no elements.
    """
    check_dtype(info, dtypes)
    if len(info.shape) != 2 or 0 in info.shape:
        raise CheckpointError(
            f"{show(info.name)} has shape {list(info.shape)}; expected a matrix with elements"
        )
    return info.shape[0], info.shape[1]


def check_dtype(info: TensorInfo, dtypes: tuple[str, ...]) -> None:
    """Checks that a tensor has one of some dtypes.

    Raises:
        CheckpointError: it has another.
    """
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{show(info.name)} is {show(info.dtype)}; expected {' or '.join(dtypes)}"
        )


def check_shape(info: TensorInfo, expected: tuple[int, ...], what: str) -> None:
    """Checks the shape of a tensor.

    Raises:
        CheckpointError: it has another.
    """
    if info.shape != expected:
        raise CheckpointError(
            f"{show(info.name)} has shape {list(info.shape)}; expected {list(expected)}: {what}"
        )


def as_scales(values: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Turns scales into float32, which every dtype they come in fits into exactly.

    A scale may be negative or zero: some packers let the sign of a scale choose which end of the
    range has one code more, and float16 takes the scale of a group of tiny weights to zero.

    Args:
        values: some of the scales.
        info: the tensor that they come from, for the message.

    Returns:
        The scales as a C-contiguous float32 array.

    Raises:
        CheckpointError: one of them is infinite or not a number.
    """
    scales = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(scales).all():
        bad = int(np.count_nonzero(~np.isfinite(scales)))
        raise CheckpointError(
            f"{show(info.name)}: {bad} of {scales.size} scales are infinite or not a number; the "
            "file is damaged, so download it again or take another release"
        )
    return scales


def keys(*infos: TensorInfo | None) -> tuple[str, ...]:
    """Names the tensors that are there, in the given order."""
    return tuple(info.name for info in infos if info is not None)
