"""Folders in codes: loaded as they are, compared with their checksums, refused where they lie."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import qwen_jax
from qwen_jax.checkpoint.checksums import QUANTIZATION
from qwen_jax.checkpoint.formats import quantisation, read_scheme
from qwen_jax.checkpoint.parameters import abstract_parameters, load_parameters
from qwen_jax.checkpoint.plan import plan_load
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError, RequestError
from qwen_jax.quant import QTensor, Scheme, TensorScheme, WeightFormat, in_codes
from tests.qwen_jax.coded_folder import arrays_of, coded_model, scheme_from, write_coded

UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def model():
    """A random model in codes, one matrix of which has factors of its inputs."""
    model = coded_model()
    query = model.layers[0].self_attn.q_proj.weight
    factor = jnp.linspace(0.5, 2, 40, dtype=jnp.float32)
    query.set_value(dataclasses.replace(query.get_value(), input_scale=factor))
    return model


@pytest.fixture
def parts(model):
    """Tensors of a folder, free to be changed, and its scheme."""
    return arrays_of(model), scheme_from(model)


@pytest.fixture
def folder(parts, tmp_path) -> Path:
    return write_coded(tmp_path / "codes", *parts)


def leaves(model):
    return {
        ".".join(map(str, path)): variable.get_value()
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_arrive_as_they_are(folder, model, dtype):
    loaded, _ = qwen_jax.load(folder, dtype=dtype, bits=3)

    assert loaded.config.dtype == dtype
    for path, wanted in leaves(model).items():
        actual = leaves(loaded)[path]
        if isinstance(wanted, QTensor):
            assert jax.tree.structure(actual) == jax.tree.structure(wanted)
            for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
                assert a.dtype == w.dtype
                np.testing.assert_array_equal(np.asarray(a), np.asarray(w))
        else:
            assert actual.dtype == dtype
    tokens = np.arange(9)[None]
    assert np.isfinite(np.asarray(loaded(tokens, capture="none").logits)).all()


def test_the_bytes_on_the_device_are_those_of_the_file(folder):
    plan = plan_load(open_folder(folder), qwen_jax.QwenConfig.from_hf(folder))
    targets = in_codes(abstract_parameters(plan.config), plan.scheme)
    told = {}

    arrays = load_parameters(plan, targets, progress=told.__setitem__)

    assert sum(told.values()) == plan.nbytes == plan.folder.nbytes
    assert told == {path: array.nbytes for path, array in arrays.items()}


def refusal(folder: Path, kind: type[Exception] = CheckpointError, **options) -> str:
    with pytest.raises(kind) as error:
        qwen_jax.load(folder, **options)
    return str(error.value)


def test_other_bits_are_refused_with_the_right_call(folder, demo_path):
    text = refusal(folder, RequestError, bits=16)
    assert "3-bit codes" in text and "bits=3" in text and str(folder) in text
    assert "bits=3" in refusal(folder, RequestError, bits=4)
    text = refusal(demo_path, RequestError, bits=3)
    assert "no codes" in text and "bits=16" in text and "qwen-jax quantize" in text
    assert "3, 4, 8, 16" in refusal(folder, RequestError, bits=5)


def test_all_that_does_not_fit_is_in_one_error(parts, tmp_path):
    arrays, scheme = parts
    del arrays[f"{UP}.scale"]
    arrays[f"{DOWN}.codes"] = arrays[f"{DOWN}.codes"][..., :1].copy()
    arrays[f"{DOWN}.zero"] = arrays[f"{DOWN}.zero"].astype(np.float32)
    arrays[f"{UP}.zero"] = np.zeros(3, np.float32)
    arrays["model.embed_tokens.weight"] = np.zeros((4096, 40), np.float32)
    tensors = dict(scheme.tensors) | {
        "layers.7.mlp.experts.down_proj": TensorScheme(WeightFormat(3, 32)),
        "layers.0.mlp.gate.weight": TensorScheme(WeightFormat(3, 32)),
        "mtp.layers.0.mlp.experts.down_proj": TensorScheme(WeightFormat(3, 32)),
    }
    text = refusal(write_coded(tmp_path / "codes", arrays, Scheme("mine", tensors)))
    for words in (
        f"missing (1):\n    {UP}.scale (quantization_config has it in codes)",
        f"{DOWN}.codes has shape [3, 40, 4, 1], expected [3, 40, 4, 2] for 4 bits in groups of 32",
        f"{DOWN}.zero is F32; accepted: BF16",
        f"{UP}.zero",
        "model.embed_tokens.weight",
        "layers.7.mlp.experts.down_proj",
        "layers.0.mlp.gate.weight [3, 40] is not in codes in any model",
    ):
        assert words in text, (words, text)
    assert "mtp." not in text


def test_codes_without_a_configuration_and_the_reverse(parts, tmp_path):
    arrays, scheme = parts
    folder = write_coded(tmp_path / "a", arrays, scheme)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "no quantization_config" in refusal(folder)

    whole = {key.removesuffix(".codes"): np.zeros(1, np.float32) for key in arrays}
    assert "no tensor is in codes" in refusal(write_coded(tmp_path / "b", whole, scheme))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 1}, "this program reads 2"),
        ({"recipe": None}, "recipe is null"),
        ({"tensors": {"layers.0.mlp.experts.down_proj": {"bits": 5}}}, "lacks group_size"),
    ],
)
def test_a_wrong_configuration_is_refused_by_its_file(folder, change, words):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    text = refusal(folder)
    assert words in text and "config.json" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{UP}.scale", 0.0),
        (f"{UP}.scale", -0.0),
        (f"{UP}.scale", np.nan),
        (f"{DOWN}.scale", -np.inf),
        (f"{DOWN}.zero", np.nan),
        ("model.layers.0.self_attn.q_proj.weight.input_scale", 0.0),
        ("model.layers.0.self_attn.q_proj.weight.input_scale", np.inf),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(parts, tmp_path, key, value):
    arrays, scheme = parts
    arrays[key] = arrays[key].copy()
    arrays[key].flat[1] = value
    arrays[key].flat[-1] = value
    text = refusal(write_coded(tmp_path / "codes", arrays, scheme))
    assert f"2 of the {arrays[key].size} numbers in {key} are" in text


def test_a_zero_point_may_be_zero(parts, tmp_path):
    arrays, scheme = parts
    arrays[f"{DOWN}.zero"] = np.zeros(arrays[f"{DOWN}.zero"].shape, ml_dtypes.bfloat16)
    qwen_jax.load(write_coded(tmp_path / "codes", arrays, scheme))


def test_another_content_is_found_by_its_checksum(folder, model):
    file, data = folder / "model.safetensors", bytearray()
    data += file.read_bytes()
    info = open_folder(folder).tensors[f"{UP}.codes"]
    data[info.start + 5] ^= 1
    file.write_bytes(data)
    text = refusal(folder)
    assert f"{UP}.codes are not what conversion.json says" in text
    assert f"{DOWN}.codes" not in text


def test_a_folder_without_checksums_is_refused(folder):
    record = json.loads((folder / "conversion.json").read_text())
    del record["checksums"][f"{UP}.codes"]
    (folder / "conversion.json").write_text(json.dumps(record))
    assert f"no checksum of {UP}.codes" in refusal(folder)
    (folder / "conversion.json").unlink()
    assert "has no conversion.json" in refusal(folder)


@pytest.fixture
def recorded(folder) -> Path:
    """With a tokenizer, and checksums of all that is beside the tensors."""
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    options = ("add_prefix_space", "trim_offsets", "use_regex")
    byte_level = {"type": "ByteLevel", **dict.fromkeys(options, True)}
    content = {
        "tokenizer.json": json.dumps({"version": "1.0", "model": words, "decoder": byte_level}),
        "tokenizer_config.json": json.dumps({"eos_token": "b"}),
    }
    for name, text in content.items():
        (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
    content[QUANTIZATION] = json.dumps(scheme, sort_keys=True)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in content.items()}
    edit(folder / "conversion.json", lambda record: record.update(files=digests))
    return folder


def edit(file: Path, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "file", "change"),
    [
        ("tokenizer.json", "tokenizer.json", lambda c: c["model"]["vocab"].update(a=1, b=0)),
        ("tokenizer_config.json", "tokenizer_config.json", lambda c: c.update(eos_token="a")),
        (QUANTIZATION, "config.json", lambda c: c["quantization_config"].update(recipe="other")),
    ],
)
def test_other_files_than_were_written_are_refused_or_accepted_by_name(
    recorded, name, file, change
):
    qwen_jax.load(recorded)
    edit(recorded / file, change)
    text = refusal(recorded)
    assert f"written there: {name};" in text
    edit(recorded / "conversion.json", lambda record: record["files"].pop(name))
    qwen_jax.load(recorded)


def test_a_tokenizer_that_is_gone_is_refused(recorded):
    (recorded / "tokenizer.json").unlink()
    assert "written there: tokenizer.json;" in refusal(recorded)


def test_what_may_change_beside_the_tensors(recorded):
    (recorded / "chat_template.jinja").write_text("other")
    config = json.loads((recorded / "config.json").read_text())
    config["quantization_config"] = dict(reversed(config["quantization_config"].items()))
    (recorded / "config.json").write_text(json.dumps(config | {"_name_or_path": "x"}, indent=4))
    qwen_jax.load(recorded)


@pytest.mark.parametrize("files", [{"../config.json": "0" * 64}, {"a": "0"}, []])
def test_a_record_of_odd_files_is_damaged(recorded, files):
    edit(recorded / "conversion.json", lambda record: record.update(files=files))
    assert "the record is damaged: files is" in refusal(recorded)


def test_targets_must_be_in_codes_as_the_folder_is(folder):
    plan = plan_load(open_folder(folder), qwen_jax.QwenConfig.from_hf(folder))
    plain = abstract_parameters(plan.config)
    with pytest.raises(CheckpointError, match="down_proj is in codes, the target not"):
        load_parameters(plan, plain)
    tensors = {
        path: dataclasses.replace(how, format=WeightFormat(8, 32))
        for path, how in plan.scheme.tensors.items()
    }
    with pytest.raises(CheckpointError, match="has parts"):
        load_parameters(plan, in_codes(plain, Scheme("mine", tensors)))


def test_a_scheme_is_read_without_the_weights(folder):
    assert read_scheme(folder, ()).bits == 3
    assert quantisation(folder, open_folder(folder).tensors) is None  # of another program
    assert read_scheme(folder / "nowhere", ()) == Scheme()


def test_too_small_a_device_is_told_the_bytes_of_the_codes(folder, monkeypatch):
    monkeypatch.setattr("qwen_jax.memory.available_memory", lambda: 100)
    with pytest.raises(qwen_jax.errors.MemoryLimitError, match="3-bit codes and float32"):
        qwen_jax.load(folder)
