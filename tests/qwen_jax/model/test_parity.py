"""Every model type against numbers that transformers made with the same weights."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import qwen_jax
from benchmarks.parity import balance_loss, run_prompts
from qwen_jax import CausalLM, QwenConfig, init_cache
from qwen_jax.decode.prompt import run_prefill
from qwen_jax.model import ModelOutput
from qwen_jax.model.rope import inverse_frequencies
from tests.golden.weights import FOLDER, case_names, load_case, write_checkpoint

BAR = 1e-4  # of the standard deviation of what is compared
ROPES: dict[str, dict[str, Any]] = json.loads((FOLDER / "rope.json").read_text())["cases"]

# One of each way to decode: sliding windows with and without experts, both kinds of layer, and
# full attention. The others decode in the slow tests; their greedy tokens are checked here too,
# from one pass over prompt and tokens.
DECODED = ("qwen2_sliding", "qwen3_moe_tied", "qwen3_next_yarn")


@dataclasses.dataclass(frozen=True)
class Run:
    """A case, its model, and the output for all its texts as one ragged batch without a cache.

    Rows: the long prompt; greedy prompt and tokens; the three prompts of the padded batch.
    """

    case: dict[str, Any]
    arrays: dict[str, np.ndarray]
    model: CausalLM
    texts: list[np.ndarray]
    output: ModelOutput

    @property
    def std(self) -> float:
        return float(self.arrays["logits"].std())

    def logits(self, row: int) -> np.ndarray:
        return np.asarray(self.output.logits[row, : len(self.texts[row])])


@pytest.fixture(scope="module", params=case_names())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    case, arrays = load_case(request.param)
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), case)
    model = load(folder)
    texts = [
        arrays["tokens"],
        np.concatenate([arrays["greedy_prompt"], arrays["greedy_tokens"][:-1]]),
        *(
            row[keep > 0]
            for row, keep in zip(arrays["batch_tokens"], arrays["batch_mask"], strict=True)
        ),
    ]
    with unoptimised():
        yield Run(case, arrays, model, texts, run_prompts(model, [t.tolist() for t in texts]))


def load(folder: Path) -> CausalLM:
    """A folder in float32. What is warned of is tested with the configurations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model, tokenizer = qwen_jax.load(folder, dtype="float32")
    assert tokenizer is None
    return model
