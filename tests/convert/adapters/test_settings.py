"""`adapter_config.json`: what is understood, and what is refused by name."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.adapters import load_adapter
from qwen_jax.errors import CheckpointError

Q = "base_model.model.model.layers.0.self_attn.q_proj."
PATH = "layers.0.self_attn.q_proj.weight"
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
UPDATE = {f"{Q}lora_A.weight": np.ones((2, 16)), f"{Q}lora_B.weight": np.ones((16, 2))}
UPDATE = {key: value.astype(np.float32) for key, value in UPDATE.items()}


def kinds(message):
    return {kind: int(n) for kind, n in re.findall(r"^  (\S.*) \((\d+)\):$", message, re.M)}


@pytest.fixture(scope="session")
def dense(golden):
    return golden("qwen3_tokens").config


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"lora_bias": True},
        {"use_qalora": True},
        {"alora_invocation_tokens": [1, 2]},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"megatron_config": {"x": 1}},
        {"velora_config": {"num_groups": 64}},
        {"kasa_config": {"beta": 0.1}},
        {"monteclora_config": {"num_samples": 8}},
        {"use_bdlora": {"nblocks": 2}},
        {"arrow_config": {"top_k": 3}},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": []},
    ],
)
def test_settings_that_change_the_meaning(dense, refused, setting):
    message = refused(dense, UPDATE, **setting)
    assert kinds(message) == {"cannot be merged": 1}
    assert next(iter(setting)) in message


def test_settings_without_effect_or_with_a_neutral_value(dense, write_adapter):
    neutral = {
        **{"task_type": "CAUSAL_LM", "auto_mapping": {"base_model_class": "X"}, "revision": "main"},
        **{"base_model_name_or_path": "org/name", "inference_mode": True, "lora_dropout": 0.1},
        **{"target_modules": "all-linear", "exclude_modules": ["k_proj"], "use_dora": False},
        **{"layers_to_transform": [0], "layers_pattern": "layers", "megatron_config": None},
        **{"eva_config": {"rho": 2.0}, "loftq_config": {}, "layer_replication": None},
        **{"rank_pattern": None, "alpha_pattern": {}, "trainable_token_indices": None},
        **{"merge_weights": False, "enable_lora": None, "bias": "none", "peft_version": None},
    }
    assert load_adapter(write_adapter(UPDATE, PLAIN | neutral), dense).paths


def test_unknown_settings(dense, refused):
    message = refused(dense, UPDATE, use_next_lora=True, new_scale=0.5, new_flag=False)
    assert kinds(message) == {"unknown settings": 2}
    assert "use_next_lora is True" in message
    assert "new_scale is 0.5" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("r", value) for value in (0, -1, 2.5, "2", True, None, 2**40)),
        *(("lora_alpha", value) for value in ("4", True, float("nan"), float("inf"))),
        ("use_rslora", "yes"),
        *(("rank_pattern", value) for value in ([1], {"q_proj": 0}, {"q_proj": "1"}, {"(": 2})),
        ("alpha_pattern", {"q_proj": None}),
        *(("target_parameters", value) for value in ("a", [1])),
        ("modules_to_save", {"a": 1}),
        *(("trainable_token_indices", value) for value in ([1, 1], [-1], ["1"], {"x": 1}, 7)),
    ],
)
def test_malformed_settings(dense, refused, name, value):
    message = refused(dense, UPDATE, **{name: value})
    assert kinds(message)["malformed settings"] == 1
    assert name in message


@pytest.mark.parametrize("kind", ["LOHA", "ADALORA", "IA3", "PROMPT_TUNING", None, 3])
def test_other_kinds_of_adapters(dense, refused, kind):
    message = refused(dense, UPDATE, peft_type=kind)
    assert f"peft_type is {kind}" in message
    assert "only LORA" in message


def test_missing_and_other_files(dense, tmp_path):
    def message():
        with pytest.raises(CheckpointError) as caught:
            load_adapter(tmp_path, dense)
        return str(caught.value)

    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "adapter_config.json").touch()
    assert "no adapter_config.json" in message()
    assert "There is one in: checkpoint-7" in message()
    for content in ("", "[1]", "{", '{"r": 1, "r": 2}', "[" * 10_000):
        (tmp_path / "adapter_config.json").write_text(content)
        assert "adapter_config.json" in message()
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN))
    (tmp_path / "adapters.safetensors").touch()
    assert "no adapter_model.safetensors; it has adapters.safetensors" in message()
    (tmp_path / "adapter_model.bin").touch()
    assert "adapter_model.bin, a PyTorch pickle" in message()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      x")
    assert "adapter_model.safetensors: " in message()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
FIELDS = [
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters"),
    *("modules_to_save", "trainable_token_indices", "peft_version", "bias", "init_lora_weights"),
    *("fan_in_fan_out", "use_dora", "unknown", "peft_type"),
]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))
def test_any_settings_are_merged_or_refused(dense, write_adapter, tmp_path, changes):
    folder = tmp_path / "adapter"
    if not folder.exists():
        write_adapter(UPDATE)
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
    try:
        adapter = load_adapter(folder, dense)
    except CheckpointError:
        return
    adapter.apply(PATH, 0, np.ones((16, 16), np.float32))
