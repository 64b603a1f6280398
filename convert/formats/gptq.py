"""GPTQ matrices of 2, 3, 4 or 8 bits, as AutoGPTQ, GPTQModel, optimum and AutoRound pack them.

`qweight` int32 [I * bits / 32, O] holds the codes of each output as one stream of bits along the
inputs, low bits first; `qzeros` int32 [groups, O * bits / 32] the zero points along the outputs;
`scales` [groups, O]; `g_idx` int32 [I] the group of each input, in any order where the packer
sorted inputs by activation (desc_act), and i // group_size where it is absent.

    W[o, i] = (code[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o]

The first version of the format stores zero - 1, version 2 (`gptq_v2`) zero. What the public
readers make of odd cases differs; here:

- With `sym` true the zero point is 2**(bits - 1) whatever the version says, as in vLLM's Marlin
  kernels: releases exist that are labelled version 1 and store it unshifted. Both ways of storing
  it are accepted, any other value is refused.
- A stored field of all ones is zero point 0 in version 1: it wraps, as in AutoGPTQ's PyTorch layer
  and GPTQModel's dequantiser. (Kernels of the exllama family read 2**bits. Where a packer borrowed
  from the neighbouring field instead of wrapping, that neighbour was damaged on writing.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.problems import show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from .packing import Groups, dequantise, group_map, unpack, words_for
from .quantised import SCALE_DTYPES, Parts, Quantised, as_scales, check_dtype, keys, sides
from .settings import Fields

BITS = (2, 3, 4, 8)

# Fields that say nothing about how stored weights are read: how they were found, which modules
# were chosen, and what activations are rounded to.
HARMLESS = tuple(
    """
    act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym activation amp
    autoround_version backend batch_size block_name_to_quantize cache_block_outputs
    damp_auto_increment damp_percent data_type dataset disable_exllama enable_full_range
    enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input exllama_config
    gradient_accumulate_steps hyb_act is_mixed iters lm_head low_gpu_mem_usage lr
    max_input_length meta minmax_lr model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_not_convert mse
    nsamples pad_token_id parallelism provider quant_block_list quantizer scale_dtype seqlen
    tokenizer true_sequential use_cuda_fp16 use_exllama v2 v2_alpha
    """.split()
)


class Scheme(NamedTuple):
    """One way in which matrices of the folder may be packed; `group` -1 is one group a row."""

    bits: int
    group: int
    sym: bool | None
    desc_act: bool


class GptqSettings(NamedTuple):
    """The schemes of a folder, and the version of its zero points (1 or 2)."""

    schemes: tuple[Scheme, ...]
    version: int


@dataclass(frozen=True)
class GptqMatrix(Quantised):
    """A GPTQ matrix [out, in].

    Attributes:
        bits: width of a code.
        group: inputs a group.
        sym: whether the zero point is known to be in the middle.
        version: 1 where zero - 1 is stored, 2 where zero is.
    """

    bits: int
    group: int
    sym: bool
    version: int
    scales: TensorInfo
    g_idx: TensorInfo | None

    def read(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray:
        """Dequantises some output features; see `Quantised.read`."""
        qweight, qzeros = self.parts[:2]
        # Transposed while packed: there is little to move, and outputs become rows.
        words = np.ascontiguousarray(folder.read(qweight)[:, start:stop].T)
        inputs = self.shape[1]
        return dequantise(
            lambda low, high: unpack(words[low:high], self.bits, inputs),
            self._zeros(folder.read(qzeros), start, stop),
            as_scales(folder.read(self.scales.name)[:, start:stop].T, self.scales),
            self._groups(folder),
            inputs,
        )

    def _zeros(self, packed: np.ndarray, start: int, stop: int) -> np.ndarray | float:
        """Gives the zero points of some outputs, float32 [stop - start, groups] or one for all."""
        first = start - start % 32
        span = slice(words_for(first, self.bits), words_for(stop, self.bits))
        stored = unpack(packed[:, span], self.bits, stop - first)[:, start - first :]
        if not self.sym:
            zeros = stored + np.uint8(self.version == 1) & np.uint8(2**self.bits - 1)
            return np.ascontiguousarray(zeros.T, np.float32)
        middle = 2 ** (self.bits - 1)
        low, high = int(stored.min()), int(stored.max())
        if low != high or middle - low not in (0, 1):
            raise CheckpointError(
                f"{show(self.parts[1])} holds zero points {low} to {high}, but the configuration "
                f"says sym, which stores {middle - 1} or {middle} everywhere; one of the two is "
                "not of this model"
            )
        return float(middle)

    def _groups(self, folder: TensorFolder) -> Groups:
        numbers = None if self.g_idx is None else folder.read(self.g_idx.name)
        return check_groups(numbers, self.g_idx, self.group, self.shape[1], self.scales.shape[0])


def check_numbers(info: TensorInfo) -> None:
    """Checks that a tensor can hold the group number of each input.

    Raises:
        CheckpointError: another dtype or rank, or no elements.
    """
    check_dtype(info, ("I32", "I64"))
    if len(info.shape) != 1 or not info.shape[0]:
        raise CheckpointError(
            f"{show(info.name)} has shape {list(info.shape)}; expected one group number an input"
        )


def check_groups(
    numbers: np.ndarray | None, info: TensorInfo | None, size: int, inputs: int, groups: int
) -> Groups:
    """Turns stored group numbers into a map after a check of their range.

    Raises:
        CheckpointError: a number that no group has.
    """
    if numbers is None or info is None:
        return group_map(None, size, inputs)
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= groups:
        raise CheckpointError(
            f"{show(info.name)} holds group numbers {low} to {high}; there are {groups} groups"
        )
    return group_map(np.asarray(numbers, np.intp), size, inputs)


def match(parts: Parts, settings: GptqSettings) -> GptqMatrix:
    """Makes a GPTQ matrix of its tensors.

    Args:
        parts: `qweight`, `qzeros`, `scales` and perhaps `g_idx`.
        settings: what the configuration says; the shapes must fit one of its schemes.

    Returns:
        The matrix; no data has been read.

    Raises:
        CheckpointError: parts that are missing, superfluous, or do not fit one another or the
            configuration.
    """
    qweight, qzeros, scales = parts.take("qweight", "qzeros", "scales")
    parts.only("qweight", "qzeros", "scales", "g_idx")
    words, outputs = sides(qweight, ("I32",))
    groups, columns = sides(scales, SCALE_DTYPES)
    sides(qzeros, ("I32",))
    if columns != outputs:
        raise parts.fault(
            f"has qweight {list(qweight.shape)} and scales {list(scales.shape)}; in GPTQ both "
            "have a column an output feature"
        )
    g_idx = parts.tensors.get("g_idx")
    if g_idx is not None:
        check_numbers(g_idx)
    fits: dict[tuple[int, int, int], list[Scheme]] = {}
    for scheme in settings.schemes:
        inputs = words * 32 // scheme.bits if g_idx is None else g_idx.shape[0]
        size = inputs if scheme.group == -1 else scheme.group
        counts = (words_for(inputs, scheme.bits), groups, words_for(outputs, scheme.bits))
        exact = g_idx is not None or words * 32 % scheme.bits == 0
        if exact and counts == (words, *qzeros.shape) and -(-inputs // size) == groups:
            fits.setdefault((scheme.bits, min(size, inputs), inputs), []).append(scheme)
    if len(fits) != 1:
        raise _misfit(parts, settings, len(fits))
    (bits, size, inputs), schemes = fits.popitem()
    if g_idx is None and groups > 1 and all(scheme.desc_act for scheme in schemes):
        raise parts.fault("has no g_idx, but desc_act is true: which group an input is in is lost")
    return GptqMatrix(
        parts.key,
        (outputs, inputs),
        keys(qweight, qzeros, scales, g_idx),
        f"GPTQ int{bits}",
        bits,
        size,
        all(scheme.sym is True for scheme in schemes),
        settings.version,
        scales,
        g_idx,
    )


def _misfit(parts: Parts, settings: GptqSettings, fits: int) -> CheckpointError:
    shapes = ", ".join(f"{role} {list(t.shape)}" for role, t in sorted(parts.tensors.items()))
    declared = {(scheme.bits, scheme.group) for scheme in settings.schemes}
    schemes = " or ".join(f"{bits} bits in groups of {g}" for bits, g in sorted(declared))
    relation = "do not fit" if fits == 0 else "fit more than one of"
    return parts.fault(f"has {shapes}, which {relation} the configuration: {schemes}")


def read_settings(fields: Fields) -> GptqSettings:
    """Reads a quantization_config of method gptq.

    Args:
        fields: its fields; what is wrong with them is recorded there.

    Returns:
        The schemes that matrices may have, and the version of the zero points.
    """
    fields.one_of("method", ("gptq",), "gptq")
    version = _version(fields)
    base = _scheme(fields, Scheme(4, -1, None, False))
    schemes = [base]
    for pattern, override in fields.objects("dynamic").items():
        if pattern.startswith("-:"):
            continue  # modules that are not packed
        schemes.append(_scheme(override, base))
        _version(override)
        override.close("GPTQ", HARMLESS)
    fields.close("GPTQ", HARMLESS)
    return GptqSettings(tuple(dict.fromkeys(schemes)), version)


def _version(fields: Fields) -> int:
    """Reads the zero convention; two fields may name it, and then must agree."""
    names = ("gptq", "gptq_v2")
    named = [fields.one_of(name, names, None) for name in ("checkpoint_format", "format")]
    found = {name for name in named if name is not None}
    if len(found) > 1:
        fields.refuse("format", named[1], f"the same as checkpoint_format, {named[0]}")
    return 2 if "gptq_v2" in found else 1


def _scheme(fields: Fields, base: Scheme) -> Scheme:
    bits = fields.size("bits", base.bits, BITS)
    group = fields.get("group_size")
    if group is None:
        group = base.group
    elif type(group) is not int or not (group == -1 or group > 0):
        fields.refuse("group_size", group, "-1 or a positive integer")
        group = base.group
    sym = fields.one_of("sym", (True, False), base.sym)
    desc_act = fields.one_of("desc_act", (True, False), base.desc_act)
    static = fields.one_of("static_groups", (True, False), False)
    fields.one_of("pack_dtype", ("int32",), "int32")
    # Each of these makes the stored integers mean something else.
    fields.none("is_marlin_format", "awq_gemm_checkpoint", "adapter", "rotation")
    fields.none("super_bits", "super_group_size")
    return Scheme(bits or base.bits, group, sym, desc_act and not static)
