"""Matrices of compressed-tensors with codes of 2 to 8 bits packed into 32-bit words.

In `pack-quantized` files `weight_packed` int32 [O, ceil(I * bits / 32)] holds each row as one
stream of bits, low bits first, with 2**(bits - 1) added to the codes; `weight_scale` [O, groups];
`weight_shape` the pair O, I; perhaps `weight_zero_point`, packed alike along the outputs to
[ceil(O * bits / 32), groups] or plain int8 [O, groups], and `weight_g_idx` [I], the group of each
input. Early writers left the rest of each word empty where the width does not divide 32; such
rows have more words, so they are told apart by their number and refused.

    W[o, i] = (code - zero) * scale

Its other files have one byte a weight; see `int8` and `fp8`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.problems import show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from .blocks import Block, BlockSettings, check_block
from .gptq import check_groups, check_numbers
from .int8 import check_symmetry
from .packing import dequantise, unpack, words_for
from .quantised import (
    SCALE_DTYPES,
    Parts,
    Quantised,
    as_scales,
    check_dtype,
    check_shape,
    keys,
    sides,
)
from .settings import Fields

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
PACKED_BITS = tuple(range(2, 9))

HARMLESS = tuple(
    """
    attention_input_activations dequantize global_compression_ratio ignore kv_cache_scheme
    packed_modules_mapping provider quantization_status run_compressed use_optimized_inference
    version
    """.split()
)
_HARMLESS_OF_GROUP = ("input_activations", "output_activations", "targets")
_HARMLESS_OF_WEIGHTS = ("dynamic", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")


class Scheme(NamedTuple):
    """One way in which matrices may be packed; None for what the configuration leaves open."""

    bits: int | None
    group: int | None
    symmetric: bool | None
    by_activation: bool


class CompressedSettings(NamedTuple):
    """What a configuration says: the schemes of packed matrices, and blocks of 8-bit ones."""

    schemes: tuple[Scheme, ...]
    blocks: BlockSettings


# Where no configuration is given, the shapes have to tell.
UNDECLARED = CompressedSettings((Scheme(None, None, None, False),), BlockSettings())


@dataclass(frozen=True)
class PackedMatrix(Quantised):
    """A packed matrix [out, in].

    Attributes:
        bits: width of a code.
        group: inputs a group.
        symmetric: whether the configuration says that zero points are 0.
    """

    bits: int
    group: int
    symmetric: bool
    scale: TensorInfo
    zero: TensorInfo | None
    g_idx: TensorInfo | None

    def read(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray:
        """Dequantises some output features; see `Quantised.read`."""
        words = folder.read(self.parts[0], slice(start, stop))
        inputs = self.shape[1]
        scales = as_scales(folder.read(self.scale.name, slice(start, stop)), self.scale)
        scales = scales.reshape(stop - start, -1)
        numbers = None if self.g_idx is None else folder.read(self.g_idx.name)
        return dequantise(
            lambda low, high: unpack(words[low:high], self.bits, inputs),
            self._zeros(folder, start, stop),
            scales,
            check_groups(numbers, self.g_idx, self.group, inputs, scales.shape[1]),
            inputs,
        )

    def _zeros(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray | float:
        """Gives zero points in the terms of the stored codes, which are never negative."""
        middle = 2 ** (self.bits - 1)
        if self.zero is None:
            return float(middle)
        if self.zero.dtype == "I8":
            zeros = folder.read(self.zero.name, slice(start, stop)).astype(np.float32) + middle
        else:
            first = start - start % 32
            rows = slice(words_for(first, self.bits), words_for(stop, self.bits))
            words = folder.read(self.zero.name, rows)
            words = np.ascontiguousarray(words.reshape(len(words), -1).T)
            stored = unpack(words, self.bits, stop - first)
            zeros = np.ascontiguousarray(stored[:, start - first :].T, np.float32)
        check_symmetry(self.zero, zeros - middle, self.symmetric)
        return zeros.reshape(stop - start, -1)


def match_packed(parts: Parts, folder: TensorFolder, settings: CompressedSettings) -> PackedMatrix:
    """Makes a packed matrix of its tensors.

    Args:
        parts: `weight_packed`, `weight_scale`, `weight_shape` and perhaps `weight_zero_point` and
            `weight_g_idx`.
        folder: read for `weight_shape` only.
        settings: what the configuration says; the shapes must fit one of its schemes.

    Returns:
        The matrix.

    Raises:
        CheckpointError: parts that are missing, superfluous, or do not fit one another or the
            configuration.
    """
    packed, scale, shape = parts.take("weight_packed", "weight_scale", "weight_shape")
    optional = ("weight_zero_point", "weight_g_idx")
    parts.only("weight_packed", "weight_scale", "weight_shape", *optional)
    zero, g_idx = (parts.tensors.get(role) for role in optional)
    rows, words = sides(packed, ("I32",))
    check_dtype(scale, SCALE_DTYPES)
    outputs, inputs = _stored_shape(folder, shape)
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if rows != outputs or scale.shape not in ((rows,), (rows, groups)) or groups < 1:
        raise parts.fault(
            f"has weight_packed {list(packed.shape)} and weight_scale {list(scale.shape)}, but "
            f"weight_shape {outputs}, {inputs}"
        )
    if g_idx is not None:
        check_numbers(g_idx)
        check_shape(g_idx, (inputs,), "one group number an input")
    bits, size, schemes = _fit(parts, settings, (inputs, words, groups))
    if zero is not None:
        check_dtype(zero, ("I32", "I8"))
        packed_rows = outputs if zero.dtype == "I8" else words_for(outputs, bits)
        check_shape(zero, (packed_rows, *scale.shape[1:]), f"zero points of {bits} bits")
    if zero is None and not any(scheme.symmetric in (True, None) for scheme in schemes):
        raise parts.fault("has no weight_zero_point, but the configuration says asymmetric")
    if g_idx is None and groups > 1 and all(scheme.by_activation for scheme in schemes):
        raise parts.fault("has no weight_g_idx, but actorder is group: the groups are lost")
    return PackedMatrix(
        parts.key,
        (outputs, inputs),
        keys(packed, scale, shape, zero, g_idx),
        f"compressed-tensors int{bits}",
        bits,
        size,
        all(scheme.symmetric is True for scheme in schemes),
        scale,
        zero,
        g_idx,
    )


def _stored_shape(folder: TensorFolder, info: TensorInfo) -> tuple[int, int]:
    """Reads `weight_shape`."""
    check_dtype(info, ("I64", "I32"))
    check_shape(info, (2,), "output and input features")
    outputs, inputs = (int(size) for size in folder.read(info.name))
    if outputs < 1 or inputs < 1:
        raise CheckpointError(f"{show(info.name)} says {outputs}, {inputs}; expected two sizes")
    return outputs, inputs


def _fit(
    parts: Parts, settings: CompressedSettings, counts: tuple[int, int, int]
) -> tuple[int, int, list[Scheme]]:
    """Finds the bits and the inputs a group that explain the shapes, and the schemes that do.

    Args:
        parts: the matrix, for the message.
        settings: the schemes to choose from.
        counts: inputs, words a row, groups a row.

    Returns:
        Bits, inputs a group, and the schemes with both.
    """
    inputs, words, groups = counts
    fits: dict[tuple[int, int], list[Scheme]] = {}
    for scheme in settings.schemes:
        widths = PACKED_BITS if scheme.bits is None else (scheme.bits,)
        size = -(-inputs // groups) if scheme.group is None else scheme.group
        size = inputs if size == -1 else size
        for bits in widths:
            if words == words_for(inputs, bits) and -(-inputs // size) == groups:
                fits.setdefault((bits, min(size, inputs)), []).append(scheme)
    if len(fits) == 1:
        ((bits, size), schemes), *_ = fits.items()
        loose = -(-inputs // (32 // bits))
        if loose != words or 32 % bits == 0 or words == 1:
            return bits, size, schemes
    found = f"has {words} words and {groups} groups for rows of {inputs} weights"
    declared = " or ".join(
        f"{s.bits or 'any number of'} bits in groups of {s.group or 'any size'}"
        for s in settings.schemes
    )
    relation = "fits no scheme" if not fits else "could be packed in more than one way"
    raise parts.fault(f"{found}, which {relation}; expected {declared}")


def read_settings(fields: Fields) -> CompressedSettings:
    """Reads a quantization_config of method compressed-tensors.

    Args:
        fields: its fields; what is wrong with them is recorded there.

    Returns:
        The schemes that matrices may have. `targets` and `ignore` are not used: the file shows
        which modules are quantised.
    """
    fields.one_of("format", (*FORMATS, "mixed-precision"), None)
    fields.none("transform_config", "moe_sparsity_config")
    sparsity = fields.object("sparsity_config")
    if sparsity is not None:
        sparsity.one_of("format", ("dense",), "dense")
    schemes, blocks = [], []
    for group in fields.objects("config_groups").values():
        group.one_of("format", FORMATS, None)
        weights = group.object("weights")
        if weights is not None:
            _read_weights(weights, schemes, blocks)
        group.close("a group of compressed-tensors", _HARMLESS_OF_GROUP)
    fields.close("compressed-tensors", HARMLESS)
    settings = BlockSettings(tuple(dict.fromkeys(blocks)))
    return CompressedSettings(tuple(dict.fromkeys(schemes)) or UNDECLARED.schemes, settings)


def _read_weights(weights: Fields, schemes: list[Scheme], blocks: list[Block]) -> None:
    """Reads how the weights of one group are quantised, into one of the two lists."""
    kind = weights.one_of("type", ("int", "float"), "int")
    bits = weights.size("num_bits", 8, (8,) if kind == "float" else PACKED_BITS)
    symmetric = weights.one_of("symmetric", (True, False), True)
    strategies = ("tensor", "channel", "group", "block")
    strategy = weights.one_of("strategy", strategies, None)
    order = weights.one_of("actorder", ("group", "dynamic", "weight", "static", False), False)
    group = weights.get("group_size")
    if group is not None and (type(group) is not int or not (group == -1 or group > 0)):
        weights.refuse("group_size", group, "null, -1 or a positive integer")
        group = None
    block = weights.get("block_structure")
    size = check_block(_block_list(block))
    if block is not None and size is None:
        weights.refuse("block_structure", block, "null or two positive integers")
    elif strategy == "block" and size is not None:
        blocks.append(size)
    weights.close("weights of compressed-tensors", _HARMLESS_OF_WEIGHTS)
    if group is None or group == -1 or strategy not in (None, "group"):
        group = -1
    else:
        blocks.append((1, group))
    if kind == "int":
        schemes.append(Scheme(bits, group, symmetric, order in ("group", "dynamic")))


def _block_list(block: object) -> object:
    """Splits the older spelling of a block size, such as "128x128"."""
    if isinstance(block, str) and all(part.isdecimal() for part in block.split("x")):
        return [int(part[:9]) for part in block.split("x")]
    return block
