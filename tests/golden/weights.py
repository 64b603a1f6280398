"""Weights that are a pure function of a tensor's name, and checkpoints built from them.

The golden numbers in this folder were made by transformers from these very weights, so a test
rebuilds a checkpoint from a case file instead of storing one. Needs numpy, ml_dtypes and
safetensors only.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent

DTYPES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}

# A tensor is uniform in centre +- spread. First match wins; a spread of None means that of a
# matrix with unit gain, sqrt(3 / fan_in), and a tuple's first entry scales that.
_NORM = r"(layernorm|(?<!linear_attn\.)norm|[qk]_norm)\.weight$"
_RULES: tuple[tuple[str, float, float | tuple[float] | None], ...] = (
    (r"linear_attn\.norm\.weight$", 1.0, 0.3),
    # A in [1, 16], softplus(dt_bias) in [0.002, 0.3]: from a memory of hundreds of tokens to one.
    (r"A_log$", math.log(16.0) / 2, math.log(16.0) / 2),
    (r"dt_bias$", -3.5, 2.5),
    (r"conv1d\.weight$", 0.0, (1.2,)),
    (r"\.bias$", 0.0, 0.4),
    # Wide routing margins, and attention that looks at few tokens.
    (r"mlp\.gate\.weight$", 0.0, (2.0,)),
    (r"[qk]_proj\.weight$", 0.0, (1.4,)),
    (r"(o_proj|out_proj|down_proj)(\.weight)?$", 0.0, (1.5,)),
)


def _interval(name: str, shape: tuple[int, ...], zero_centred: bool) -> tuple[float, float]:
    """Centre and half width of the uniform distribution of one tensor."""
    if re.search(_NORM, name):
        wider = 0.3 if re.search(r"[qk]_norm", name) else 0.0
        return (0.0 if zero_centred else 1.0) + wider, 0.3
    unit = math.sqrt(3.0 / shape[-1])
    for pattern, centre, spread in _RULES:
        if re.search(pattern, name):
            return centre, spread[0] * unit if isinstance(spread, tuple) else spread or unit
    return 0.0, unit


def make_weight(
    name: str, shape: tuple[int, ...], *, zero_centred: bool = False, stored: str = "bfloat16"
) -> np.ndarray:
    """The values of one checkpoint tensor, from its on-disk name.

    Args:
        name: key in the safetensors file, prefix included.
        shape: shape on disk.
        zero_centred: whether the model's norms multiply by ``1 + w``.
        stored: ``bfloat16``, ``float16`` or ``float32``. Values are rounded so that this storage is
            exact; those of a ``float16`` tensor are exact in bfloat16 as well, those of a
            ``float32`` one are not.

    Returns:
        float32 array of ``shape``.
    """
    count = math.prod(shape)
    # Raw words: numpy promises that these, unlike a Generator's methods, never change.
    words = np.random.PCG64(zlib.crc32(name.encode())).random_raw(count)
    unit = (words >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    centre, spread = _interval(name, shape, zero_centred)
    values = (centre + spread * unit).astype(np.float32).reshape(shape)
    if stored != "float32":
        values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    return values.astype(DTYPES[stored]).astype(np.float32)


def stored_dtype(name: str, case: Mapping[str, Any]) -> str:
    """The on-disk dtype of key ``name`` in a case: ``stored``, or what ``stored_as`` says."""
    for suffix, dtype in case["stored_as"].items():
        if name.endswith(suffix):
            return dtype
    return case["stored"]


def make_tensors(case: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """All tensors of a case as float32 arrays, by on-disk key."""
    return {
        name: make_weight(
            name,
            tuple(shape),
            zero_centred=case["zero_centred_norm"],
            stored=stored_dtype(name, case),
        )
        for name, shape in case["tensors"].items()
    }


def write_checkpoint(folder: str | Path, case: Mapping[str, Any], *, shards: int = 1) -> Path:
    """Writes a case as a Hugging Face checkpoint folder.

    Args:
        folder: where to; made if missing.
        case: the content of a case's JSON file.
        shards: number of safetensors files; more than one adds an index. Keys are dealt out in
            runs, in the order of the case file.

    Returns:
        ``folder`` as a path, holding ``config.json`` and the weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"], indent=2) + "\n")
    tensors = {
        name: np.ascontiguousarray(value.astype(DTYPES[stored_dtype(name, case)]))
        for name, value in make_tensors(case).items()
    }
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return folder
    weight_map = {}
    for number, names in enumerate(np.array_split(np.array(list(tensors)), shards), start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({str(name): tensors[str(name)] for name in names}, folder / file, metadata)
        weight_map |= {str(name): file for name in names}
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def case_names() -> list[str]:
    """Names of the model cases in this folder."""
    return sorted(path.stem for path in FOLDER.glob("qwen*.json"))


def load_case(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A model case: the content of its JSON file, and its arrays."""
    case = json.loads((FOLDER / f"{name}.json").read_text())
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return case, dict(arrays)
