"""Conversion and export give back every released layout bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.diff import diff
from convert.from_hf import plan_conversion
from convert.run import run
from convert.side_files import written_config
from convert.source import open_source
from convert.to_hf import plan_export
from qwen_jax.checkpoint.mapping import Layout
from qwen_jax.checkpoint.native import read_record
from qwen_jax.checkpoint.tensors import stored_tensors
from qwen_jax.config import QwenConfig
from tests.golden.weights import case_names, load_case, write_checkpoint

BF16 = ml_dtypes.bfloat16


def tensors(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def convert(source: Path, destination: Path, shard: int = 100_000, **options) -> Path:
    run(plan_conversion(source, **options), destination, max_shard_bytes=shard)
    return destination


def export(source: Path, destination: Path, shard: int = 100_000, **options) -> Path:
    run(plan_export(source, **options), destination, max_shard_bytes=shard)
    return destination


def text_only(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of a release under the keys of a model without vision."""
    return {
        key.replace("model.language_model.", "model."): array
        for key, array in tensors(folder).items()
        if "visual" not in key
    }


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert found[key].dtype == array.dtype, key
        assert found[key].shape == array.shape, key
        assert found[key].tobytes() == array.tobytes(), key


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:.*(yarn factor|float16):UserWarning")
@pytest.mark.parametrize("name", case_names())
def test_golden_checkpoints_come_back_bit_for_bit(name, tmp_path):
    source = write_checkpoint(tmp_path / "source", load_case(name)[0], shards=3)
    native = convert(source, tmp_path / "native")
    exported = export(native, tmp_path / "exported")
    assert_same(tensors(exported), text_only(source))
    assert QwenConfig.from_hf(exported) == QwenConfig.from_hf(source)
    assert diff(open_source(source), open_source(exported)).equal
    assert diff(open_source(source), open_source(native)).equal


def test_converting_twice_changes_nothing(demo_path, tmp_path):
    once = convert(demo_path, tmp_path / "once", 1_000_000)
    twice = convert(once, tmp_path / "twice", 1_000_000)
    assert files(once) == files(twice)
    assert len(list(once.glob("*.safetensors"))) > 3


def test_the_bundled_model_comes_back_with_all_its_files(demo_path, tmp_path):
    exported = export(convert(demo_path, tmp_path / "native"), tmp_path / "exported")
    assert_same(tensors(exported), text_only(demo_path))
    beside = {name: data for name, data in files(demo_path).items() if name.endswith(".json")}
    for name in beside.keys() - {"config.json", "model.safetensors.index.json"}:
        assert (exported / name).read_bytes() == beside[name]
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors(exported).keys()
    assert index["metadata"] == {"total_size": sum(a.nbytes for a in tensors(exported).values())}


FIELDS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def write(folder: Path, layout: Layout, *, model_type: str, visual: int = 0, mtp: int = 1) -> Path:
    """Writes a tiny hybrid model of random bits, in a layout; with vision it is composite."""
    fields = {"model_type": model_type, **FIELDS, "mtp_num_hidden_layers": mtp}
    config = QwenConfig.from_hf(fields)
    rng = np.random.default_rng(0)
    arrays = {}
    for key, tensor in stored_tensors(config, layout, mtp).items():
        bits = rng.integers(0, 1 << 16, tensor.shape, dtype=np.uint16)
        arrays[key] = bits.view(BF16)
    for number in range(visual):
        arrays[f"model.visual.blocks.{number}.norm1.weight"] = np.full(3, number, np.float32)
    folder.mkdir()
    save_file(arrays, folder / "model.safetensors")
    if visual:
        fields = {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": model_type.removesuffix("_text"),
            "text_config": {**fields, "eos_token_id": 7},
            "vision_config": {"depth": visual},
            "image_token_id": 39,
            "eos_token_id": [3, 7],
            "tie_word_embeddings": False,
        }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


