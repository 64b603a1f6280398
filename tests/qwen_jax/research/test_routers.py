"""Each router against a float64 loop over its own logits; where it can be the released rule, it is.

A router is tried alone, on tokens with padding in front of and behind them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen_jax import CausalLM, QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.model import RouterContext, Routing
from qwen_jax.model.routing import TopKRouter
from qwen_jax.research import interventions as change
from qwen_jax.research import routers
from tests.qwen_jax.conftest import TINY
from tests.qwen_jax.research.conftest import LENGTHS

E, K, D, B, T = 8, 3, 12, 2, 9
VALID = np.arange(T)[None] < np.array([[9], [6]])
CONFIG = QwenConfig.from_hf(
    TINY | {"num_experts": E, "num_experts_per_tok": K, "hidden_size": D, "head_dim": 8}
)


def gate(*, renormalise: bool = True) -> TopKRouter:
    router = TopKRouter(D, E, K, "float32", renormalise=renormalise, implementation=None)
    values = np.random.default_rng(1).standard_normal((E, D), np.float32) / 2
    router.weight.set_value(jnp.asarray(values))
    return router


def inputs(intervention=None, valid=VALID, layer=0):
    random = np.random.default_rng(2)
    x, mixed = (random.standard_normal((*valid.shape, D), np.float32) for _ in range(2))
    positions = np.where(valid, np.cumsum(valid, axis=1) - 1, -1).astype(np.int32)
    tokens = np.where(valid, random.integers(0, 61, valid.shape), 0).astype(np.int32)
    part = None if intervention is None else intervention.over(jnp.asarray(positions)).of(layer)
    arrays = (jnp.asarray(valid), jnp.asarray(mixed), jnp.asarray(tokens), jnp.asarray(positions))
    return jnp.asarray(x), RouterContext(*arrays, layer=layer, intervention=part)


def route(router, intervention=None, valid=VALID, layer=0) -> list[list[dict[int, float]]]:
    """Expert -> weight of each token, in order; the weights fall and empty slots weigh nothing."""
    jitted = router if hasattr(router, "lower") else jax.jit(lambda *given: router(*given))
    routing = jitted(*inputs(intervention, valid, layer))
    routers.check_routing(routing, E)
    ids, weights = np.asarray(routing.ids), np.asarray(routing.weights)
    assert (weights[ids >= E] == 0).all()
    assert (ids[~valid] >= E).all()
    found = [
        [
            {int(e): float(w) for e, w in zip(*slots, strict=True) if e < E}
            for slots in zip(*row, strict=True)
        ]
        for row in zip(ids, weights, strict=True)
    ]
    assert all(list(t.values()) == sorted(t.values(), reverse=True) for row in found for t in row)
    return found


def logits_of(weight) -> np.ndarray:
    x, _ = inputs()
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def softmax(scores) -> np.ndarray:
    strength = np.exp(scores - scores.max(-1, keepdims=True))
    return strength / strength.sum(-1, keepdims=True)


def assert_close(found, wanted) -> None:
    for row, its in zip(found, wanted, strict=True):
        for token, other in zip(row, its, strict=True):
            assert set(token) == set(other)
            for expert, weight in other.items():
                assert abs(token[expert] - weight) < 2e-6


def each(rule) -> list[list[dict[int, float]]]:
    """The rule of real tokens (row, t), in order; nothing for padding."""
    return [[rule(b, t) if VALID[b, t] else {} for t in range(T)] for b in range(B)]


def shares(values: dict[int, float]) -> dict[int, float]:
    total = sum(values.values())
    return {expert: value / total for expert, value in values.items()}


def test_sigmoid():
    router = routers.SigmoidRouter(gate().weight[...], K)
    balance = np.linspace(0.6, -0.6, E).astype(np.float32)
    router.balance.set_value(jnp.asarray(balance))
    s = 1 / (1 + np.exp(-logits_of(router.weight[...])))

    def rule(b, t):
        chosen = np.argsort(-(s[b, t] + balance), kind="stable")[:K]
        return shares({int(e): s[b, t, e] for e in chosen})

    assert_close(route(router), each(rule))
    counts = np.array([5, 0, 4, 4, 4, 4, 4, 7])
    moved = np.asarray(routers.balanced(jnp.asarray(balance), jnp.asarray(counts), 0.25)) - balance
    np.testing.assert_allclose(moved, [-0.25, 0.25, 0, 0, 0, 0, 0, -0.25], atol=1e-6)


@pytest.mark.parametrize(
    ("overflow", "renormalise"),
    [("drop", True), ("renormalise", True), ("renormalise", False), ("next", True)],
)
def test_capacity(overflow, renormalise):
    inner, capacity = gate(renormalise=renormalise), 4
    logits, load = logits_of(inner.weight[...]), np.zeros(E, int)

    def rule(b, t):
        p, ranked = softmax(logits[b, t]), np.argsort(-logits[b, t], kind="stable")
        first = {int(e): p[e] for e in ranked[:K]}
        first = shares(first) if renormalise else first
        if overflow == "next":
            taken = {int(e): p[e] for e in ranked if load[e] < capacity}
            taken = dict(list(taken.items())[:K])
            taken = shares(taken) if renormalise else taken
        else:
            taken = {e: w for e, w in first.items() if load[e] < capacity}
        if overflow == "renormalise" and taken:
            taken = {e: w * sum(first.values()) for e, w in shares(taken).items()}
        load[list(taken)] += 1
        return taken

    wanted = each(rule)
    assert load.max() == capacity
    assert_close(route(routers.CapacityRouter(inner, capacity, overflow=overflow)), wanted)


def test_padding_takes_no_capacity():
    """Two experts, capacity 2: pads in front of two tokens that all prefer the same one."""
    valid = np.array([[False, False, True, True]])
    inner = gate()
    inner.chosen = 1
    inner.weight.set_value(jnp.zeros((E, D)))
    for overflow in ("drop", "next"):
        found = route(routers.CapacityRouter(inner, 2, overflow=overflow), valid=valid)
        assert found == [[{}, {}, {0: 1.0}, {0: 1.0}]]
    assert route(routers.CapacityRouter(inner, 1), valid=valid) == [[{}, {}, {0: 1.0}, {}]]


def test_expert_choice():
    router = routers.ExpertChoiceRouter(gate().weight[...], K)
    p, chosen = softmax(logits_of(router.weight[...])), np.zeros((B, T, E), bool)
    for b in range(B):
        n = int(VALID[b].sum())
        for e in range(E):
            chosen[b, np.argsort(-p[b, :n, e], kind="stable")[: -(-n * K // E)], e] = True
    wanted = each(lambda b, t: {int(e): p[b, t, e] for e in np.flatnonzero(chosen[b, t])})
    assert_close(route(router), wanted)


@pytest.mark.parametrize(("mass", "renormalise"), [(0.3, True), (0.7, False)])
def test_probability_mass(mass, renormalise):
    inner = gate(renormalise=renormalise)
    p = softmax(logits_of(inner.weight[...]))

    def rule(b, t):
        ranked = np.argsort(-p[b, t], kind="stable")[:K]
        enough = int(np.searchsorted(np.cumsum(p[b, t][ranked]), mass)) + 1
        taken = {int(e): p[b, t, e] for e in ranked[:enough]}
        return shares(taken) if renormalise else taken

    wanted = each(rule)
    assert len({len(token) for row in wanted for token in row}) > 2
    assert_close(route(routers.MassRouter(inner, mass)), wanted)


def test_two_stages():
    router = routers.TwoStageRouter(jax.random.key(0), D, E, candidates=5, k=2, hidden=6, rank=4)
    x, context = inputs()
    x, mixed = np.asarray(x, np.float64), np.asarray(context.mixed, np.float64)
    first, last, query, keys = (
        np.asarray(each[...], np.float64)
        for each in (router.filter_in, router.filter_out, router.query, router.keys)
    )

    def rule(b, t):
        hidden = first @ x[b, t]
        coarse = last @ (hidden / (1 + np.exp(-hidden)))
        candidates = np.argsort(-coarse, kind="stable")[:5]
        scores = keys @ query @ np.concatenate([x[b, t], mixed[b, t]]) / 2
        chosen = sorted(candidates, key=lambda e: -scores[e])[:2]
        return {int(e): w for e, w in zip(chosen, softmax(scores[chosen]), strict=True)}

    assert_close(route(router), each(rule))


def test_hash_and_random():
    """Experts follow from the token, or from token and position; all experts get their share."""
    valid = np.ones((1, 4000), bool)
    x, context = inputs(valid=valid)
    tokens = np.asarray(context.tokens)[0]
    for kind in (routers.HashRouter, routers.RandomRouter):
        router = kind(E, K, seed=5)
        routing = router(x, context)
        ids = np.asarray(routing.ids)[0]
        routers.check_routing(routing, E)
        np.testing.assert_allclose(routing.weights, np.full((1, 4000, K), 1 / K), rtol=1e-6)
        sets = [{tuple(row) for row in ids[tokens == token]} for token in range(61)]
        if kind is routers.HashRouter:
            assert max(map(len, sets)) == 1
        else:
            counts = np.bincount(ids.ravel(), minlength=E)
            assert min(map(len, sets)) > 5
            # Five standard deviations of a binomial.
            assert abs(counts / counts.sum() - 1 / E).max() < 5 * (1 / E / 4000) ** 0.5
        for other in (kind(E, K, seed=6)(x, context), router(*inputs(valid=valid, layer=1))):
            assert (np.asarray(other.ids)[0] != ids).any()
        again = jax.tree.map(lambda a: a[:, 7:9], context)
        np.testing.assert_array_equal(router(x[:, 7:9], again).ids[0], ids[7:9])


@pytest.mark.parametrize("kind", [routers.HashRouter, routers.RandomRouter])
def test_no_seed_and_layer_choose_as_others_do(kind):
    """No more tokens have the same experts than by chance, and all draws of keys differ."""
    x, context = inputs(valid=np.ones((1, 600), bool))
    tokens = jnp.arange(600, dtype=jnp.int32)[None]
    context = dataclasses.replace(context, tokens=tokens)
    keys, ids = [], []
    for seed in (0, 1, 2, 7):
        for layer in (0, 1, 2, 30, 31, 32, 62):
            router, here = kind(E, 1, seed=seed), dataclasses.replace(context, layer=layer)
            keys.append(np.asarray(router.key(here))[0])
            ids.append(np.asarray(router(x, here).ids)[0, :, 0])
    for a in range(len(ids)):
        for b in range(a):
            # Six standard deviations of a binomial; also of tokens and their neighbours.
            for shift in (0, 1):
                same = np.mean(ids[a][shift:] == ids[b][: 600 - shift])
                assert abs(same - 1 / E) < 6 * (1 / E / 600) ** 0.5
            assert not np.intersect1d(keys[a], keys[b]).size


def intervened(kind: str):
    gates = gate()
    return {
        "sigmoid": lambda: routers.SigmoidRouter(gates.weight[...], K),
        "capacity": lambda: routers.CapacityRouter(gates, B * T, overflow="next"),
        "expert choice": lambda: routers.ExpertChoiceRouter(gates.weight[...], K),
        "mass": lambda: routers.MassRouter(gates, 0.6),
        "two stages": lambda: routers.TwoStageRouter(jax.random.key(0), D, E, candidates=5, k=K),
        "hash": lambda: routers.HashRouter(E, K),
    }[kind]()


KINDS = ("sigmoid", "capacity", "expert choice", "mass", "two stages", "hash")


@pytest.mark.parametrize("kind", KINDS)
def test_interventions_reach_every_router(kind):
    router, both = intervened(kind), change.ban(CONFIG, [0, 5], positions=(2, None))
    both = change.force(CONFIG, [3, 6], base=both)
    both = change.experts_per_token(CONFIG, 2, positions=(4, None), base=both)
    knows = getattr(router, "intervenes", False)

    @jax.jit
    def run(x, context):
        return router(x, context) if knows else context.intervention.imposed(router(x, context))

    plain = route(router)
    assert route(run, change.neutral(CONFIG)) == plain
    for row, (found, before) in enumerate(zip(route(run, both), plain, strict=True)):
        for t in range(int(VALID[row].sum())):
            token = found[t]
            assert {3, 6} <= set(token)
            assert t < 2 or not {0, 5} & set(token)
            assert t < 4 or len(token) == 2
            assert kind == "expert choice" or len(token) <= max(len(before[t]), K)
            assert all(np.isfinite(weight) and weight > 0 for weight in token.values())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_banned_expert_is_out_whatever_its_logit(value):
    """As if its logit were any other."""
    router, without = gate(), change.ban(CONFIG, [2])
    wanted = route(router, without)
    weight = np.array(router.weight[...])
    # Infinite of either sign, since products with 0 are 0.
    weight[2] = [value, *[0.0] * (D - 1)]
    router.weight.set_value(jnp.asarray(weight))
    assert route(router, without) == wanted
    sigmoid = routers.SigmoidRouter(router.weight[...], K)
    assert all(2 not in token for row in route(sigmoid, without) for token in row)
    for free in (router, sigmoid):
        assert (np.asarray(free(*inputs()).ids) == 2).any()


def test_more_experts_than_a_router_can_give_are_refused(tiny: CausalLM, tokens):
    """Also where the number is traced: there weights are NaN."""

    def make(layer, gate):
        if layer == 0:
            return routers.HashRouter(6, 2)
        return routers.TwoStageRouter(jax.random.key(0), 32, 6, candidates=3, k=2)

    model = routers.replace_routers(tiny, make)
    for layer, name, slots in ((0, "HashRouter", 2), (1, "TwoStageRouter", 3)):
        four = change.experts_per_token(model, 4, layers=[layer])
        words = f"tokens of layer {layer} 4 experts, but its router {name} has {slots} slots"
        with pytest.raises(RequestError, match=words):
            model(tokens, intervention=four)
        model.check_intervention(change.experts_per_token(model, slots, layers=[layer]), 2)
    tiny.check_intervention(change.experts_per_token(tiny, 4), 2)
    four = change.experts_per_token(model, 4, layers=[1], positions=(3, None))
    output = jax.jit(lambda one: model(tokens, LENGTHS, intervention=one))(four)
    nan = np.isnan(np.asarray(output.routing[1].weights)).any(-1)
    position = np.arange(tokens.shape[1])[None]
    np.testing.assert_array_equal(nan, (position >= 3) & (position < LENGTHS[:, None]))


def test_gradients_under_an_intervention():
    """Padding makes no NaN of them, and a neutral one leaves them as they are."""
    router, x = gate(), inputs()[0]
    target = jnp.asarray(np.random.default_rng(3).standard_normal((E,)), jnp.float32)

    @jax.jit
    @jax.grad
    def loss(router, context):
        routing = router(x, context)
        return jnp.sum(routing.weights * target.at[routing.ids].get(mode="fill", fill_value=0))

    plain, neutral, forced = (
        np.asarray(loss(router, inputs(each)[1]).weight[...])
        for each in (None, change.neutral(CONFIG), change.force(CONFIG, [0, 1, 2]))
    )
    np.testing.assert_allclose(neutral, plain, rtol=1e-5, atol=1e-6)
    assert np.isfinite(forced).all()
    assert (forced[:3] != 0).any()
    np.testing.assert_array_equal(forced[3:], 0)


def test_settings_of_the_released_rule_change_no_bit(tiny: CausalLM, tokens, plain):
    """One model with capacity for all in a layer, and a function of one's own in the other."""

    def make(layer, gate):
        if layer == 0:
            return routers.CapacityRouter(gate, tokens.size, overflow="next")
        return lambda x, context: routers.MassRouter(gate, 1.0)(x, context)

    output = routers.replace_routers(tiny, make)(tokens, LENGTHS)
    jax.tree.map(np.testing.assert_array_equal, output, plain)
    for overflow in ("drop", "renormalise"):
        inner = gate()
        found = routers.CapacityRouter(inner, B * T, overflow=overflow)(*inputs())
        jax.tree.map(np.testing.assert_array_equal, found, inner(*inputs()))


