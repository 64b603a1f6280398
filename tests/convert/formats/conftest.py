"""Folders of quantised matrices, packed here from the public definitions of the formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.logical import LogicalFolder, open_logical
from qwen_jax.errors import CheckpointError

Arrays = dict[str, np.ndarray]


def pack_stream(codes: Any, bits: int) -> list[int]:
    """Packs codes into 32-bit words as one number in base 2**bits, lowest digit first."""
    number = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    size = -(-len(codes) * bits // 32)
    return np.frombuffer(number.to_bytes(4 * size, "little"), np.int32).tolist()


def pack_gptq(
    codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, bits: int, version: int = 1
) -> Arrays:
    """Packs codes [O, I] and zero points and scales [O, G] for GPTQ."""
    stored = (zeros - 1) % 2**bits if version == 1 else zeros
    return {
        "qweight": np.array([pack_stream(row, bits) for row in codes], np.int32).T,
        "qzeros": np.array([pack_stream(column, bits) for column in stored.T], np.int32),
        "scales": scales.T.astype(np.float16),
    }


def pack_awq(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> Arrays:
    """Packs codes [O, I] and zero points and scales [O, G] for the gemm layout of AWQ."""

    def words(rows: np.ndarray) -> np.ndarray:
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        outputs = range(0, len(rows), 8)
        packed = [
            [pack_stream([column[first + o] for o in order], 4)[0] for first in outputs]
            for column in rows.T
        ]
        return np.array(packed, np.int32)

    return {
        "qweight": words(codes),
        "qzeros": words(zeros),
        "scales": scales.T.astype(np.float16),
    }


def pack_compressed(
    codes: np.ndarray, scales: np.ndarray, bits: int, zeros: np.ndarray | None = None
) -> Arrays:
    """Packs signed codes [O, I] and zero points and scales [O, G] for compressed-tensors."""
    half = 2 ** (bits - 1)
    packed = {
        "weight_packed": np.array([pack_stream(row + half, bits) for row in codes], np.int32),
        "weight_scale": scales,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if zeros is not None:
        columns = [pack_stream(column + half, bits) for column in zeros.T]
        packed["weight_zero_point"] = np.array(columns, np.int32).T
    return packed


def product(codes: Any, zeros: Any, scales: Any, group: Any) -> np.ndarray:
    """(code - zero) * scale element by element; `group` is that of each input."""
    out = np.empty(codes.shape, np.float32)
    for o, row in enumerate(codes):
        for i, code in enumerate(row):
            difference = np.float32(int(code) - int(zeros[o, group[i]]))
            out[o, i] = difference * np.float32(scales[o, group[i]])
    return round_to_bfloat16(out)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds finite float32 to the nearest bfloat16, ties to even, and gives its bits."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.int64)
    kept, dropped = bits >> 16, bits & 0xFFFF
    up = (dropped > 0x8000) | ((dropped == 0x8000) & (kept % 2 == 1))
    return (kept + up).astype(np.uint16)


@pytest.fixture(scope="session")
def packing() -> SimpleNamespace:
    """The packers, and what they packed as bfloat16 bits."""
    return SimpleNamespace(
        stream=pack_stream,
        gptq=pack_gptq,
        awq=pack_awq,
        compressed=pack_compressed,
        product=product,
        round=round_to_bfloat16,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes arrays and a quantization_config as a folder."""
    numbers = iter(range(1000))

    def make(arrays: Arrays, config: Mapping[str, Any] | None = None, **more: Any) -> Path:
        folder = tmp_path / f"model{next(numbers)}"
        folder.mkdir()
        arrays = {key: np.array(array, order="C") for key, array in arrays.items()}
        save_file(arrays, folder / "model.safetensors")
        content = more | ({} if config is None else {"quantization_config": dict(config)})
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return make


@pytest.fixture
def opened(write: Callable[..., Path]) -> Callable[..., LogicalFolder]:
    """Opens a folder of the given arrays and configuration."""
    return lambda *arguments, **more: open_logical(write(*arguments, **more))


@pytest.fixture
def refusal(write: Callable[..., Path]) -> Callable[..., str]:
    """Gives the message with which the given arrays and configuration are refused."""

    def message(*arguments: Any, **more: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            open_logical(write(*arguments, **more))
        return str(caught.value)

    return message


@pytest.fixture
def read_refusal(opened: Callable[..., LogicalFolder]) -> Callable[..., str]:
    """Gives the message with which reading `w.weight` of the given folder is refused."""

    def message(*arguments: Any, **more: Any) -> str:
        folder = opened(*arguments, **more)
        with pytest.raises(CheckpointError) as caught:
            folder.read("w.weight")
        return str(caught.value)

    return message


@pytest.fixture(scope="session")
def bits_of() -> Callable[[np.ndarray], np.ndarray]:
    """Gives the bits of a bfloat16 array."""

    def bits(values: np.ndarray) -> np.ndarray:
        assert values.dtype == ml_dtypes.bfloat16
        return values.view(np.uint16)

    return bits
