"""Our own codes (`qwen-jax quantize`), read as bfloat16."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pallas_kernels.dequant_matmul.layout import CENTRES, unpack
from qwen_jax.checkpoint.codes import compare_parts, refuse_unusable
from qwen_jax.checkpoint.keys import MTP, parse_key
from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.checkpoint.safetensors_io import TensorFolder
from qwen_jax.checkpoint.tensors import StoredTensor, tree_tensors
from qwen_jax.config import QwenConfig
from qwen_jax.quant.scheme import Scheme, TensorScheme

from .quantised import BFLOAT16, Found, Quantised


@dataclass(frozen=True)
class Coded(Quantised):
    """A matrix, or a stack of them, in our own codes.

    Attributes:
        scheme: how it is stored.
    """

    scheme: TensorScheme

    def read(self, folder: TensorFolder, start: int, stop: int) -> np.ndarray:
        """See `Quantised.read`."""
        arrays = {}
        for key, part in zip(self.parts, self.scheme.parts, strict=True):
            # A vector of factors belongs to all rows of one matrix.
            whole = part == "input_scale" and len(self.shape) == 2
            arrays[part] = folder.read(key, slice(None) if whole else slice(start, stop))
            refuse_unusable(folder.path, key, part, arrays[part])
        form, inputs = self.scheme.format, self.shape[-1]
        group = np.arange(inputs) // form.group_size
        values = unpack(arrays["codes"], inputs).astype(np.float32)
        if form.symmetric:
            values -= np.float32(CENTRES[form.bits])
        else:
            values -= arrays["zero"].astype(np.float32)[..., group]
        values *= arrays["scale"].astype(np.float32)[..., group]
        if self.scheme.input_scale:
            values *= arrays["input_scale"][..., None, :]
        return values.astype(BFLOAT16)


def find_coded(folder: TensorFolder, scheme: Scheme, problems: Problems) -> Found:
    """Finds the matrices of a folder in our own codes.

    Args:
        folder: the folder as it is on disk.
        scheme: what its configuration says.
        problems: receives what is missing or misshapen.

    Returns:
        All keys of the folder, each in one place; a matrix with a problem is in none.
    """
    config = QwenConfig.from_hf(folder.path)
    has_mtp = any(path.startswith(MTP) for path in scheme.tensors)
    tree = tree_tensors(config, max(config.mtp_num_hidden_layers, 1) if has_mtp else 0)
    stems = {key.removesuffix(".codes") for key in folder.tensors if key.endswith(".codes")}
    keys = {parse_key(key).path: key for key in stems}
    matrices: dict[str, Quantised] = {}
    used: set[str] = set()
    for path, how in scheme.tensors.items():
        if path not in tree or path not in keys:
            lacks = "the model" if path not in tree else "the folder"
            problems.add("named by quantization_config only", f"{show(path)} is not in {lacks}")
            continue
        key, shape = keys[path], tree[path].shape
        used |= compare_parts(folder, StoredTensor(key, shape, ()), how, problems)
        parts = tuple(f"{key}.{part}" for part in how.parts)
        matrices[key] = Coded(key, shape, parts, f"qwen_jax {how.format.bits} bits", how)
    plain = {key: info for key, info in folder.tensors.items() if key not in used}
    return Found(matrices, plain, Counter())
