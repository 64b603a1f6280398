"""Peak memory of quantising and of loading a model of many layers, for `test_memory`.

A program of its own: what tests did before would be in the figures. Writes to standard output, as
JSON, the bytes of resident memory that each took beyond what was there before it, and, for loading,
beyond the model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import qwen_jax
from convert.quantization.recipe_file import read_recipe
from convert.quantization_plan import plan_quantization
from convert.quantize import quantize
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.tensors import stored_tensors
from qwen_jax.config import QwenConfig
from tests.convert import sources
from tests.convert.quantization import models

# Nearly all of a layer is experts; they stay as they are, since codes take long to make.
LAYER_BYTES = 16 * 3 * 256 * 512 * 2
RULES = [{"pattern": "*.mlp.shared_expert.*_proj.weight", "bits": 4, "group_size": 32}]
LAYERS = 16


def sizes(layers: int) -> dict[str, Any]:
    wide = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 16}
    return (
        models.SIZES
        | wide
        | {
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
        }
    )


def source(folder: Path, layers: int) -> Path:
    config = QwenConfig.from_hf(sources.FIELDS | sizes(layers))
    some = np.random.default_rng(0).normal(0, 0.2, 1 << 16).astype(sources.BF16)
    stored = stored_tensors(config, Layout(), 0)
    arrays = {key: np.resize(some, tensor.shape) for key, tensor in stored.items()}
    return sources.write(folder, arrays, shards=layers, **sizes(layers))


def resident(name: str) -> int:
    """Bytes of this process: now ("VmRSS"), or at most since the last `forget` ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def beyond(run: Callable[[], Any]) -> int:
    """Peak while something runs, beyond what there was, and beyond what it returns."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    leaves = jax.tree.leaves(run())
    return resident("VmHWM") - before - sum(leaf.nbytes for leaf in leaves)


def main(folder: Path) -> None:
    os.fsync = lambda fd: None  # the disk is never waited for
    recipe = read_recipe(str(models.recipe(folder, RULES)))
    peaks: dict[str, int] = {}
    # A shallow model first: programs are compiled, and the allocator has what it keeps.
    for layers in (2, LAYERS):
        wide, codes = source(folder / f"wide{layers}", layers), folder / f"codes{layers}"

        def quantise(wide: Path = wide, codes: Path = codes) -> None:
            quantize(plan_quantization(wide, recipe), codes, max_shard_bytes=1 << 30)

        def load(codes: Path = codes) -> qwen_jax.CausalLM:
            return qwen_jax.load(codes)[0]

        peaks = {"quantize": beyond(quantise), "load": beyond(load)}
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
