"""`train` as a person uses it: plans, refusals, and a model from its first weights to a folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import qwen_jax
from qwen_jax.cli.console import size
from qwen_jax.cli.training import mesh_of
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.train import parameters_of
from tests.qwen_jax.cli.conftest import Outcome
from tests.qwen_jax.coded_folder import arrays_of, coded_model, scheme_from, write_coded

SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "eos_token_id": 60,
    "dtype": "float32",
}
FEW = {"--steps": "2", "--batch-size": "2", "--window": "8", "--warmup": "0"}

Train = Callable[..., Outcome]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a shape, and a text that repeats itself."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    np.save(folder / "text.npy", np.tile(np.arange(20, dtype=np.uint16), 10))
    return folder


@pytest.fixture
def train(run, place) -> Train:
    """Runs `train`, on the shape if no other model is named, and on the text."""

    def train(*arguments: str, model: Path = place / "config.json") -> Outcome:
        few = [part for flag in FEW.items() if flag[0] not in arguments for part in flag]
        return run("train", str(model), *arguments, "--text", str(place / "text.npy"), *few)

    return train


@pytest.mark.filterwarnings("ignore:.*is missing:UserWarning")
def test_a_new_model_then_its_routers(train, place, tmp_path):
    first, second = tmp_path / "new", tmp_path / "routers"
    watched = ("--held-out", str(place / "text.npy"), "--metrics", str(tmp_path / "m.jsonl"))
    outcome = train(str(first), "--weights", "new", "--json", *watched)
    assert outcome.code == 0, outcome.err
    assert "step 2 of 2: loss" in outcome.err
    report = json.loads(outcome.out)
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["loss"] == pytest.approx(report["loss"])
    assert lines[1]["held_out"] < lines[0]["loss"]

    only = ("--only", "*.mlp.gate.*", "--checkpoints", str(tmp_path / "saved"), "-q")
    outcome = train(str(second), *only, model=first)
    assert (outcome.code, outcome.err) == (0, "")
    assert "after 2 steps" in outcome.out
    before, after = (parameters_of(qwen_jax.load(folder)[0]) for folder in (first, second))
    moved = [name for name in before if not np.array_equal(before[name], after[name])]
    assert moved == ["layers.0.mlp.gate.weight"]
    outcome = train(str(tmp_path / "third"), *only, model=first)
    assert outcome.code == 2
    assert "--resume goes on with it" in outcome.err


def test_a_plan(train):
    outcome = train("--weights", "new", "--dry-run", "--json", "--lora-rank", "2")
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    # q, k, v, o, then two stacks of 4 experts: rank x (outputs + inputs) each.
    thin = 2 * (32 + 24 + 24 + 32) + 4 * 2 * (32 + 24)
    assert plan["trained"] == f"{thin:,} parameters"
    assert plan["run"] == "2 steps of 2 windows: 0.17 epochs"
    assert plan["text"] == "200 tokens, 24 windows of 8"


def test_a_plan_knows_what_is_in_codes(run, place, tmp_path):
    model = coded_model()
    write_coded(tmp_path / "coded", arrays_of(model), scheme_from(model))
    text = ("--dry-run", "--text", str(place / "text.npy"), "--window", "8", "--json")
    outcome = run("train", str(tmp_path / "coded"), *text)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--only: embed_tokens.weight, " in outcome.err and "in codes" in outcome.err
    outcome = run("train", str(tmp_path / "coded"), *text, "--only", "*.mlp.gate.*")
    assert outcome.code == 0, outcome.err
    plan = json.loads(outcome.out)
    assert plan["trained"] == "120 parameters"
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert plan["memory"] == f"about {size(held + 16 * 120)} beside activations"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no destination"),
        (("OUT", "--resume"), "--resume needs --checkpoints"),
        (("OUT", "--steps", "0"), "--steps is 0"),
        (("OUT", "--lr", "-1"), "--learning-rate is -1"),
        (("OUT", "--balance", "-1"), "--balance is -1"),
        (("OUT", "--expert-dropout", "1.5"), "--expert-dropout is 1.5"),
        (("OUT", "--gradient-routing", "3"), "--gradient-routing is 3"),
        (("OUT", "--window", "65"), "--window is 65, but the model's context is 64"),
        (("OUT", "--held-out", "none.txt"), "none.txt cannot be read"),
        (("OUT", "--lora-alpha", "2"), "without --lora-rank"),
        (("OUT", "--lora-rank", "2", "--only", "*"), "exclude each other"),
        (("OUT", "--data-devices", "64"), "--data-devices, --expert-devices: a mesh of 64 x 1"),
        (("OUT", "--seed", "-1"), "--seed is -1; accepted"),
        (("OUT", "--seed", "4294967296"), "--seed is 4294967296; accepted"),
        (("OUT", "--look-every", "1"), "--look-every needs --held-out"),
        (("OUT", "--data-devices", "0"), "a mesh of 0 x 1"),
        (("OUT", "--accumulate", "3"), "--accumulate is 3; accepted is a number from 1 on that"),
        (("OUT", "--only", "*.gates.*"), "--only: no parameter matches"),
        (("OUT", "--lora-rank", "2", "--lora-targets", "*.gates"), "--lora-targets: no matrix"),
        (("OUT", "--lora-rank", "99"), "--lora-rank, --lora-targets: rank is 99, but"),
        (("OUT", "--lora-rank", "0"), "--lora-rank is 0"),
        (("OUT", "--lora-rank", "2", "--lora-alpha", "0"), "--lora-alpha is 0"),
        (("OUT", "--final-rate", "2"), "--final-rate is 2"),
        (("OUT", "--warmup", "9"), "--warmup is 9; accepted is 0 to 2"),
        (("OUT", "--weight-decay", "-1"), "--weight-decay is -1"),
        (("OUT", "--clip", "0"), "--clip is 0"),
        (("OUT", "--window", "0"), "--window is 0"),
        (("OUT", "--batch-size", "0"), "--batch-size is 0"),
        (("OUT", "--router-z", "-1"), "--router-z is -1"),
        (("OUT", "--layer-balance", "nan"), "--layer-balance is nan"),
        (("OUT", "--look-every", "-1"), "--look-every is -1; accepted"),
        (("OUT", "--save-every", "-1", "--checkpoints", "OUT"), "--save-every is -1; accepted"),
        (("--dry-run", "--data-devices", "64"), "--expert-devices: a mesh of 64 x 1"),
        (("OUT", "--tokenizer", "nowhere"), "nowhere does not exist"),
    ],
)
def test_refused_before_any_work(train, tmp_path, arguments, message):
    named = [str(tmp_path / "out") if each == "OUT" else each for each in arguments]
    outcome = train(*named, "--weights", "new")
    assert outcome.code == (1 if "nowhere" in arguments else 2)
    assert message in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_names_flags(train, tmp_path):
    outcome = train(str(tmp_path / "out"), "--weights", "new", "--lr", "1e38", "--clip", "1e30")
    assert (outcome.code, outcome.out) == (1, "")
    assert "of step 2 is nan; lower --learning-rate or --clip" in outcome.err
    assert not (tmp_path / "out").exists()


def test_devices_share_evenly():
    """Of four devices, wherever these come from."""
    config = QwenConfig.from_hf(SHAPE)
    dense = dataclasses.replace(config, num_experts=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen_jax.sharding.device_mesh", lambda *sizes: sizes)
        assert mesh_of(1, 1, config, {"--batch-size": 3}) is None
        assert mesh_of(3, 4, config, {"--batch-size": 6}) == (3, 4)
        for devices, one, rows, words in (
            ((2, 1), config, 3, "--data-devices is 2, but --batch-size makes batches of 3"),
            ((1, 3), config, 3, "--expert-devices is 3, but a layer has 4 experts"),
            ((1, 2), dense, 3, "--expert-devices is 2, but a layer has no experts"),
        ):
            with pytest.raises(RequestError, match=words):
                mesh_of(*devices, one, {"--batch-size": rows})


def test_a_shape_has_no_weights_of_its_own(run, tmp_path, place):
    outcome = run("train", "Qwen3-30B-A3B", str(tmp_path / "x"), "--text", str(place / "text.npy"))
    assert outcome.code == 2
    assert "Qwen3-30B-A3B is a preset: a shape without weights" in outcome.err
    assert "--weights new" in outcome.err
