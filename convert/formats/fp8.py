"""FP8 matrices (e4m3fn): one byte a weight, with a scale a block, row, matrix or expert.

`weight` times `weight_scale_inv` (the name is historical: it multiplies), as in the releases of
Qwen and DeepSeek; `weight` times `weight_scale`, as vLLM and compressed-tensors write it; and the
stacks of experts that transformers 5 saves, `gate_up_proj` times `gate_up_proj_scale_inv`.
e4m3fn has no infinity; 0x7F and 0xFF are NaN and stay so.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.problems import show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from .blocks import Block, BlockSettings, check_block, scale_block
from .quantised import BFLOAT16, SCALE_DTYPES, Parts, Quantised, as_scales, check_dtype, keys
from .settings import Fields

DTYPE = "F8_E4M3"

# Fields that say nothing about how stored weights are read.
HARMLESS = (
    "activation_scheme",
    "act_per_tensor",
    "dequantize",
    "ignore",
    "ignored_layers",
    "ignore_patterns",
    "kv_cache_quant_targets",
    "kv_cache_scheme",
    "modules_to_convert",
    "modules_to_not_convert",
)

_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
# Elements looked up at a time: their indices stay in a core's second-level cache.
_CHUNK = 1 << 15


@dataclass(frozen=True)
class Fp8Matrix(Quantised):
    """An FP8 matrix [out, in], or a stack [experts, out, in], and its scales.

    Attributes:
        block: rows and columns that one scale covers.
    """

    weight: TensorInfo
    scale: TensorInfo
    block: Block

    def read(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray:
        """Dequantises some rows, or some experts; see `Quantised.read`.

        The result is float32(code) * float32(scale), rounded to float32 and then to bfloat16, to
        the nearest and ties to even, for all 256 codes and every finite scale.
        """
        codes = folder.read(self.weight.name, slice(start, stop)).view(np.uint8)
        scales = self._scales(folder)
        out = np.empty(codes.shape, BFLOAT16)
        if len(self.shape) == 2:
            _look_up(codes, scales[0], start, self.block, out)
        else:
            for expert, target in enumerate(out):
                _look_up(codes[expert], scales[start + expert], 0, self.block, target)
        self._check_zeros(codes, scales, start, stop)
        return out

    def _scales(self, folder: TensorFolder) -> np.ndarray:
        """Gives all scales as float32 [experts or 1, block rows, block columns]."""
        stored = folder.read(self.scale.name)
        if self.scale.dtype == "U8":
            stored = stored.view(ml_dtypes.float8_e8m0fnu)
        scales = as_scales(stored, self.scale)
        if (scales < 0).any():
            raise CheckpointError(
                f"{show(self.scale.name)}: {int((scales < 0).sum())} of {scales.size} scales are "
                "negative; FP8 codes carry their own sign, so the file is damaged"
            )
        rows, columns = self.shape[-2:]
        return scales.reshape(-1, -(-rows // self.block[0]), -(-columns // self.block[1]))

    def _check_zeros(self, codes: np.ndarray, scales: np.ndarray, start: int, stop: int) -> None:
        """Refuses a scale of 0 over codes that are not 0: it would wipe weights out unseen."""
        if scales.all():
            return
        experts = codes[None] if len(self.shape) == 2 else codes
        first = 0 if len(self.shape) == 2 else start
        offset = start if len(self.shape) == 2 else 0
        for number, block_row, block_column in np.argwhere(scales == 0):
            if not first <= number < first + len(experts):
                continue
            top, left = block_row * self.block[0] - offset, block_column * self.block[1]
            rows = slice(max(top, 0), max(top + self.block[0], 0))
            covered = experts[number - first, rows, left : left + self.block[1]]
            if (covered & 0x7F).any():
                raise CheckpointError(
                    f"{show(self.scale.name)} is 0 for block [{block_row}, {block_column}], whose "
                    "codes are not; the scales are damaged or were never filled in"
                )


def _look_up(
    codes: np.ndarray, scales: np.ndarray, first: int, block: Block, out: np.ndarray
) -> None:
    """Fills `out` with the products of codes and scales, from a table of all 256 a block.

    A table needs no arithmetic an element, and does not slow down where the float32 form of a
    code or product is subnormal.

    Args:
        codes: uint8 [N, I], rows `first` to `first + N` of a matrix.
        scales: float32 [block rows, block columns] of the whole matrix.
        first: row of the matrix that `codes` begins with.
        block: rows and columns of a block.
        out: bfloat16 [N, I].
    """
    rows, inputs = codes.shape
    tall, wide = block
    at_once = max(1, _CHUNK // inputs)  # rows
    together = max(1, at_once // tall)  # block rows that share a table
    entries = 256 * scales.shape[1]
    number = np.min_scalar_type(together * entries - 1)
    columns = (np.arange(inputs) // wide * 256).astype(number)
    bits = out.view(np.uint16)
    start = 0
    while start < rows:
        block_row = (first + start) // tall
        stop = min(rows, (block_row + together) * tall - first)
        table = _table(scales[block_row : block_row + together])
        for low in range(start, stop, at_once):
            high = min(low + at_once, stop)
            index = codes[low:high].astype(number)
            index += columns
            if together > 1:
                block_rows = (first + np.arange(low, high)) // tall - block_row
                index += (block_rows * entries).astype(number)[:, None]
            table.take(index, out=bits[low:high], mode="clip")
        start = stop


def _table(scales: np.ndarray) -> np.ndarray:
    """Gives the bits of the bfloat16 products with all codes, uint16 [blocks * 256]."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (_VALUES * scales[..., None]).astype(BFLOAT16).view(np.uint16).ravel()


