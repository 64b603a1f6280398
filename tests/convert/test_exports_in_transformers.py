"""Transformers loads what is exported, complete, and computes what it did with the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert.from_hf import plan_conversion
from convert.run import run
from convert.to_hf import plan_export
from tests.golden.weights import case_names, load_case, write_checkpoint

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("ignore"),
]


def logits(folder: Path, tokens: np.ndarray) -> tuple[np.ndarray, list[str]]:
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    faults = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy(), list(map(str, faults))


@pytest.mark.parametrize("experts", [None, "fused", "per_expert"])
@pytest.mark.parametrize("name", case_names())
def test_exported_folders_load_and_compute_the_same(name, experts, tmp_path):
    case, _ = load_case(name)
    if experts is not None and "num_experts" not in str(case["config"]):
        pytest.skip("a dense model")
    source = write_checkpoint(tmp_path / "source", case)
    run(plan_conversion(source), tmp_path / "native", max_shard_bytes=10**6)
    plan = plan_export(tmp_path / "native", experts=experts)
    run(plan, tmp_path / "exported", max_shard_bytes=10**6)
    tokens = np.arange(3, 40)[None] % 60
    expected, _ = logits(source, tokens)
    found, faults = logits(tmp_path / "exported", tokens)
    assert faults == []
    np.testing.assert_array_equal(found, expected)
