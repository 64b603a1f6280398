"""Heat against counting, the cache against a list, and a bias that at strength 0 is none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import init_cache
from qwen_jax.decode import Observer, StepOutput, init_state
from qwen_jax.decode.loop import run_steps
from qwen_jax.decode.state import Steering
from qwen_jax.errors import RequestError
from qwen_jax.model import Routing
from qwen_jax.research import interventions as change
from qwen_jax.research.cached_experts import distinct_experts, lru_hits
from qwen_jax.research.expert_cache import ExpertHeat, HeatBias, measure
from qwen_jax.research.routers import with_router

E, K = 6, 2


def random_ids(*shape: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.random((*shape, E)).argsort(axis=-1)[..., :K].astype(np.int32)


def output(ids: np.ndarray) -> StepOutput:
    """Ids [B, T, L, A] of a step."""
    weights = jnp.zeros(ids[:, :, 0].shape)
    routing = {i: Routing(jnp.asarray(ids[:, :, i]), weights) for i in range(2)}
    return StepOutput(jnp.zeros((2, 4)), routing)


@pytest.mark.parametrize("columns", [1, 4])
def test_heat_counts_the_last_tokens(tiny, columns):
    ids, window = random_ids(2, 12, 2), 5
    ids[1, 6:9] = E  # padding
    heat = ExpertHeat.empty(tiny, 2, window)
    assert isinstance(heat, Observer)
    observe = jax.jit(ExpertHeat.observe)
    for start in range(0, 12, columns):
        taken = jnp.asarray([True, start != 4])
        if start == 4:
            ids[1, 4 : 4 + columns] = E
        heat = observe(heat, output(ids[:, start : start + columns]), taken)
    for row in range(2):
        real = [token for token in ids[row] if (token < E).all()][-window:]
        for layer in range(2):
            wanted = np.bincount(np.ravel([t[layer] for t in real]), minlength=E)
            np.testing.assert_array_equal(heat.counts[row, layer], wanted)
            np.testing.assert_allclose(heat.share[row, layer], wanted / len(real), rtol=1e-6)
    bias = HeatBias.of(tiny, 0.5, 2.0).at(heat).bias.values
    own = np.asarray(heat.share).transpose(1, 0, 2)
    np.testing.assert_allclose(bias, 0.5 * own + 2 * own.mean(1, keepdims=True), rtol=1e-6)


def test_the_cache_turns_out_what_was_used_longest_ago():
    ids = random_ids(40, 2)
    for resident in (1, 3, 5, E):
        held: list[int] = []
        hits = 0
        for expert in ids.ravel().tolist():
            hits += expert in held
            held = [expert, *(e for e in held if e != expert)][:resident]
        assert lru_hits(ids, E, resident) == hits / ids.size
    assert lru_hits(ids, E, E) == 1 - E / ids.size
    assert lru_hits(np.array([[[0, E]], [[0, E]]]), E, 1) == 0.5


def test_distinct_experts():
    ids = random_ids(11, 2, 3)
    sets = [
        len(set(ids[start : start + 4, layer, row].ravel()))
        for start in (0, 4)
        for layer in range(2)
        for row in range(3)
    ]
    assert distinct_experts(ids, E, 4) == pytest.approx(np.mean(sets))
    assert distinct_experts(ids, E, 1) == K


def test_strength_0_is_the_model_and_a_large_one_keeps_to_its_first_experts(tiny, tokens):
    rows = np.concatenate([tokens, tokens])[:2]
    base = measure(tiny, rows, window=8, resident=3)
    logits = np.asarray(tiny(rows, np.array([13, 13], np.int32)).logits, np.float64)
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = np.take_along_axis(logprobs[:, :-1], rows[:, 1:, None], axis=-1)
    assert base.loss == pytest.approx(-right.mean(), abs=1e-5)
    assert base.distinct > K + 1
    stuck = measure(tiny, rows, within=1e4, window=8, resident=2 * K)
    assert stuck.distinct == K
    # Four experts a layer at most, each missed once in 12 tokens of two sequences.
    assert all(rate >= 1 - 2 * K / 48 for rate in stuck.hit_rates.values())
    again = measure(tiny, rows, across=1e4, window=8, resident=K, heat=stuck.heat)
    assert again.heat.seen.tolist() == [24, 24]


def test_a_loop_is_steered_by_what_it_has_seen(tiny):
    """At strength 0 tokens are the best of one pass; at a large one, experts stay."""
    first = jnp.asarray([7, 30])
    logits = jax.nn.one_hot(first, tiny.config.vocab_size)

    def run(within: float) -> Any:
        heat = ExpertHeat.empty(tiny, 2, 40)
        state = init_state(logits, max_tokens=13, observer=heat)
        bias = HeatBias.of(tiny, within)
        assert isinstance(bias, Steering)
        cache = init_cache(tiny.config, 2, 16, block_size=8)
        return run_steps(tiny, cache, state, max_steps=jnp.int32(20), intervention=bias)[0]

    free, stuck = run(0.0), run(1e4)
    best = np.asarray(tiny(np.asarray(free.tokens)).logits).argmax(-1)
    np.testing.assert_array_equal(best[:, :-1], free.tokens[:, 1:])
    assert ((np.asarray(stuck.observer.counts) > 0).sum(-1) == K).all()
    assert ((np.asarray(free.observer.counts) > 0).sum(-1) > K).all()
    assert free.observer.seen.tolist() == [12, 12]


def test_bad_input_is_refused(tiny, tokens):
    hashed = with_router(tiny, "hash")
    for call, message in (
        (lambda: ExpertHeat.empty(tiny, 1, 0), "window is 0"),
        (lambda: measure(tiny, tokens[:, :1], resident=1), r"shape \(2, 1\)"),
        (lambda: measure(tiny, tokens, resident=0), "resident is 0"),
        (lambda: measure(tiny, tokens, resident=1, within=np.inf), "strengths are inf and 0.0"),
        (lambda: measure(tiny, tokens + 61, resident=1), "outside the vocabulary"),
        (lambda: measure(hashed, tokens, resident=1, within=1.0), "router HashRouter takes none"),
        (lambda: HeatBias.of(tiny, np.nan), "strengths are nan and 0.0"),
        (lambda: HeatBias.of(tiny, 1.0, base=change.add_bias(tiny, {0: 1.0})), "bias itself"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    state = init_state(jnp.zeros((1, 61)), max_tokens=2)
    with pytest.raises(RequestError, match="needs an ExpertHeat"):
        HeatBias.of(tiny, 1.0).in_state(state)
    wide = ExpertHeat.empty(tiny, 2, 4, slots=1)
    with pytest.raises(RequestError, match="2 slots; this heat is for 1"):
        wide.observe(output(random_ids(2, 1, 2)), jnp.ones((2,), jnp.bool_))
