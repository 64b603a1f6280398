"""Writes `quantised.json` and `quantised.npz`: matrices as public libraries quantise and pack them.

    python tests/golden/make_quantised.py

Made with transformers 5.24.0, torch 2.13.0 (CPU), safetensors 0.8.0, compressed-tensors 0.20.1, and
the sources of auto-gptq 0.7.1, autoawq 0.2.9 and gptqmodel 7.7.0, unpacked or installed with
`--no-deps` (gptqmodel also needs pypcre, logbar, device-smi and threadpoolctl). The last three
would import much of their kernels; only the modules used here are loaded.

It loads and packs on a CPU and takes seconds; a second run gives the same bytes.

`quantised.json`: by case `config`, the quantization_config; `tensors`, key to dtype as safetensors
names it; `key`, the logical key. `quantised.npz`: `CASE/KEY` the stored bytes, in the shape of the
tensor and as unsigned integers of its item size; `CASE expected` the matrix in bfloat16 as uint16,
either unpacked by the library or, where `known` is true in the JSON file, from the codes that it
was given to pack.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from weights import FOLDER

CODES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
MODULE = "model.layers.0.mlp.down_proj"

Tensors = dict[str, torch.Tensor]


def bare(name: str, *inner: str) -> None:
    """Makes a package and some inside it importable without running their `__init__`."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(name)
    (root,) = spec.submodule_search_locations
    for path in ("", *inner):
        module = types.ModuleType(f"{name}.{path}".rstrip("."))
        module.__path__ = [str(Path(root, *path.split(".")))]
        sys.modules[module.__name__] = module


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(UNSIGNED[tensor.element_size()]).numpy()


def fp8(shape: tuple[int, ...], block: tuple[int, int] | None, scale_fmt: str) -> Any:
    """transformers: random weights quantised, and dequantised again."""
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantiser = SimpleNamespace(quantization_config=config)
    key = "model.layers.0.mlp.experts.gate_up_proj" if len(shape) == 3 else f"{MODULE}.weight"
    stored = Fp8Quantize(quantiser)._quantize_one(key, torch.randn(shape) / 20)
    scale_key = next(name for name in stored if name != key)
    dequantise = Fp8Dequantize(quantiser)._dequantize_one
    values = dequantise(stored[key], stored[scale_key], output_dtype=torch.bfloat16)
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": scale_fmt}
    return settings | {"weight_block_size": block}, stored, key, values, False


def compressed(format: str, shape: tuple[int, int], scale_dtype: torch.dtype, **args: Any) -> Any:
    """compressed-tensors: random weights compressed, and decompressed again."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
    weight = torch.randn(shape) / 20
    size = (1, shape[1])
    if weights.strategy == "group":
        size = (1, weights.group_size)
    if weights.strategy == "block":
        size = tuple(weights.block_structure)
    counts = [-(-a // b) for a, b in zip(shape, size, strict=True)]
    largest = 448 if weights.type == "float" else 2 ** (weights.num_bits - 1)
    scale = (0.2 * (0.5 + torch.rand(counts)) / largest).to(scale_dtype)
    if weights.strategy == "tensor":
        scale = scale.flatten()[:1]
    state = {"weight": weight, "weight_scale": scale}
    if not weights.symmetric:
        half = 2 ** (weights.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, scale.shape, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(stored, scheme)["weight"].to(torch.bfloat16)
    group = json.loads(scheme.model_dump_json())
    settings = {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"]}
    settings |= {"config_groups": {"group_0": group}, "quantization_status": "compressed"}
    named = {f"{MODULE}.{leaf}": tensor for leaf, tensor in stored.items() if tensor is not None}
    return settings, named, f"{MODULE}.weight", values, False


def known_codes(bits: int, outputs: int, inputs: int, groups: int, lowest: int) -> Tensors:
    """Random codes [O, I], and zero points and float16 scales [O, groups]."""
    top = 2**bits
    return {
        "codes": torch.randint(0, top, (outputs, inputs)),
        "zeros": torch.randint(lowest, top, (outputs, groups)),
        "scales": (0.01 * (0.5 + torch.rand(outputs, groups))).half(),
    }


def plain(made: Tensors, g_idx: torch.Tensor) -> torch.Tensor:
    """(code - zero) * scale in float32."""
    difference = made["codes"] - made["zeros"][:, g_idx]
    return difference.float() * made["scales"].float()[:, g_idx]


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer


def auto_gptq(bits: int, group: int, act_order: bool, sym: bool) -> Any:
    """AutoGPTQ: known codes, packed."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    outputs, inputs = 64, 96
    size = inputs if group == -1 else group
    g_idx = torch.arange(inputs) // size
    if act_order:
        g_idx = g_idx[torch.randperm(inputs)]
    made = known_codes(bits, outputs, inputs, inputs // size, lowest=1)
    if sym:
        made["zeros"] = torch.full_like(made["zeros"], 2 ** (bits - 1))
    values = plain(made, g_idx)
    layer = QuantLinear(bits, group, inputs, outputs, bias=False, weight_dtype=torch.float16)
    scales, zeros = made["scales"].float(), made["zeros"].float()
    layer.pack(linear(values), scales, zeros, g_idx.int())
    named = {f"{MODULE}.{leaf}": tensor for leaf, tensor in layer.state_dict().items()}
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym}
    settings |= {"desc_act": act_order, "damp_percent": 0.01, "true_sequential": True}
    return settings, named, f"{MODULE}.weight", values.bfloat16(), True


