"""`benchmarks/accuracy.py` in small: what it compares, and that it notices what is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accuracy
from benchmarks.accuracy_cases import RandomSizes, TrainedSizes, random_cases, trained_cases
from benchmarks.accuracy_figures import bit_equal, distance, unchanged, verdict
from benchmarks.accuracy_runs import Runs
from qwen_jax import QwenConfig, initialise
from qwen_jax.errors import RequestError
from tests.qwen_jax.conftest import TINY

RANDOM = RandomSizes(lengths=(9, 1, 4), longest=8, width=32, room=32, batches=(1, 2, 3), steps=2)
# One shape for all that is alone, so that few programs are compiled.
TRAINED = TrainedSizes(tokens=9, windows=2, width=32, new=4, together=8)
TEXT = np.arange(20, dtype=np.uint16)
PROMPTS = {"short": [5, 7], "long": [1, 2, 3, 4, 5, 6]}
KL = ("kernels against reference", "kernels against float32", "reference against float32")


@pytest.fixture(scope="module")
def model():
    """The tiny model's layer that compiles fastest."""
    layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    return initialise(QwenConfig.from_hf(TINY | layer), jax.random.key(0))


@pytest.fixture(scope="module")
def runs(model):
    """The reference three times: off a GPU the kernels' path is it, and the model is in float32."""
    return Runs(model)


@pytest.fixture(scope="module")
def cases(runs):
    found = dict(random_cases(runs, RANDOM))
    return found | dict(trained_cases(runs, TEXT, PROMPTS, TRAINED))


def compared(cases):
    return {name: row for name, row in cases.items() if "bar_is" in row}


def test_the_reference_is_equal_to_itself(cases):
    assert [*cases] == [
        "9 random tokens",
        "2 steps, batch 1",
        "2 steps, batch 2",
        "2 steps, batch 3",
        "same run three times, batch 1",
        "same run three times, batch 3",
        "alone against batch 2, 16 positions",
        "9 held-out tokens",
        "2 x 9 held-out tokens",
        "greedy tokens, batch 1",
        "greedy tokens, batch 2",
    ]
    assert all(row["right"] for row in cases.values())
    rows = [row[pair]["rows"] for row in compared(cases).values() for pair in KL[:1]]
    assert rows == [9, 2, 4, 6, 9, 18]
    for row in compared(cases).values():
        for pair in KL:
            assert row[pair]["max_kl"] < 1e-9
            assert row[pair]["same_tokens"] == 1
    greedy = cases["greedy tokens, batch 2"]
    assert greedy["tokens"] == 8
    assert greedy["largest_margin_of_a_change"] is None
    json.dumps(cases, allow_nan=False)


def test_other_weights_are_noticed(runs, model, cases, monkeypatch):
    flat, weight = runs.flat["kernels"], model.norm.weight.get_value()
    # Some channels of the last norm.
    other = weight.at[:8].add(1)
    leaves = [other if leaf is weight else leaf for leaf in flat.leaves]
    monkeypatch.setitem(runs.flat, "kernels", dataclasses.replace(flat, leaves=leaves))
    found = dict(random_cases(runs, RANDOM))
    found |= dict(trained_cases(runs, TEXT, PROMPTS, TRAINED))
    wrong = {name for name, row in found.items() if not row["right"]}
    assert wrong == {*compared(cases), "greedy tokens, batch 1", "greedy tokens, batch 2"}


def test_what_is_not_the_same_twice_is_noticed(runs, monkeypatch):
    step, calls = runs.step, iter(range(1000))

    def unsteady(path, batch, cache, tokens):
        logits, cache = step(path, batch, cache, tokens)
        return logits + 1e-6 * next(calls), cache

    monkeypatch.setattr(runs, "step", unsteady)
    row = dict(random_cases(runs, RANDOM))["same run three times, batch 1"]
    assert not row["right"]
    assert [name for name, equal in row["equal"].items() if not equal] == [
        "step logits",
        "logits behind the loop",
    ]


