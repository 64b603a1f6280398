"""Statistics against loops over tokens, and cases that can be seen by eye."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.model import RoutingTrace
from qwen_jax.research import RoutingCounts
from qwen_jax.research import statistics as stats

EXPERTS, SLOTS, TOKENS = 6, 3, 200


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    """Two layers of distinct choices; every tenth slot is empty."""
    random = np.random.default_rng(4)
    ids = random.random((2, TOKENS, EXPERTS)).argsort(-1)[..., :SLOTS].astype(np.int32)
    return np.where(random.random(ids.shape) < 0.1, EXPERTS, ids).astype(np.int32)


def counts(chosen, probability, tokens: int) -> RoutingCounts:
    layers = tuple(range(len(chosen)))
    chosen = jnp.asarray(chosen, jnp.int32)
    probability = None if probability is None else jnp.asarray(probability, jnp.float32)
    return RoutingCounts(chosen, jnp.zeros(chosen.shape), probability, jnp.int32(tokens), layers)


def test_load_entropy_and_variation():
    shares = stats.load(np.array([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0]]))
    np.testing.assert_allclose(shares[2], [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(stats.entropy(shares), [math.log(4), 0, math.log(2)])
    np.testing.assert_allclose(stats.variation(shares), [0, math.sqrt(3), 1])
    assert np.isnan(stats.load(np.zeros((1, 3), int))).all()


def test_counts_are_those_of_a_loop(ids):
    found = stats.counts_of(ids, EXPERTS)
    for layer in range(2):
        for expert in range(EXPERTS):
            assert found[layer, expert] == sum(expert in token for token in ids[layer])


def test_pairs_are_those_of_a_loop(ids, monkeypatch):
    monkeypatch.setattr(stats, "_TOKENS", 64)
    together = stats.co_activation(ids[0], EXPERTS)
    onward = stats.transition(ids[0], ids[1], EXPERTS)
    for i in range(EXPERTS):
        for j in range(EXPERTS):
            assert together[i, j] == sum(i in token and j in token for token in ids[0])
            pairs = zip(ids[0], ids[1], strict=True)
            assert onward[i, j] == sum(i in a and j in b for a, b in pairs)


def test_transitions_are_of_the_same_tokens(ids, no_type_checks):
    with pytest.raises(RequestError, match=r"\(2, 200, 3\) from 0 to 6; accepted are .* one layer"):
        stats.co_activation(ids, EXPERTS)
    for wrong in (
        lambda: stats.co_activation(ids[0], 4),
        lambda: stats.transition(ids[0], ids[1], 4),
        lambda: stats.by_class(ids[0], np.zeros(TOKENS, int), 4),
        lambda: stats.by_class(ids[0] - 1, np.zeros(TOKENS, int), EXPERTS),
    ):
        with pytest.raises(RequestError, match="accepted are those of one layer"):
            wrong()
    for classes in (np.zeros(3, int), np.full(TOKENS, -1)):
        with pytest.raises(RequestError, match="accepted is a number from 0 on for each token"):
            stats.by_class(ids[0], classes, EXPERTS)
    with pytest.raises(RequestError, match="200 and 199 tokens"):
        stats.transition(ids[0], ids[1][1:], EXPERTS)


def test_lift_is_one_for_independent_choices():
    lift = stats.lift(np.array([[6, 0], [18, 0]]), np.array([12, 36]), np.array([24, 0]), 48)
    np.testing.assert_allclose(lift, [[1, np.nan], [1, np.nan]])


def test_specialisation():
    # Expert 0 takes class 0 alone, expert 1 class 1 alone: the choice tells the class.
    ids = np.array([[0], [0], [1], [1]], np.int32)
    table = stats.by_class(ids, np.array([0, 0, 1, 1]), 3)
    np.testing.assert_array_equal(table, [[2, 0, 0], [0, 2, 0]])
    divergence, information = stats.specialisation(table)
    np.testing.assert_allclose(divergence, [math.log(2), math.log(2), np.nan])
    assert information == pytest.approx(math.log(2))
    assert stats.specialisation(np.full((2, 3), 5))[1] == pytest.approx(0)


def test_classes_are_counted_by_a_loop(ids):
    classes = np.arange(TOKENS) % 4
    found = stats.by_class(ids[0], classes, EXPERTS)
    for number in range(4):
        for expert in range(EXPERTS):
            tokens = ids[0][classes == number]
            assert found[number, expert] == sum(expert in token for token in tokens)


def trace(ids: np.ndarray, **changes) -> RoutingTrace:
    zeros = np.zeros(ids.shape[1], np.int32)
    weights = np.zeros(ids.shape, np.float32)
    found = RoutingTrace(ids, weights, None, zeros, zeros, (1, 4), EXPERTS, "a")
    return dataclasses.replace(found, **changes)


def test_agreement_is_the_share_of_choices_kept(ids):
    other = np.where(ids[:1] == 2, 5, ids[:1])
    both = np.concatenate([other, ids[1:]])
    kept = [set(a) & set(b) - {EXPERTS} for a, b in zip(ids[0], other[0], strict=True)]
    wanted = sum(map(len, kept)) / (ids[0] < EXPERTS).sum()
    np.testing.assert_allclose(stats.agreement(trace(ids), trace(both)), [wanted, 1])
    assert wanted < 1


def test_agreement_does_not_depend_on_the_order_of_the_runs(ids):
    """One expert a token, and all that the token has; with empty slots among them."""
    fewer, more = trace(ids[..., :1]), trace(ids)
    found = stats.agreement(fewer, more)
    np.testing.assert_array_equal(found, stats.agreement(more, fewer))
    for layer, share in enumerate(found):
        one, both = (np.sum(each.ids[layer] < EXPERTS) for each in (fewer, more))
        assert one < both
        assert share == pytest.approx(2 * one / (one + both))
    nothing = trace(np.full_like(ids, EXPERTS))
    np.testing.assert_array_equal(stats.agreement(nothing, more), 0)
    np.testing.assert_array_equal(stats.agreement(nothing, nothing), 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "b"}, "different models"),
        ({"tokens": np.ones(TOKENS, np.int32)}, "different texts"),
        ({"sequences": np.ones(TOKENS, np.int32)}, "different texts"),
    ],
)
def test_traces_that_cannot_be_compared(ids, changes, words):
    with pytest.raises(RequestError, match=words):
        stats.agreement(trace(ids), trace(ids, **changes))


def test_stability_of_loads():
    runs = np.array([[[0.5, 0.5]], [[0.25, 0.75]], [[0.5, 0.5]]])
    np.testing.assert_allclose(stats.stability(runs), [1 - (0.25 + 0 + 0.25) / 3])
    with pytest.raises(RequestError, match="two runs or more; got 1"):
        stats.stability(runs[:1])


def test_drop_rates():
    ids = np.array([[[0, 1], [2, 2], [2, 0], [2, 2]]])
    slots, tokens = stats.drop_rates(ids, 2)
    np.testing.assert_allclose([slots[0], tokens[0]], [5 / 8, 2 / 4])


def test_layers_that_collapse_are_seen_layer_by_layer():
    # Each layer sends all tokens to one expert of two, another in each: pooled, that looks even.
    collapsed = counts([[8, 0], [0, 8]], [[8, 0], [0, 8]], 8)
    np.testing.assert_allclose(stats.balance_losses(collapsed), [2, 2])
    assert stats.pooled_balance_loss(collapsed) == 1
    even = counts([[4, 4]], [[4, 4]], 8)
    assert stats.pooled_balance_loss(even) == stats.balance_losses(even)[0] == 1


def test_loss_needs_probabilities_and_tokens():
    with pytest.raises(RequestError, match=r"no probabilities.*full"):
        stats.balance_losses(counts([[1, 1]], None, 2))
    with pytest.raises(RequestError, match="no token"):
        stats.pooled_balance_loss(counts([[0, 0]], [[0, 0]], 0))