def match(parts: Parts, settings: BlockSettings) -> Fp8Matrix:
    """Makes an FP8 matrix of its tensors.

    Args:
        parts: `weight` and either `scale_inv` or `weight_scale`.
        settings: block sizes that the configuration allows.

    Returns:
        The matrix; no data has been read.

    Raises:
        CheckpointError: parts that are missing, superfluous, or do not fit one another.
    """
    inverse = "scale_inv" in parts.tensors
    role = "scale_inv" if inverse else "weight_scale"
    weight, scale = parts.take("weight", role)
    parts.only("weight", role)
    check_dtype(weight, (DTYPE,))
    exponents = ("F8_E8M0", *(["U8"] if settings.exponent_bytes else []))
    check_dtype(scale, (*SCALE_DTYPES, *exponents))
    shape, counts = weight.shape, scale.shape
    if len(shape) not in (2, 3) or 0 in shape:
        raise parts.fault(f"has shape {list(shape)}; expected [out, in] or [experts, out, in]")
    if len(shape) == 3:
        block = _stack_block(parts, shape, counts, settings)
    else:
        block = scale_block(parts, (shape[0], shape[1]), counts, settings, inverse)
    one_block = block[0] >= shape[-2] or block[0] == 1
    name = "FP8 block" if inverse or not one_block else "FP8"
    return Fp8Matrix(parts.key, shape, keys(weight, scale), name, weight, scale, block)


def _stack_block(
    parts: Parts, shape: tuple[int, ...], scale: tuple[int, ...], settings: BlockSettings
) -> Block:
    """Finds the block that one scale of a stack of experts covers.

    The scales of a joined gate_up are those of gate and of up, one after the other, so that a
    block may not lie across both.
    """
    experts, rows, columns = shape
    halves = 2 if parts.key.endswith("gate_up_proj") else 1
    if settings.single and scale in ((experts,), (experts, 1, 1)):
        return rows, columns
    if settings.single and scale == (experts, halves, 1) and rows % halves == 0:
        return rows // halves, columns
    if len(scale) != 3 or scale[0] != experts:
        raise parts.fault(
            f"of shape {list(shape)} has scales of shape {list(scale)}; "
            f"expected [{experts}, block rows, block columns]"
        )
    block = scale_block(parts, (rows, columns), scale[1:], settings, inverse=True)
    if halves == 2 and block[0] < rows and rows % (2 * block[0]):
        raise parts.fault(
            f"joins gate and up of {rows / 2:g} rows each, not a multiple of the {block[0]} rows "
            "of a block, so a scale would cover rows of both; use a release with one tensor an "
            "expert"
        )
    return block


def read_settings(fields: Fields) -> BlockSettings:
    """Reads a quantization_config of method fp8.

    Args:
        fields: its fields; what is wrong with them is recorded there.

    Returns:
        Block sizes and the form of scales.
    """
    fields.one_of("fmt", ("e4m3",), "e4m3")
    fields.one_of("expert_dtype", ("fp8",), "fp8")
    scale_format = fields.one_of("scale_fmt", ("float", "ue8m0"), "float")
    fields.one_of("weight_per_tensor", (True, False), False)
    exponents = scale_format == "ue8m0"
    given = "weight_block_size" in fields
    block = fields.get("weight_block_size")
    fields.close("FP8", HARMLESS)
    if not given:
        return BlockSettings(exponent_bytes=exponents)
    if block is None:
        return BlockSettings((), True, exponents)
    size = check_block(block)
    if size is None:
        fields.refuse("weight_block_size", block, "null or two positive integers")
        return BlockSettings()
    return BlockSettings((size,), False, exponents)