def test_figures_are_those_of_their_formulas():
    draw = np.random.default_rng(0)
    base = draw.normal(size=(2, 3, 11)).astype(np.float32)
    found = base + draw.normal(size=base.shape).astype(np.float32) * 0.3
    row = distance([jnp.asarray(found)], [jnp.asarray(base)])
    b, a = base.reshape(6, 11).astype(np.float64), found.reshape(6, 11).astype(np.float64)
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (b, a))
    kl = (p * np.log(p / q)).sum(-1)
    top = np.sort(b, axis=-1)
    margin = (top[:, -1] - top[:, -2]) / b.std()
    same = a.argmax(-1) == b.argmax(-1)
    assert 0 < same.sum() < 6
    wanted = {
        "rows": 6,
        "relative_error": np.linalg.norm(a - b) / np.linalg.norm(b),
        "mean_kl": kl.mean(),
        "median_kl": np.median(kl),
        "max_kl": kl.max(),
        "same_tokens": same.mean(),
        "clear_rows": (margin > 0.1).sum(),
        "same_tokens_where_clear": same[margin > 0.1].mean(),
        "largest_margin_of_a_change": margin[~same].max(),
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(
    ("kernels", "exact", "own", "bar", "right"),
    [
        (9e-4, 9e-4, 1e-4, 1e-3, True),
        (2e-3, 9e-4, 1e-4, 1e-3, False),
        (9e-4, 2e-3, 1e-4, 1e-3, False),
        (2e-3, 9e-4, 3e-3, 3e-3, True),
        (2e-3, 2e-3, 3e-3, 3e-3, False),
        (4e-3, 9e-4, 3e-3, 3e-3, False),
        (float("nan"), 1e-4, 1e-4, 1e-3, False),
        (1e-4, 1e-4, float("nan"), 1e-3, True),
    ],
)
def test_bfloat16_itself_is_the_bar_where_it_costs_more(kernels, exact, own, bar, right):
    row = {name: {"mean_kl": kl} for name, kl in zip(KL, (kernels, exact, own), strict=True)}
    found = verdict(row)
    assert (found["bar"], found["right"]) == (bar, right)
    assert found["bar_is"] == ("fixed" if bar == 1e-3 else KL[2])


def test_a_change_of_a_clear_token_is_wrong():
    base = jnp.zeros((500, 7)).at[:, 0].set(1e-2).at[0, 0].set(0.1)
    assert unchanged([base], [base])["right"]
    changed = base.at[0, 1].set(0.11)
    row = unchanged([changed], [base])
    assert row["mean_kl"] < 1e-3
    assert not row["right"]


def test_bits_are_compared():
    one = {"logits": np.zeros(3, np.float32), "tokens": np.arange(3)}
    other = one | {"logits": np.array([0, 0, 1e-45], np.float32)}
    assert bit_equal([one, one])["right"]
    assert bit_equal([one, one, other])["equal"] == {"logits": False, "tokens": True}


def test_result_names_no_place_of_this_machine(tmp_path):
    given = ["--checkpoint", "demo", str(tmp_path / "mine"), "--prompts", str(tmp_path / "p.json")]
    found = accuracy.description(accuracy._parser().parse_args([*given, "--commit", "abc"]))
    text = json.dumps(found)
    assert str(tmp_path) not in text and str(Path.cwd()) not in text
    assert found["commit"] == "abc"
    assert found["command"] == (
        "python benchmarks/accuracy.py --checkpoint demo mine --prompts p.json"
    )


def test_files_that_will_not_do_are_refused(tmp_path):
    np.save(tmp_path / "few.npy", np.arange(514))
    with pytest.raises(RequestError, match=r"few\.npy holds int64 \(514,\); needed are 515"):
        accuracy.read_text(tmp_path / "few.npy")
    content = {"prompts": {"a": [1], "b": [1] * 257}, "greedy": {"b": []}}
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(RequestError, match=r"'b' of p\.json has 257 tokens; accepted are 1 to 256"):
        accuracy.read_prompts(tmp_path / "p.json")
    (tmp_path / "none.json").write_text(json.dumps({"prompts": {"a": [1]}, "greedy": {}}))
    with pytest.raises(RequestError, match=r"none\.json names no prompts"):
        accuracy.read_prompts(tmp_path / "none.json")
