"""Synthetic checkpoints: random values in the exact layout of a part of a released model."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from convert.writing import OutputTensor, plan_shards, write_folder
from qwen_jax.checkpoint.mapping import Experts, Layout
from qwen_jax.checkpoint.tensors import stored_tensors
from qwen_jax.config import QwenConfig

PRESET = "qwen3.6-35b-a3b"

_BLOCK = 128
_CHUNK = 16 << 20
_SHARD_BYTES = 4_000_000_000
_KEPT_IN_BF16 = ("in_proj_a", "in_proj_b", "conv1d", "mlp.gate.", "shared_expert_gate", "mtp.fc")


def write_source(
    folder: Path, layers: int, experts: Experts, dtype: Literal["bf16", "fp8"]
) -> None:
    """Writes a folder of the first layers of Qwen3.6-35B-A3B, with its embedding, head and MTP.

    Args:
        folder: where to; must not exist.
        layers: how many layers.
        experts: fused as in the bf16 release, or per expert as in the FP8 release.
        dtype: of the matrices that the FP8 release quantises.
    """
    config = _config(layers)
    names = Layout("model.language_model.", experts=experts, mtp_experts=experts)
    tensors = []
    for key, tensor in stored_tensors(config, names, 1).items():
        tensors += _stored(key, tensor.shape, quantise=dtype == "fp8")
    values = {**config.to_hf(), "mtp_num_hidden_layers": 1}
    if dtype == "fp8":
        values["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        }

    def finish(work: Path, checksums: Any, remarks: Any) -> None:
        (work / "config.json").write_text(json.dumps(values))

    write_folder(
        folder,
        plan_shards(tensors, _SHARD_BYTES),
        fingerprint={},
        metadata={"format": "pt"},
        index_metadata={},
        finish=finish,
        resume=False,
        progress=lambda nbytes: None,
    )


def _config(layers: int) -> QwenConfig:
    config = QwenConfig.preset(PRESET)
    kinds = config.layer_types[:layers]
    return dataclasses.replace(config, num_hidden_layers=layers, layer_types=kinds)


def _stored(key: str, shape: tuple[int, ...], *, quantise: bool) -> list[OutputTensor]:
    kept = any(part in key for part in _KEPT_IN_BF16)
    matrix = len(shape) == 2 and ".layers." in key and not kept
    if not quantise or not matrix:
        return [OutputTensor(key, "BF16", shape, lambda: _random(shape, 2))]
    blocks = tuple(-(-extent // _BLOCK) for extent in shape)
    return [
        OutputTensor(key, "F8_E4M3", shape, lambda: _random(shape, 1)),
        OutputTensor(f"{key}_scale_inv", "BF16", blocks, lambda: _scales(blocks)),
    ]


def _random(shape: tuple[int, ...], width: int) -> Iterator[np.ndarray]:
    left = math.prod(shape) * width
    for _ in range(0, left, _CHUNK):
        yield _noise()[: min(left, _CHUNK)]
        left -= _CHUNK


@functools.cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, _CHUNK, dtype=np.uint8)


def _scales(shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    yield np.random.default_rng(0).uniform(1e-4, 1e-3, shape).astype(ml_dtypes.bfloat16)