LAYOUTS = {
    "next": (
        "qwen3_next",
        Layout("model.", "", "per_expert", "interleaved", "split", "per_expert"),
    ),
    "3.5 bf16": ("qwen3_5_moe_text", Layout("model.language_model.", mtp_experts="per_expert")),
    "3.6 bf16": ("qwen3_5_moe_text", Layout("model.language_model.")),
    "3.6 per expert": (
        "qwen3_5_moe_text",
        Layout("model.language_model.", "", "per_expert", "split", "split", "per_expert"),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_released_layouts_with_an_mtp_head_come_back(name, tmp_path):
    model_type, layout = LAYOUTS[name]
    source = write(tmp_path / "source", layout, model_type=model_type, visual=2 * (name != "next"))
    plan = plan_conversion(source)
    native = convert(source, tmp_path / "native")
    assert len(plan.tensors) == len(tensors(native))
    exported = export(native, tmp_path / "exported")
    record = read_record(native)
    assert record is not None
    kept = dataclasses.replace(layout, prefix="model.")
    assert record.layout == kept
    assert_same(tensors(exported), text_only(source))
    assert diff(open_source(source), open_source(exported)).equal


def test_all_layouts_convert_to_the_same_tensors(tmp_path):
    source = write(tmp_path / "source", LAYOUTS["3.6 bf16"][1], model_type="qwen3_5_moe_text")
    found = []
    for experts in ("fused", "per_expert"):
        regrouped = export(source, tmp_path / experts, experts=experts)
        kinds = {".experts.4." in key for key in tensors(regrouped) if "down_proj" in key}
        assert (True in kinds) == (experts == "per_expert")
        found.append(tensors(convert(regrouped, tmp_path / f"native {experts}")))
    assert_same(found[0], found[1])


def test_with_the_vision_tower_the_whole_release_comes_back(tmp_path):
    layout = LAYOUTS["3.6 bf16"][1]
    source = write(tmp_path / "source", layout, model_type="qwen3_5_moe_text", visual=3)
    native = convert(source, tmp_path / "native", keep_visual=True)
    exported = export(native, tmp_path / "exported")
    assert_same(tensors(exported), tensors(source))
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, exported))
    assert after == before | {"text_config": before["text_config"] | {"tie_word_embeddings": False}}
    difference = diff(open_source(source), open_source(exported))
    assert difference.equal
    assert difference.left_out == ({}, {})


def test_without_the_vision_tower_nothing_announces_it(tmp_path):
    layout = LAYOUTS["3.6 bf16"][1]
    source = write(tmp_path / "source", layout, model_type="qwen3_5_moe_text", visual=3)
    native = convert(source, tmp_path / "native")
    config = json.loads((native / "config.json").read_text())
    assert "vision_config" not in config
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["model_type"] == "qwen3_5_moe_text"
    assert sorted(config["eos_token_id"]) == [3, 7]
    assert QwenConfig.from_hf(native) == QwenConfig.from_hf(source)
    record = read_record(native)
    assert record is not None
    assert record.skipped == {"visual": 3}


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "float32"),
        ({"torch_dtype": "float32"}, {"dtype": "bfloat16"}, "float32"),
        ({"dtype": None}, {"torch_dtype": "float32"}, "float32"),
        ({}, {"dtype": "float32"}, "float32"),
    ],
)
def test_the_dtype_of_the_text_part_goes_before_the_outer_one(inner, outer, expected, tmp_path):
    layout = LAYOUTS["3.6 bf16"][1]
    source = write(tmp_path / "source", layout, model_type="qwen3_5_moe_text", visual=1)
    fields = json.loads((source / "config.json").read_text())
    del fields["text_config"]["dtype"]
    fields["text_config"] |= inner
    (source / "config.json").write_text(json.dumps(fields | outer))
    native = convert(source, tmp_path / "native")
    assert QwenConfig.from_hf(native).dtype == expected
    assert diff(open_source(source), open_source(native)).equal


def test_the_mtp_head_can_stay_behind(tmp_path):
    source = write(tmp_path / "source", LAYOUTS["3.5 bf16"][1], model_type="qwen3_5_moe_text")
    native = convert(source, tmp_path / "native", drop_mtp=True)
    assert not [key for key in tensors(native) if key.startswith("mtp.")]
    assert QwenConfig.from_hf(native).mtp_num_hidden_layers == 0


def test_experts_keep_their_numbers(tmp_path):
    source = write(tmp_path / "source", LAYOUTS["3.6 per expert"][1], model_type="qwen3_5_moe_text")
    arrays = tensors(source)
    for key in arrays:
        if ".experts." in key:
            arrays[key] = np.full_like(arrays[key], int(key.split(".experts.")[1].split(".")[0]))
    save_file(arrays, source / "model.safetensors")
    native = convert(source, tmp_path / "native")
    for key, array in tensors(native).items():
        if ".experts." in key:
            for expert in range(5):
                assert (array[expert] == expert).all()
    assert_same(tensors(export(native, tmp_path / "exported")), text_only(source))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_stored_dtypes_are_kept(dtype, tmp_path):
    source = write(tmp_path / "source", LAYOUTS["next"][1], model_type="qwen3_next")
    arrays = {key: array.view(np.uint16) for key, array in tensors(source).items()}
    if dtype is np.float32:
        arrays = {key: (array.astype(np.uint32) << 13) + 5 for key, array in arrays.items()}
    arrays = {key: array.view(dtype) for key, array in arrays.items()}
    key = "model.layers.0.linear_attn.A_log"
    arrays[key] = np.arange(4, dtype=np.float32)
    save_file(arrays, source / "model.safetensors")
    native = convert(source, tmp_path / "native")
    assert_same(tensors(export(native, tmp_path / "exported")), arrays)


def test_half_precision_of_a_dequantised_release_is_not_kept():
    raw = {"dtype": "float16", "text_config": {"torch_dtype": "float16"}, "quantization_config": {}}
    config = QwenConfig.from_hf({"model_type": "qwen3_next", **FIELDS})
    for vision in (True, False):
        written = written_config(raw, config, vision=vision, changes={}, dequantised=True)
        assert "float16" not in json.dumps(written).replace("bfloat16", "")
