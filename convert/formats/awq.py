"""AWQ matrices of 4 bits in the gemm layout, as AutoAWQ and its successors pack them.

`qweight` int32 [I, O / 8] and `qzeros` int32 [groups, O / 8] both hold eight outputs a word, in the
order 0 2 4 6 1 3 5 7 from the low nibble up; `scales` [groups, O]. Zero points are stored as they
are, and groups follow one another along the inputs.

    W[o, i] = (code[i, o] - zero[i // group_size, o]) * scale[i // group_size, o]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.safetensors_io import TensorFolder

from .packing import dequantise, group_map
from .quantised import SCALE_DTYPES, Parts, Quantised, as_scales, check_shape, keys, sides
from .settings import Fields

# Output within its word of eight that each nibble holds, the low nibble first.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

# Fields that say nothing about how stored weights are read.
HARMLESS = tuple(
    """
    act_bits act_data_type act_dynamic act_group_size act_sym activation amp autoround_version
    batch_size block_name_to_quantize data_type dataset do_fuse enable_minmax_tuning
    enable_norm_bias_tuning enable_quanted_input exllama_config fuse_max_seq_len
    gradient_accumulate_steps ignore iters lm_head low_gpu_mem_usage lr meta minmax_lr
    modules_to_fuse modules_to_not_convert nsamples provider quant_block_list scale_dtype seqlen
    sym true_sequential zero_point
    """.split()
)


class AwqSettings(NamedTuple):
    """Group sizes that matrices of the folder may have; -1 is one group a row."""

    groups: tuple[int, ...]


@dataclass(frozen=True)
class AwqMatrix(Quantised):
    """An AWQ matrix [out, in]; `group` is the number of inputs a group."""

    group: int
    scales: TensorInfo

    def read(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray:
        """Dequantises some output features; see `Quantised.read`."""
        qweight, qzeros = self.parts[:2]
        codes = _unpack(folder.read(qweight), start, stop)
        inputs = self.shape[1]
        return dequantise(
            lambda low, high: codes[low:high],
            _unpack(folder.read(qzeros), start, stop).astype(np.float32),
            as_scales(folder.read(self.scales.name)[:, start:stop].T, self.scales),
            group_map(None, self.group, inputs),
            inputs,
        )


def _unpack(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Gives the codes of some outputs: from int32 [N, O / 8], uint8 [stop - start, N]."""
    first = start // 8
    words = np.ascontiguousarray(packed[:, first : -(-stop // 8)].T).view(np.uint32)
    codes = np.empty((len(words), 8, words.shape[1]), np.uint8)
    for nibble, output in enumerate(ORDER):
        codes[:, output] = words >> np.uint32(4 * nibble) & np.uint32(15)
    return codes.reshape(-1, words.shape[1])[start - 8 * first : stop - 8 * first]


def match(parts: Parts, settings: AwqSettings) -> AwqMatrix:
    """Makes an AWQ matrix of its tensors.

    Args:
        parts: `qweight`, `qzeros` and `scales`.
        settings: group sizes that the configuration allows.

    Returns:
        The matrix; no data has been read.

    Raises:
        CheckpointError: parts that are missing, superfluous, or do not fit one another or the
            configuration.
    """
    qweight, qzeros, scales = parts.take("qweight", "qzeros", "scales")
    parts.only("qweight", "qzeros", "scales")
    inputs, words = sides(qweight, ("I32",))
    count, outputs = sides(scales, SCALE_DTYPES)
    sides(qzeros, ("I32",))
    if outputs != 8 * words:
        raise parts.fault(
            f"has qweight {list(qweight.shape)} and scales {list(scales.shape)}; in the gemm "
            "layout of AWQ a column of qweight holds eight output features"
        )
    check_shape(qzeros, (count, words), "a row a group, eight output features a column")
    sizes = {inputs if group == -1 else min(group, inputs) for group in settings.groups}
    fits = {size for size in sizes if -(-inputs // size) == count}
    if len(fits) != 1:
        declared = " or ".join(map(str, sorted(settings.groups)))
        raise parts.fault(
            f"has {count} groups of scales for {inputs} inputs, but the configuration says "
            f"group_size {declared}"
        )
    shape = (outputs, inputs)
    return AwqMatrix(
        parts.key, shape, keys(qweight, qzeros, scales), "AWQ int4", fits.pop(), scales
    )


def read_settings(fields: Fields) -> AwqSettings:
    """Reads a quantization_config of method awq.

    Args:
        fields: its fields; what is wrong with them is recorded there.

    Returns:
        The group sizes that matrices may have.
    """
    fields.one_of("method", ("awq",), "awq")
    for name in ("version", "format", "checkpoint_format"):
        fields.one_of(name, ("gemm",), "gemm")
    fields.one_of("backend", ("autoawq", "auto"), "autoawq")
    sizes = _sizes(fields)
    for pattern, override in fields.objects("dynamic").items():
        if not pattern.startswith("-:"):  # that would be modules that are not packed
            sizes |= _sizes(override)
            override.close("AWQ", HARMLESS)
    fields.close("AWQ", HARMLESS)
    return AwqSettings(tuple(sizes or {128}))


def _sizes(fields: Fields) -> set[int]:
    """Reads group sizes; the old files of AutoAWQ spell two names otherwise."""
    for name in ("bits", "w_bit"):
        fields.size(name, 4, (4,))
    fields.one_of("pack_dtype", ("int32",), "int32")
    fields.none("adapter", "rotation", "desc_act", "super_bits", "super_group_size")
    sizes = set()
    for name in ("group_size", "q_group_size"):
        size = fields.get(name)
        if type(size) is int and (size == -1 or size > 0):
            sizes.add(size)
        elif size is not None:
            fields.refuse(name, size, "-1 or a positive integer")
    return sizes
