"""Trained models as folders: new ones, and those that went on from a release."""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import qwen_jax
from convert.run import run
from convert.trained import plan_trained, write_new
from qwen_jax import QwenConfig, initialise
from qwen_jax.errors import RequestError
from qwen_jax.train import parameters_of
from tests.convert.sources import FIELDS
from tests.golden.weights import load_case, write_checkpoint


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """By key; without a vision tower, the export has no prefix of one."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return {key.replace("model.language_model.", "model."): x for key, x in found.items()}


@pytest.fixture(scope="module", params=["qwen3_5_moe_text", "qwen3_next", "qwen3_moe"])
def new(request, tmp_path_factory) -> tuple[QwenConfig, dict[str, np.ndarray], Path]:
    """A model with random weights, and the folder written of it."""
    fields = FIELDS | {"model_type": request.param}
    if request.param == "qwen3_moe":
        fields = {name: value for name, value in fields.items() if "linear" not in name}
        fields |= {"layer_types": None, "shared_expert_intermediate_size": 0}
        fields = {name: value for name, value in fields.items() if value}
        del fields["partial_rotary_factor"]
    config = QwenConfig.from_hf(fields | {"intermediate_size": 8, "norm_topk_prob": True})
    model = initialise(config, jax.random.key(3))
    arrays = {name: np.asarray(value) for name, value in parameters_of(model).items()}
    folder = tmp_path_factory.mktemp("new") / "model"
    demo = Path(qwen_jax.__path__[0]) / "demo"
    write_new(config, arrays, folder, tokenizer=demo, max_shard_bytes=8000)
    return config, arrays, folder


@pytest.mark.filterwarnings("ignore:.*config.json:UserWarning")
def test_a_new_model_is_loaded_as_it_was(new):
    config, arrays, folder = new
    model, tokenizer = qwen_jax.load(folder)
    assert tokenizer is not None
    for name, value in parameters_of(model).items():
        assert np.asarray(value).tobytes() == arrays[name].tobytes(), name
    assert model.config.model_type == config.model_type
    assert not (folder / "README.md").exists()
    assert len(list(folder.glob("*.safetensors"))) > 1


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore")
def test_transformers_computes_the_same_with_it(new):
    import torch
    import transformers

    _, _, folder = new
    tokens = np.arange(2, 22)[None]
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens)).logits.numpy()
    ours, _ = qwen_jax.load(folder, dtype="float32")
    found = np.asarray(ours(tokens.astype(np.int32)).logits)
    assert np.abs(found - wanted).max() <= 1e-3 * wanted.std()


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe_tied"])
def test_what_was_not_trained_stays_bit_for_bit(name, tmp_path):
    source = write_checkpoint(tmp_path / "source", load_case(name)[0])
    model, _ = qwen_jax.load(source)
    gates = {n: x for n, x in parameters_of(model).items() if n.endswith("mlp.gate.weight")}
    assert gates
    trained = {name: np.asarray(x, np.float32) + 1e-3 for name, x in gates.items()}
    run(plan_trained(source, trained), tmp_path / "after", max_shard_bytes=10**6)
    before, after = tensors(source), tensors(tmp_path / "after")
    changed = [key for key in before if before[key].tobytes() != after[key].tobytes()]
    assert before.keys() == after.keys()
    assert len(changed) == len(gates)
    assert all(key.endswith("mlp.gate.weight") for key in changed)
    again, _ = qwen_jax.load(tmp_path / "after")
    for path, value in trained.items():
        found = np.asarray(parameters_of(again)[path])
        np.testing.assert_array_equal(found, value.astype(found.dtype))
        assert found.dtype in (ml_dtypes.bfloat16, np.float32)


def test_parameters_of_another_model(new, tmp_path):
    config, arrays, folder = new
    wrong = dict(list(arrays.items())[1:]) | {"layers.0.mlp.gates": np.zeros(3)}
    with pytest.raises(RequestError, match=r"embed_tokens.* missing.*mlp\.gates.* unknown"):
        write_new(config, wrong, tmp_path / "x", tokenizer=None)
    with pytest.raises(RequestError, match="no parameters"):
        plan_trained(folder, {"embed_tokens.weight": np.zeros((2, 2), np.float32)})
