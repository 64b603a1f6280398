"""Direct preference optimisation against its formula in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.train import AdamW, Skeleton, Trainer, Training
from qwen_jax.train.preference import DirectPreference, Pairs, Preference, margins, rows_of
from tests.qwen_jax.train.conftest import stacked

PREFERENCES = [
    Preference([5, 6, 7], [8, 9], [10, 11, 12]),
    Preference([1], [2, 3, 4, 5, 6], [7]),
]
BETA = 0.5
VOCABULARY = 61


@pytest.fixture(scope="module")
def log_odds(skeleton, parameters) -> np.ndarray:
    """Of each answer, chosen ones first: [2, B], by the model as users call it, in float64."""
    model = Skeleton.of(skeleton).filled(parameters)
    found = []
    for answers in ("chosen", "rejected"):
        for one in PREFERENCES:
            tokens = [*one.prompt, *getattr(one, answers)]
            padded = np.zeros((1, 11), np.int32)
            padded[0, : len(tokens)] = tokens
            logits = np.asarray(model(padded, np.array([len(tokens)])).logits[0], np.float64)
            odds = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            places = range(len(one.prompt) - 1, len(tokens) - 1)
            found.append(sum(odds[i, tokens[i + 1]] for i in places))
    return np.array(found).reshape(2, -1)


@pytest.fixture(scope="module")
def pairs(log_odds) -> Pairs:
    """With a reference that is somewhat elsewhere."""
    margin = jnp.asarray(log_odds[0] - log_odds[1] - np.array([0.5, -2.0]), jnp.float32)
    return Pairs(*rows_of(PREFERENCES, 8, VOCABULARY), margin)


@pytest.mark.slow
def test_a_step_and_its_loss(skeleton, parameters, pairs, log_odds):
    trainer = Trainer(
        skeleton, Training(AdamW(decay=0.0), objective=DirectPreference(BETA), recompute=False)
    )
    batches = stacked(pairs, 2)
    _, found = trainer.steps(trainer.start(parameters), {}, batches, np.full(2, 1e-3, np.float32))
    wanted = np.mean(np.log1p(np.exp(-BETA * np.array([0.5, -2.0]))))
    assert float(found["loss"][0]) == pytest.approx(wanted, abs=1e-4)
    assert float(found["accuracy"][0]) == 0.5
    assert float(found["margin"][0]) == pytest.approx(-0.75, abs=1e-3)
    assert found["loss"][1] < found["loss"][0]
    assert found["margin"][1] > found["margin"][0]


def test_margins(skeleton, parameters, pairs, log_odds):
    frame = Skeleton.of(skeleton)
    found = jax.jit(lambda p, *rows: margins(frame.filled(p), *rows))(
        parameters, pairs.chosen, pairs.rejected
    )
    np.testing.assert_allclose(found, log_odds[0] - log_odds[1], atol=1e-4)


def test_answers_alone_are_scored():
    chosen, rejected = rows_of(PREFERENCES, 8, VOCABULARY)
    assert chosen.inputs[0].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert chosen.lengths.tolist() == [4, 5]
    assert chosen.targets[0][np.asarray(chosen.scored[0])].tolist() == [8, 9]
    assert rejected.targets[1][np.asarray(rejected.scored[1])].tolist() == [7]


def test_refusals():
    with pytest.raises(RequestError, match="there are no preferences"):
        rows_of([], 8, VOCABULARY)
    with pytest.raises(RequestError, match="preference 1 has a prompt of 0"):
        rows_of([PREFERENCES[0], dataclasses.replace(PREFERENCES[1], prompt=[])], 8, VOCABULARY)
    with pytest.raises(RequestError, match=r"prompt of 1 and an answer of 5 .* and 5 in all"):
        rows_of(PREFERENCES[1:], 4, VOCABULARY)
    with pytest.raises(RequestError, match="beta is 0"):
        DirectPreference(0)


@pytest.mark.parametrize("part", ["prompt", "chosen", "rejected"])
@pytest.mark.parametrize("value", [VOCABULARY, -1, 2.5, True, 2**40])
def test_what_is_no_id_is_refused(part, value):
    """An embedding of an id that it does not have is NaN, and so would be the margins."""
    wrong = dataclasses.replace(PREFERENCES[1], **{part: [3, value]})
    with pytest.raises(RequestError, match=f"preference 1, {part}, token 1 is {value}; .* 0 to 60"):
        rows_of([PREFERENCES[0], wrong], 8, VOCABULARY)
    last = dataclasses.replace(PREFERENCES[1], **{part: [3, np.int64(VOCABULARY - 1), 0]})
    rows_of([PREFERENCES[0], last], 8, VOCABULARY)
