"""From the keys of a folder to its quantised matrices: which tensors belong together, and how.

Each matrix is judged by its own tensors, so a folder may mix formats, and quantised with plain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from qwen_jax.checkpoint.formats import declares_codes, quantisation, read_scheme
from qwen_jax.checkpoint.header import TensorInfo
from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.errors import CheckpointError

from . import awq, compressed_tensors, fp8, gptq, int8
from .awq import AwqSettings
from .blocks import BlockSettings
from .compressed_tensors import UNDECLARED, CompressedSettings
from .gptq import GptqSettings
from .quantised import Found, Parts, Quantised
from .settings import Fields, find_declaration

SUPPORTED = (
    "FP8, GPTQ, AWQ (gemm), compressed-tensors (integers and FP8), and folders that qwen-jax "
    "quantize wrote"
)

# Last segment of a key -> what else is never part of a weight.
_UNUSED = {
    "input_scale": "activation scale",
    "activation_scale": "activation scale",
    "input_zero_point": "activation scale",
    "output_scale": "activation scale",
    "output_zero_point": "activation scale",
    "k_scale": "cache scale",
    "v_scale": "cache scale",
    "q_scale": "cache scale",
    "kv_scale": "cache scale",
}
_STACK_ACTIVATION = "_activation_scale"  # of a stack of experts
_STACK_SCALE = "_scale_inv"

# Last segments of the keys of a module that hold its matrix, which is its `weight`.
_OF_WEIGHT = (
    "weight_scale",
    "weight_zero_point",
    "weight_packed",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
_CODES = ("F8_E4M3", "F8_E5M2", "I8")

Settings = BlockSettings | GptqSettings | AwqSettings | CompressedSettings | None

_METHODS = {
    "fp8": fp8.read_settings,
    "gptq": gptq.read_settings,
    "awq": awq.read_settings,
    "compressed-tensors": compressed_tensors.read_settings,
}


def find_matrices(folder: TensorFolder, problems: Problems) -> Found:
    """Finds the quantised matrices of a folder.

    Args:
        folder: the folder as it is on disk.
        problems: receives what is wrong with its configuration and with each matrix.

    Returns:
        All keys of the folder, each in one place; a matrix with a problem is in none.

    Raises:
        CheckpointError: quantised in a way that is not read at all.
    """
    if declares_codes(folder.path):
        from .codes import find_coded  # JAX is loaded for such folders alone

        return find_coded(folder, read_scheme(folder.path, folder.tensors), problems)
    method, settings = read_settings(folder.path, folder.tensors, problems)
    groups, plain, skipped = _group(folder)
    matrices: dict[str, Quantised] = {}
    for key, tensors in groups.items():
        try:
            matrices[key] = _match(Parts(key, tensors), folder, method, settings)
        except CheckpointError as error:
            problems.add("cannot be dequantised", str(error))
    alone = [f"{show(k)} is {i.dtype}" for k, i in plain.items() if i.dtype in _CODES]
    problems.add("without the scales that go with their codes", *alone)
    return Found(matrices, plain, skipped)


def read_settings(path: Path, keys: Collection[str], problems: Problems) -> tuple[str, Settings]:
    """Reads the quantisation configuration of a folder.

    Args:
        path: the folder; it may lack its weights.
        keys: keys of its tensors.
        problems: receives what is wrong with the configuration.

    Returns:
        The method and what it says; "" and None where there is none.

    Raises:
        CheckpointError: quantised in a way that is not read at all.
    """
    if declares_codes(path):
        read_scheme(path, keys)
        return "", None
    packed = any(key.endswith(".qweight") for key in keys)
    name = quantisation(path, keys)
    declared = None if name == "MLX" else find_declaration(path, packed)
    if name in ("MLX", "bitsandbytes", "ModelOpt") or (
        declared is not None and declared.method not in _METHODS
    ):
        raise CheckpointError(
            f"{path} holds quantised weights ({name or show(declared and declared.method)}), "
            f"which are not read; what is read: {SUPPORTED}. Use the unquantised release or one "
            "of these"
        )
    if declared is None:
        return "", None
    fields = Fields(declared.values, declared.place, problems)
    return declared.method, _METHODS[declared.method](fields)


def _group(
    folder: TensorFolder,
) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, TensorInfo], Counter[str]]:
    """Sorts keys into tensors by logical key and role, plain tensors, and counts of the rest."""
    groups: dict[str, dict[str, TensorInfo]] = {}
    plain: dict[str, TensorInfo] = {}
    skipped = Counter[str]()
    for key, info in folder.tensors.items():
        module, _, leaf = key.rpartition(".")
        if leaf in _UNUSED or leaf.endswith(_STACK_ACTIVATION):
            skipped[_UNUSED.get(leaf, "activation scale")] += 1
        elif leaf in _OF_WEIGHT:
            groups.setdefault(f"{module}.weight", {})[leaf] = info
        elif leaf.endswith(_STACK_SCALE):
            groups.setdefault(key.removesuffix(_STACK_SCALE), {})["scale_inv"] = info
        else:
            plain[key] = info
    for key, tensors in groups.items():
        if key in plain:
            tensors["weight"] = plain.pop(key)
    return groups, plain, skipped


def _match(parts: Parts, folder: TensorFolder, method: str, settings: Settings) -> Quantised:
    """Makes a matrix of its tensors, in the format that they show."""
    roles = parts.tensors.keys()
    compressed = settings if isinstance(settings, CompressedSettings) else UNDECLARED
    if not roles.isdisjoint({"qweight", "qzeros", "scales", "g_idx"}):
        if isinstance(settings, GptqSettings):
            return gptq.match(parts, settings)
        if isinstance(settings, AwqSettings):
            return awq.match(parts, settings)
        said = f"quant_method {show(method)}" if method else "nothing of quantisation"
        raise parts.fault(
            f"has {', '.join(sorted(roles))}, but the configuration says {said}; their zero "
            "points cannot be read without a quantization_config of gptq or awq"
        )
    if not roles.isdisjoint({"weight_packed", "weight_shape", "weight_g_idx"}):
        return compressed_tensors.match_packed(parts, folder, compressed)
    (weight,) = parts.take("weight")
    if weight.dtype == "I8":
        symmetric = all(scheme.symmetric is True for scheme in compressed.schemes)
        return int8.match(parts, compressed.blocks, symmetric)
    blocks = settings if isinstance(settings, BlockSettings) else compressed.blocks
    return fp8.match(parts, blocks)
