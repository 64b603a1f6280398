"""Losses of a router's balance, against their formulas in float64 and transformers' figures."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.errors import RequestError
from qwen_jax.model.balance import (
    layer_load_balancing_losses,
    load_balancing_loss,
    router_z_loss,
)
from qwen_jax.model.routing import Routing

EXPERTS, CHOSEN = 5, 2


@pytest.fixture(scope="module")
def routing() -> dict[int, Routing]:
    """Two layers over 3 rows of 7 tokens, the best experts of random logits."""
    random = np.random.default_rng(5)
    layers = {}
    for layer in (1, 3):
        logits = random.normal(0, 2, (3, 7, EXPERTS)).astype(np.float32)
        ids = np.argsort(-logits, axis=-1)[..., :CHOSEN].astype(np.int32)
        layers[layer] = Routing(jnp.asarray(ids), jnp.zeros(ids.shape), jnp.asarray(logits))
    return layers


VALID = np.arange(7)[None, :] < np.array([7, 4, 0])[:, None]


def rows(choice: Routing, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits and ids of the real tokens."""
    assert choice.logits is not None
    return np.asarray(choice.logits, np.float64)[valid], np.asarray(choice.ids)[valid]


def switch_loss(logits: np.ndarray, ids: np.ndarray) -> float:
    """E times the sum over experts of share of slots and mean probability, one by one."""
    total = 0.0
    for expert in range(EXPERTS):
        share = sum(expert in chosen for chosen in ids) / len(ids)
        odds = np.mean([np.exp(row[expert]) / np.exp(row).sum() for row in logits])
        total += EXPERTS * share * odds
    return total


@pytest.mark.parametrize("valid", [None, VALID])
def test_pooled_and_layer_losses(routing, valid):
    real = np.ones((3, 7), bool) if valid is None else valid
    mask = None if valid is None else jnp.asarray(valid)
    parts = [rows(choice, real) for choice in routing.values()]
    pooled = switch_loss(*(np.concatenate(side) for side in zip(*parts, strict=True)))
    assert float(load_balancing_loss(routing, mask)) == pytest.approx(pooled, abs=1e-5)
    found = layer_load_balancing_losses(routing, mask)
    assert list(found) == [1, 3]
    assert [*map(float, found.values())] == pytest.approx([switch_loss(*p) for p in parts], 1e-5)


def test_z_loss(routing):
    parts = np.concatenate([rows(choice, VALID)[0] for choice in routing.values()])
    wanted = np.mean(np.log(np.exp(parts).sum(-1)) ** 2)
    assert float(router_z_loss(routing, jnp.asarray(VALID))) == pytest.approx(wanted, rel=1e-5)


def test_empty_slots_do_not_count(routing):
    empty = {
        layer: Routing(
            jnp.where(VALID[..., None], choice.ids, EXPERTS), choice.weights, choice.logits
        )
        for layer, choice in routing.items()
    }
    mask = jnp.asarray(VALID)
    assert float(load_balancing_loss(empty, mask)) == float(load_balancing_loss(routing, mask))


def test_the_demo_has_the_figure_of_transformers(demo_output, demo_expected):
    names = list(demo_expected.prompts)
    row, length = names.index("n515"), len(demo_expected.prompts["n515"])
    valid = np.zeros(demo_output.logits.shape[:2], bool)
    valid[row, :length] = True
    loss = float(load_balancing_loss(demo_output.routing, jnp.asarray(valid)))
    assert loss == pytest.approx(demo_expected.values["aux_loss_n515"], abs=1e-5)


def test_refusals(routing):
    choice = routing[1]
    with pytest.raises(RequestError, match="no MoE layers"):
        load_balancing_loss({})
    with pytest.raises(RequestError, match=r"without logits.*full"):
        router_z_loss({0: choice.captured("ids")})
    with pytest.raises(RequestError, match=r"valid has shape \(3, 6\)"):
        load_balancing_loss(routing, jnp.ones((3, 6), bool))
    other = Routing(choice.ids, choice.weights, jnp.zeros((3, 7, 9)))
    with pytest.raises(RequestError, match=r"layers have \[5, 9\] experts"):
        load_balancing_loss({0: choice, 1: other})
