"""How an adapter is opened and applied, by hand-made numbers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from convert.adapters import load_adapter
from convert.edit import Edit
from qwen_jax.errors import CheckpointError

BF16 = ml_dtypes.bfloat16
Q = "base_model.model.model.layers.0.self_attn.q_proj."
PATH = "layers.0.self_attn.q_proj.weight"
PLAIN = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}


@pytest.fixture
def config(golden):
    return golden("qwen3_tokens").config


def constant(config, value, dtype=np.float32):
    """The factors of an update that adds `value` everywhere."""
    rows = config.num_attention_heads * config.head_dim
    return {
        f"{Q}lora_A.weight": np.full((1, config.hidden_size), value, dtype),
        f"{Q}lora_B.weight": np.ones((rows, 1), dtype),
    }


def test_rounds_once(config, write_adapter):
    # 1 + 2^-8 lies half way between two bfloat16 numbers, so that a rounded update is lost.
    update = np.float32(2**-8 + 2**-20)
    adapter = load_adapter(write_adapter(constant(config, update), PLAIN), config)
    rows = np.ones((2, config.hidden_size), BF16)
    result = adapter.apply(PATH, 3, rows)
    assert result.dtype == BF16
    np.testing.assert_array_equal(result.astype(np.float32), 1 + 2**-7)
    assert (rows == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_dtypes_of_adapter_and_model(config, write_adapter, dtype):
    adapter = load_adapter(write_adapter(constant(config, 0.5, dtype), PLAIN), config)
    for kept in (np.float32, np.float16, BF16):
        rows = np.arange(2 * config.hidden_size).reshape(2, -1).astype(kept)
        rows.flags.writeable = False
        result = adapter.apply(PATH, 0, rows)
        assert result.dtype == rows.dtype
        np.testing.assert_array_equal(result.astype(np.float32), rows.astype(np.float32) + 0.5)


def test_large_matrices_go_block_by_block(config, write_adapter, monkeypatch):
    adapter = load_adapter(write_adapter(constant(config, 0.5), PLAIN), config)
    rows = np.arange(11 * config.hidden_size, dtype=np.float32).reshape(11, -1)
    monkeypatch.setattr("convert.adapters.changes._BLOCK_BYTES", 3 * 4 * config.hidden_size)
    np.testing.assert_array_equal(adapter.apply(PATH, 2, rows), rows + 0.5)


def test_values_that_do_not_fit_are_refused(config, write_adapter):
    adapter = load_adapter(write_adapter(constant(config, 1e5), PLAIN), config)
    rows = np.ones((2, config.hidden_size), np.float16)
    with pytest.raises(CheckpointError, match=r"values of layers.0.self_attn.q_proj.weight .*16"):
        adapter.apply(PATH, 0, rows)
    assert (adapter.apply(PATH, 0, rows.astype(np.float32)) == 100001).all()


def test_values_that_are_not_numbers_are_refused(config, write_adapter):
    adapter = load_adapter(write_adapter(constant(config, np.nan), PLAIN), config)
    with pytest.raises(CheckpointError, match="not finite numbers"):
        adapter.apply(PATH, 0, np.ones((2, config.hidden_size), np.float32))


def test_is_an_edit_that_keeps_shapes(config, write_adapter):
    adapter: Edit = load_adapter(write_adapter(constant(config, 1), PLAIN), config)
    assert adapter.shape(PATH, (16, 16)) == (16, 16)
    assert adapter.extra_rows(PATH, np.dtype(BF16)).shape == (0, config.hidden_size)
    rows = np.ones((2, 3), np.float32)
    assert adapter.apply("norm.weight", 0, rows) is rows


def test_summary_counts_tensors_by_kind(golden, write_adapter):
    case = golden("qwen3_moe_renamed")
    adapter = load_adapter(write_adapter(case.tensors, case.settings, "mine"), case.config)
    assert adapter.summary.startswith("mine: ")
    parts = set(adapter.summary.removeprefix("mine: ").split(", "))
    kinds = {"self_attn.q_proj", "mlp.gate", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert parts == {f"2 {kind}" for kind in kinds}


def test_identity_tells_settings_and_files_apart(config, write_adapter):
    tensors = constant(config, 1)
    first, second, third = (
        load_adapter(write_adapter(arrays, settings, name), config).identity
        for arrays, settings, name in (
            (tensors, PLAIN, "a"),
            (tensors, PLAIN | {"lora_alpha": 2}, "b"),
            (constant(config, 1, np.float16), PLAIN, "c"),
        )
    )
    assert len({str(sorted(i.items())) for i in (first, second, third)}) == 3


def test_vision_tower_is_left_out_and_counted(golden, write_adapter):
    case = golden("qwen3_5_moe")
    adapter = load_adapter(write_adapter(case.tensors, case.settings), case.config)
    assert adapter.notes == ("left out 2 tensors of the vision tower",)


def test_fan_in_fan_out_has_no_effect(config, write_adapter):
    settings = PLAIN | {"fan_in_fan_out": True}
    adapter = load_adapter(write_adapter(constant(config, 1), settings), config)
    assert "fan_in_fan_out" in adapter.notes[0]
    assert (adapter.apply(PATH, 0, np.zeros((2, config.hidden_size), np.float32)) == 1).all()


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_model_alone(config, write_adapter, start):
    settings = PLAIN | {"init_lora_weights": start}
    assert load_adapter(write_adapter(constant(config, 1), settings), config).paths


def test_first_pattern_that_matches_whole_segments_counts(config, write_adapter):
    for number, (patterns, scale) in enumerate(
        [
            ({"proj": 8}, 1),
            ({"q_proj": 8, ".*": 4}, 8),
            ({"k_proj": 8, "self_attn.[qv]_proj": 4}, 4),
            ({"^model.layers.0.*": 3}, 3),
            ({"layers.1.*": 3}, 1),
        ]
    ):
        settings = PLAIN | {"alpha_pattern": patterns}
        folder = write_adapter(constant(config, 1), settings, str(number))
        rows = np.zeros((1, config.hidden_size), np.float32)
        assert (load_adapter(folder, config).apply(PATH, 0, rows) == scale).all()