def gptq_model(bits: int, format: str) -> Any:
    """GPTQModel: random words with every zero point, dequantised."""
    from gptqmodel.utils.model_dequant import convert_gptq_file

    outputs, inputs, group = 64, 128, 32
    named = {
        f"{MODULE}.qweight": random_words(inputs * bits // 32, outputs),
        f"{MODULE}.qzeros": random_words(inputs // group, outputs * bits // 32),
        f"{MODULE}.scales": (0.01 * torch.randn(inputs // group, outputs)).half(),
        f"{MODULE}.g_idx": (torch.arange(inputs) // group)[torch.randperm(inputs)].int(),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False}
    settings |= {"desc_act": True, "checkpoint_format": format, "pack_dtype": "int32"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save_file(named, file)
        values = convert_gptq_file(file, torch.bfloat16, settings, "cpu")[f"{MODULE}.weight"]
    return settings, named, f"{MODULE}.weight", values, False


def random_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).int()


def auto_awq(group: int) -> Any:
    """AutoAWQ: known codes, packed; its own unpacking must give them back."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    outputs, inputs = 64, 128
    size = inputs if group == -1 else group
    made = known_codes(4, outputs, inputs, inputs // size, lowest=0)
    values = plain(made, torch.arange(inputs) // size)
    layer = WQLinear_GEMM.from_linear(
        linear(values), 4, size, scales=made["scales"].float().T, zeros=made["zeros"].float().T
    )
    unpacked = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, size)
    if not torch.equal(unpacked.T, values):
        raise ValueError("AutoAWQ does not unpack what it packed")
    named = {f"{MODULE}.{leaf}": tensor for leaf, tensor in layer.state_dict().items()}
    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    settings |= {"zero_point": True, "modules_to_not_convert": None}
    return settings, named, f"{MODULE}.weight", values.bfloat16(), True


def main() -> None:
    bare("auto_gptq", "nn_modules", "nn_modules.qlinear")
    bare("awq", "modules", "modules.linear", "utils")
    bare("gptqmodel", "nn_modules", "quantization", "models", "adapter")
    torch.manual_seed(0)
    float32, bfloat16 = torch.float32, torch.bfloat16
    packed: dict[str, Any] = {"format": "pack-quantized", "shape": (40, 96)}
    grouped = packed | {"strategy": "group", "group_size": 32}
    cases = {
        "fp8_block": fp8((48, 80), (16, 16), "float"),
        "fp8_ue8m0": fp8((32, 64), (16, 32), "ue8m0"),
        "fp8_tensor": fp8((24, 40), None, "float"),
        "fp8_experts": fp8((3, 32, 48), (16, 16), "float"),
        "ct_int4": compressed(**grouped, scale_dtype=bfloat16, num_bits=4),
        "ct_int4_asym": compressed(**grouped, scale_dtype=float32, num_bits=4, symmetric=False),
        "ct_int3_asym": compressed(**grouped, scale_dtype=bfloat16, num_bits=3, symmetric=False),
        "ct_int5": compressed(**grouped, scale_dtype=float32, num_bits=5),
        "ct_int8_channel": compressed(
            **packed, scale_dtype=float32, num_bits=8, strategy="channel", symmetric=False
        ),
        "ct_byte_channel": compressed(
            "int-quantized", (24, 40), float32, num_bits=8, strategy="channel", symmetric=False
        ),
        "ct_fp8_channel": compressed(
            "float-quantized", (24, 40), bfloat16, num_bits=8, type="float", strategy="channel"
        ),
        "ct_fp8_tensor": compressed(
            "float-quantized", (24, 40), float32, num_bits=8, type="float", strategy="tensor"
        ),
        "ct_fp8_block": compressed(
            *("float-quantized", (24, 40), float32),
            **{"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 16]},
        ),
        "autogptq_2": auto_gptq(2, 32, act_order=False, sym=False),
        "autogptq_3": auto_gptq(3, 32, act_order=True, sym=False),
        "autogptq_4": auto_gptq(4, 32, act_order=True, sym=True),
        "autogptq_8": auto_gptq(8, -1, act_order=False, sym=False),
        "gptqmodel_2": gptq_model(2, "gptq"),
        "gptqmodel_3": gptq_model(3, "gptq"),
        "gptqmodel_4": gptq_model(4, "gptq"),
        "gptqmodel_8_v2": gptq_model(8, "gptq_v2"),
        "gptqmodel_3_v2": gptq_model(3, "gptq_v2"),
        "autoawq": auto_awq(32),
        "autoawq_row": auto_awq(-1),
    }
    described, arrays = {}, {}
    for name, (config, tensors, key, values, known) in cases.items():
        dtypes = {stored: CODES[tensor.dtype] for stored, tensor in tensors.items()}
        described[name] = {"key": key, "known": known, "config": config, "tensors": dtypes}
        arrays |= {f"{name}/{stored}": raw(tensor) for stored, tensor in tensors.items()}
        arrays[f"{name} expected"] = raw(values)
    (FOLDER / "quantised.json").write_text(json.dumps(described, indent=1) + "\n")
    np.savez_compressed(FOLDER / "quantised.npz", **arrays)


if __name__ == "__main__":
    main()
