"""Interventions imposed on routers that know nothing of them, against the rule written down."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import CausalLM
from qwen_jax.model import Routing
from qwen_jax.model.layer_intervention import LayerIntervention
from qwen_jax.research.interventions import experts_per_token, scale_weights
from qwen_jax.research.routers import HashRouter, replace_routers

TOKENS, EXPERTS, SLOTS = 400, 6, 3


def plain(ids: np.ndarray, weights: np.ndarray, banned: set[int], forced: list[int], k: int):
    """One token: ids and weights after bans, then the number, then forced experts."""
    left = [(e, w) for e, w in zip(ids, weights, strict=True) if e < EXPERTS and e not in banned]
    places = [*left[:k], *[(EXPERTS, 0.0)] * SLOTS][:SLOTS]
    missing = [e for e in forced if e not in [own for own, _ in places]]
    for place in reversed(range(k)):
        expert, weight = places[place]
        if missing and expert not in forced:
            places[place] = missing.pop(0), weight if expert < EXPERTS else 1 / SLOTS
    return zip(*places, strict=True)


@pytest.mark.parametrize("seed", range(3))
def test_bans_forced_experts_and_k_are_imposed_as_it_is_written(seed):
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(EXPERTS)[:SLOTS] for _ in range(TOKENS)]).astype(np.int32)
    weights = np.sort(random.uniform(0.1, 1, ids.shape).astype(np.float32))[:, ::-1]
    ids = np.where(random.random(ids.shape) < 0.2, EXPERTS, ids).astype(np.int32)
    weights = np.where(ids < EXPERTS, weights, 0).astype(np.float32)
    shape = (TOKENS, EXPERTS)
    banned, forced = random.random(shape) < 0.25, random.random(shape) < 0.15
    forced &= ~banned
    limit = random.integers(0, SLOTS + 1, TOKENS).astype(np.int32)
    change = LayerIntervention(
        {
            "banned": jnp.asarray(banned)[None, None],
            "forced": jnp.asarray(forced)[None, None],
            "bias": jnp.zeros((1, 1, *shape), jnp.float32),
            "scale": jnp.ones((1, 1, *shape), jnp.float32),
        },
        jnp.asarray(limit)[None],
        jnp.ones((1, TOKENS), jnp.float32),
        jnp.full((1, TOKENS), jnp.nan, jnp.float32),
        index=0,
        slots=SLOTS,
    )
    routing = Routing(jnp.asarray(ids)[None], jnp.asarray(weights)[None])
    found = jax.jit(lambda change, routing: change.imposed(routing))(change, routing)
    for token in range(TOKENS):
        wanted_ids, wanted_weights = plain(
            ids[token],
            weights[token],
            {*np.flatnonzero(banned[token]).tolist()},
            np.flatnonzero(forced[token]).tolist(),
            int(limit[token]) or SLOTS,
        )
        np.testing.assert_array_equal(found.ids[0, token], wanted_ids)
        np.testing.assert_allclose(found.weights[0, token], wanted_weights, rtol=1e-6)


def test_as_many_experts_as_a_router_has_slots_are_no_nan(tiny: CausalLM):
    """Another layer is given more, so that the intervention has more slots than this router."""
    experts, k = tiny.config.num_experts, tiny.config.num_experts_per_tok
    model = replace_routers(tiny, lambda *_: HashRouter(experts, k), layers=(1,))
    more = experts_per_token(model, k + 1, layers=[0])
    both = experts_per_token(model, k, layers=[1], base=more)
    tokens = np.arange(12, dtype=np.int32)[None]
    expected = model(tokens, intervention=more).logits
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(model(tokens, intervention=both).logits, expected)


def test_factors_count_for_any_router(tiny: CausalLM):
    experts, k = tiny.config.num_experts, tiny.config.num_experts_per_tok
    model = replace_routers(tiny, lambda *_: HashRouter(experts, k))
    factors = np.linspace(-1, 2, experts)
    tokens = np.arange(12, dtype=np.int32)[None]
    own = model(tokens).routing
    found = model(tokens, intervention=scale_weights(model, factors)).routing
    for layer, routing in own.items():
        np.testing.assert_array_equal(found[layer].ids, routing.ids)
        wanted = factors[np.asarray(routing.ids)] * np.asarray(routing.weights)
        np.testing.assert_allclose(found[layer].weights, wanted, atol=1e-6)
