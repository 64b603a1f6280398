"""Every mismatch of folder and configuration is refused by name, all in one error."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError

EXPERTS = "model.language_model.layers.0.mlp.experts."
BF16 = ml_dtypes.bfloat16


def kinds(message):
    return {kind: int(n) for kind, n in re.findall(r"^  (\S.*) \((\d+)\):$", message, re.M)}


def test_tensor_under_two_prefixes_is_refused(moe, refused):
    config, _, arrays = moe
    arrays["model.norm.weight"] = arrays["model.language_model.norm.weight"] * 2
    message = refused(config, arrays)
    assert kinds(message) == {"duplicate": 1}
    assert "model.language_model.norm.weight and model.norm.weight" in message


@pytest.mark.parametrize("tensor", ["gate_proj", "up_proj", "down_proj"])
def test_experts_in_two_layouts_at_once_are_refused(moe, refused, tensor):
    config, _, arrays = moe
    shape = (16, 6) if tensor == "down_proj" else (6, 16)
    arrays[f"{EXPERTS}0.{tensor}.weight"] = np.ones(shape, BF16)
    message = refused(config, arrays)
    assert kinds(message)["ambiguous"] == 1
    fused = "down_proj" if tensor == "down_proj" else "gate_up_proj"
    assert f"{EXPERTS}{fused} and {EXPERTS}0.{tensor}.weight" in message


def test_projections_in_two_layouts_at_once_are_refused(moe, stored, refused):
    config, tree, arrays = moe
    other = stored(config, tree, Layout("model.language_model.", linear_projections="interleaved"))
    key = "model.language_model.layers.0.linear_attn.in_proj_ba.weight"
    assert kinds(refused(config, {**arrays, key: other[key]}))["ambiguous"] == 1


@pytest.mark.parametrize(
    "key",
    [
        "model.language_model.layers.2.mlp.shared_expert_gate.weight",
        "model.language_model.layers.3.self_attn.q_norm.weight",
        "model.language_model.norm.weight",
        "lm_head.weight",
    ],
)
def test_each_missing_tensor_is_named(moe, refused, key):
    config, _, arrays = moe
    del arrays[key]
    message = refused(config, arrays)
    assert kinds(message) == {"missing": 1}
    assert key in message


def test_each_key_is_needed(moe, write_folder):
    config, _, arrays = moe
    for number, key in enumerate(arrays):
        rest = {k: a for k, a in arrays.items() if k != key}
        with pytest.raises(CheckpointError, match=re.escape(key)):
            plan_load(open_folder(write_folder(rest, name=str(number))), config)


def test_missing_experts_name_both_layouts(moe, refused):
    config, _, arrays = moe
    rest = {key: array for key, array in arrays.items() if not key.startswith(EXPERTS)}
    message = refused(config, rest)
    assert kinds(message) == {"missing": 2}
    assert f"{EXPERTS}gate_up_proj (or mlp.experts.{{e}}.gate_proj.weight and " in message


def test_all_mismatches_are_in_one_error(moe, refused):
    config, _, arrays = moe
    del arrays["model.language_model.norm.weight"]
    arrays["model.language_model.layers.0.mlp.gate.bias"] = np.ones(3, BF16)
    arrays["extra.weight"] = np.ones(3, BF16)
    arrays["model.language_model.layers.1.mlp.gate.weight"] = np.ones((16, 3), BF16)
    arrays["model.language_model.layers.2.mlp.gate.weight"] = np.ones((3, 16), np.int32)
    arrays["language_model.model.embed_tokens.weight"] = np.ones((40, 16), BF16)
    message = refused(config, arrays)
    assert kinds(message) == {
        "under an unknown prefix": 1,
        "duplicate": 1,
        "missing": 1,
        "misshapen": 1,
        "dtype": 1,
        "unused": 1,
    }
    assert "layers.1.mlp.gate.weight has shape [16, 3], expected [3, 16]" in message
    assert "layers.2.mlp.gate.weight is I32; accepted: BF16, F16, F32" in message


@pytest.mark.parametrize("numbers", [(0, 1, 3), (0, 1, 2, 3), (0, 2, 1, 2**70)])
def test_expert_numbers_with_a_gap_or_surplus_are_refused(
    tiny, random_tree, stored, refused, numbers
):
    config = tiny("qwen3_moe")
    arrays = stored(config, random_tree(config), Layout(experts="per_expert"))
    place = "model.layers.1.mlp.experts."
    kept = {key: array for key, array in arrays.items() if not key.startswith(place)}
    for number, name in itertools.product(numbers, ("gate_proj", "up_proj", "down_proj")):
        kept[f"{place}{number}.{name}.weight"] = arrays[f"{place}0.{name}.weight"]
    message = refused(config, kept)
    gap = set(range(3)) - set(numbers)
    expected = {"unused": 3, "numbers beyond the configuration": 1}
    assert kinds(message) == expected | ({"missing": 3} if gap else {})
    assert f"{place}{max(numbers)}.up_proj.weight" in message
    assert "the configuration has 3" in message
    for number in gap:
        assert f"{place}{number}.up_proj.weight" in message


def test_padded_expert_numbers_are_not_taken_for_others(tiny, random_tree, stored, refused):
    config = tiny("qwen3_moe")
    arrays = stored(config, random_tree(config), Layout(experts="per_expert"))
    key = "model.layers.1.mlp.experts.{}.up_proj.weight"
    arrays[key.format("01")] = arrays.pop(key.format("1"))
    assert kinds(refused(config, arrays)) == {"missing": 1, "unused": 1}


def test_renamed_path_segment_is_refused(moe, refused):
    config, _, arrays = moe
    renamed = {key.replace(".experts.", ".expert_bank."): array for key, array in arrays.items()}
    assert kinds(refused(config, renamed)) == {"missing": 8, "unused": 8}


def test_surplus_layers_are_refused(moe, tiny, refused):
    _, _, arrays = moe
    message = refused(tiny("qwen3_5_moe_text", num_hidden_layers=3), arrays)
    assert "layers up to number 3; the configuration has 3" in message
    assert "missing" not in kinds(message)


def test_long_lists_are_cut_and_counted(tiny, refused):
    message = refused(tiny("qwen3_moe"), {"model.norm.weight": np.ones(16, BF16)})
    assert kinds(message)["missing"] > 20
    assert re.search(r"\.\.\. and \d+ more", message)
    assert len(message.splitlines()) < 30


def test_untied_model_without_head_is_refused(tiny, random_tree, stored, refused):
    tied = tiny("qwen3_moe", tie_word_embeddings=True)
    arrays = stored(tied, random_tree(tied), Layout())
    message = refused(tiny("qwen3_moe"), arrays)
    assert kinds(message) == {"missing": 1}
    assert "lm_head.weight (the configuration says tie_word_embeddings false)" in message
