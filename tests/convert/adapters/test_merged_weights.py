"""Merged weights against those that PEFT itself makes, stored in `tests/golden`."""

from __future__ import annotations

import json

import numpy as np
import pytest

from convert.adapters import load_adapter
from tests.golden.weights import FOLDER

CASES = list(json.loads((FOLDER / "adapters.json").read_text()))


def merged(adapter, before, run=1_000_000):
    """Applies an adapter to all tensors of a tree, `run` rows at a time."""
    return {
        path: np.concatenate(
            [adapter.apply(path, i, value[i : i + run]) for i in range(0, len(value), run)]
        )
        for path, value in before.items()
    }


def assert_close(result, expected):
    assert result.keys() == expected.keys()
    for path, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(result[path], value, rtol=1e-6, atol=1e-6 * scale, err_msg=path)


@pytest.mark.parametrize("name", CASES)
def test_merged_as_peft_merges(golden, write_adapter, name):
    case = golden(name)
    adapter = load_adapter(write_adapter(case.tensors, case.settings), case.config)
    assert set(adapter.paths) == case.changed
    assert_close(merged(adapter, case.before), case.after)


@pytest.mark.parametrize("run", [1, 3])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "qwen3_tokens", "qwen3_next_saved"])
def test_runs_of_rows_add_up(golden, write_adapter, name, run):
    case = golden(name)
    adapter = load_adapter(write_adapter(case.tensors, case.settings), case.config)
    assert_close(merged(adapter, case.before, run), case.after)


PREFIX = "base_model.model.model."


@pytest.mark.parametrize(
    "spell",
    [
        lambda key: key.replace(PREFIX, "base_model.model.model.language_model."),
        lambda key: key.replace(PREFIX, "base_model.model.language_model.model."),
        lambda key: key.replace(PREFIX, "base_model.model."),
        lambda key: key.replace(PREFIX, "model."),
        lambda key: key.replace(PREFIX, ""),
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.replace(".weight", ".my_name.weight"),
    ],
)
def test_other_spellings_of_keys(golden, write_adapter, spell):
    case = golden("qwen3_moe_square")
    tensors = {spell(key): value for key, value in case.tensors.items()}
    adapter = load_adapter(write_adapter(tensors, case.settings), case.config)
    assert_close(merged(adapter, case.before), case.after)


def test_saved_modules_under_their_wrapper(golden, write_adapter):
    case = golden("qwen3_next_saved")
    for place in ("modules_to_save", "modules_to_save.default"):
        tensors = {
            key.replace("experts.", f"experts.{place}."): value
            for key, value in case.tensors.items()
        }
        adapter = load_adapter(write_adapter(tensors, case.settings, place), case.config)
        assert_close(merged(adapter, case.before), case.after)


def test_interleaved_projections_come_apart_head_by_head(golden, write_adapter):
    case = golden("qwen3_next")
    adapter = load_adapter(write_adapter(case.tensors, case.settings), case.config)
    module = "base_model.model.model.layers.0.linear_attn.in_proj_qkvz."
    a, b = (case.tensors[f"{module}lora_{x}.weight"].astype(np.float64) for x in "AB")
    delta = 3 / np.sqrt(2) * b @ a
    # In the file, for each of two key heads: 4 rows of q, 4 of k, then v and z of two value
    # heads with 3 rows each.
    heads = np.split(delta, 2)
    qkv = [head[rows] for rows in (slice(0, 4), slice(4, 8), slice(8, 14)) for head in heads]
    z = [head[14:20] for head in heads]
    for name, rows in (("qkv", qkv), ("z", z)):
        path = f"layers.0.linear_attn.in_proj_{name}.weight"
        expected = case.before[path] + np.concatenate(rows)
        result = adapter.apply(path, 0, case.before[path])
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_expert_updates_are_outer_products_of_their_own_factors(golden, write_adapter):
    case = golden("qwen3_moe_older")
    adapter = load_adapter(write_adapter(case.tensors, case.settings), case.config)
    module = "base_model.model.model.layers.1.mlp.experts."
    a, b = (case.tensors[f"{module}lora_{x}.weight"].astype(np.float64) for x in "AB")
    path = "layers.1.mlp.experts.down_proj"
    expected = case.before[path].astype(np.float64)
    experts, rows, columns = expected.shape
    for e in range(experts):
        for k in range(2):
            for i in range(rows):
                for o in range(columns):
                    expected[e, i, o] += 8 / 2 * a[e * 2 + k, i] * b[o, k * experts + e]
    result = adapter.apply(path, 0, case.before[path])
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


def test_some_experts_only(golden, write_adapter):
    case = golden("qwen3_moe_per_expert")
    tensors = {key: value for key, value in case.tensors.items() if ".experts.2.up" in key}
    adapter = load_adapter(write_adapter(tensors, case.settings), case.config)
    path = "layers.0.mlp.experts.gate_up_proj"
    assert set(adapter.paths) == {path}
    expected = case.before[path].copy()
    expected[2, 6:] = case.after[path][2, 6:]
    assert_close({path: adapter.apply(path, 0, case.before[path])}, {path: expected})
    np.testing.assert_array_equal(adapter.apply(path, 3, expected[3:]), expected[3:])