def empty(x, context):
    shape = (*x.shape[:2], K)
    return Routing(jnp.full(shape, E, jnp.int32), jnp.zeros(shape))


def changed(**fields):
    return lambda x, context: dataclasses.replace(empty(x, context), **fields)


REFUSED = {
    "twice": (changed(ids=jnp.full((2, 7, K), 4, jnp.int32)), "chose expert 4 3 times for token 0"),
    "negative": (changed(ids=jnp.full((2, 7, K), -1, jnp.int32)), "gave id -1 to token 0"),
    "rank": (changed(ids=jnp.zeros((14, K), jnp.int32)), r"gave ids int32\[14, 3\]; accepted is"),
    "dtype": (changed(weights=jnp.zeros((2, 7, K), jnp.bfloat16)), "gave weights bfloat16"),
    "width": (changed(weights=jnp.zeros((2, 7, 1))), r"float32\[2, 7, 1\]; accepted is float32"),
    "tuple": (lambda x, context: (1, 2), "gave a tuple; accepted is a Routing"),
    "slots": (
        changed(ids=jnp.zeros((2, 7, 0), jnp.int32), weights=jnp.zeros((2, 7, 0))),
        r"gave ids int32\[2, 7, 0\]; accepted is .* A is 1 or more",
    ),
    "logits": (changed(logits=jnp.zeros((2, 7, K))), r"gave logits float32\[2, 7, 3\]; accepted"),
    "thin": (changed(logits=jnp.zeros((2, 7, E), jnp.bfloat16)), "gave logits bfloat16"),
    "nothing": (None, "router of layer 0 is None; accepted is a function"),
    "nan": (
        lambda x, c: Routing(
            jnp.zeros((2, 7, 1), jnp.int32), jnp.full((2, 7, 1), jnp.nan, jnp.float32)
        ),
        "gave weights .nan. to token 0",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_router_that_gives_no_routing_is_refused(kind, no_type_checks):
    router, message = REFUSED[kind]
    with pytest.raises(RequestError, match=message):
        routers.check_router(router, CONFIG, 0)
    routers.check_router(empty, CONFIG, 0)


def test_padding_takes_no_expert_whatever_a_router_says(tiny, tokens):
    def careless(x, context):
        shape = (*x.shape[:2], 2)
        return Routing(jnp.broadcast_to(jnp.arange(2), shape), jnp.full(shape, 0.5))

    experts, model = tiny.config.num_experts, nnx.clone(tiny)
    for layer in model.layers:
        layer.mlp.gate = careless
    padding = np.arange(tokens.shape[1])[None] >= LENGTHS[:, None]
    assert padding.any()
    for choice in model(tokens, LENGTHS, capture="ids").routing.values():
        assert (np.asarray(choice.ids)[padding] == experts).all()
        assert (np.asarray(choice.weights)[padding] == 0).all()
        assert (np.asarray(choice.ids)[~padding] == [0, 1]).all()


def test_by_name(tiny, no_type_checks):
    model = routers.with_router(tiny, "capacity", capacity=5, overflow="next", k=3)
    assert [layer.mlp.gate.inner.chosen for layer in model.layers] == [3, 3]
    assert isinstance(tiny.layers[0].mlp.gate, TopKRouter)
    for name, settings in (("two_stage", {"candidates": 4}), ("hash", {}), ("softmax", {"k": 1})):
        routers.with_router(tiny, name, **settings)
    for name, settings, message in (
        ("gumbel", {}, "router is 'gumbel'; accepted are softmax"),
        ("mass", {"mass": 0.5, "share": 1}, "unexpected keyword argument 'share'"),
        ("mass", {"mass": 2.0}, "mass is 2.0; accepted"),
        ("capacity", {"capacity": 0}, "capacity is 0; accepted"),
        ("capacity", {"capacity": 1.5}, "capacity is 1.5; accepted"),
        ("capacity", {"capacity": True}, "capacity is True; accepted"),
        ("softmax", {"k": 0}, "k is 0; accepted is a whole number from 1 to"),
        ("mass", {"mass": 0.5, "k": 99}, "k is 99; accepted"),
        ("sigmoid", {"k": 0}, "k is 0; accepted"),
        ("sigmoid", {"k": 99}, "k is 99; accepted"),
        ("hash", {"k": 2.5}, "k is 2.5; accepted"),
        ("random", {"seed": -1}, "seed is -1; accepted"),
        ("hash", {"seed": 1.0}, "seed is 1.0; accepted"),
    ):
        with pytest.raises(RequestError, match=message):
            routers.with_router(tiny, name, **settings)
    with pytest.raises(RequestError, match="CapacityRouter already"):
        routers.with_router(model, "hash")
    with pytest.raises(RequestError, match="layer 2 is no MoE layer"):
        routers.replace_routers(tiny, lambda layer, gate: gate, layers=(2,))


def test_bias_is_refused_where_a_router_does_not_read_it(tiny, tokens):
    model = routers.with_router(tiny, "hash")
    intervention = change.temperature(tiny, 2.0, layers=[1])
    with pytest.raises(RequestError, match="temperature of layer 1, whose router HashRouter"):
        model(tokens, LENGTHS, intervention=intervention)
    hashed = routers.HashRouter(E, K)
    x, context = inputs(change.add_bias(CONFIG, {2: 1.0}, positions=(3, None)))
    plain = hashed(x, dataclasses.replace(context, intervention=None))
    nan = np.isnan(np.asarray(context.intervention.imposed(plain).weights)).any(-1)
    np.testing.assert_array_equal(nan, np.asarray(context.positions) >= 3)
