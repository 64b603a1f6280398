"""Interventions against a float64 rule over the captured logits; neutral ones change no bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax import CausalLM, QwenConfig, init_cache
from qwen_jax.decode import init_state, stream
from qwen_jax.decode.loop import run_steps
from qwen_jax.decode.prompt import run_prefill
from qwen_jax.errors import RequestError
from qwen_jax.model import Intervention, ModelOutput
from qwen_jax.model.intervention import NEUTRAL
from qwen_jax.research import interventions as change
from qwen_jax.research.routers import with_router
from tests.qwen_jax.conftest import TINY
from tests.qwen_jax.research.conftest import LENGTHS

E, K, LAYERS = 6, 2, (0, 1)


def run(model: CausalLM, tokens: np.ndarray, intervention: Intervention | None) -> ModelOutput:
    return model(tokens, LENGTHS, intervention=intervention)


def rule(logits, k=K, banned=(), forced=(), bias=0.0, temperature=1.0):
    """Ids -> weight of one token, by sorting in float64."""
    scores = (np.asarray(logits, np.float64) + bias) / temperature
    ranked = [e for e in np.argsort(-scores, kind="stable") if e not in banned]
    chosen = [*forced, *(e for e in ranked if e not in forced)][:k]
    strength = np.exp(scores[chosen] - scores[chosen].max())
    strength /= strength.sum()
    return dict(sorted(zip(chosen, strength, strict=True), key=lambda pair: -pair[1]))


def check_rule(output: ModelOutput, layer: int, **options) -> None:
    """Every real token of the layer follows the rule on the layer's own logits."""
    routing = output.routing[layer]
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            slots = [np.asarray(each[row, t]) for each in (routing.ids, routing.weights)]
            found = {int(e): w for e, w in zip(*slots, strict=True) if e < E}
            chosen = {k: v(row, t) if callable(v) else v for k, v in options.items()}
            wanted = rule(routing.logits[row, t], **chosen)
            assert list(found) == list(wanted)
            np.testing.assert_allclose([*found.values()], [*wanted.values()], atol=2e-6)


def assert_equal(found: ModelOutput, wanted: ModelOutput) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_what_changes_nothing_changes_no_bit(tiny, tokens, plain):
    nothing = [
        change.neutral(tiny),
        change.add_bias(tiny, [0.0] * E),
        change.scale_weights(tiny, {3: 1.0}),
        change.temperature(tiny, 1.0),
        change.experts_per_token(tiny, K),
        change.ban(tiny, range(E - K), positions=(40, None)),
        change.per_sequence([None, change.neutral(tiny)]),
    ]
    for intervention in nothing:
        assert_equal(run(tiny, tokens, intervention), plain)


def test_banned_experts_are_not_chosen(tiny, tokens):
    output = run(tiny, tokens, change.ban(tiny, [0, 4], layers=[1]))
    check_rule(output, 0)
    check_rule(output, 1, banned=(0, 4))


def test_forced_experts_are_chosen_at_their_own_weight(tiny, tokens):
    both = change.force(tiny, [5], base=change.temperature(tiny, 0.5))
    for layer in LAYERS:
        check_rule(run(tiny, tokens, change.force(tiny, [1])), layer, forced=(1,))
        check_rule(run(tiny, tokens, both), layer, forced=(5,), temperature=0.5)


def test_bias_and_temperature(tiny, tokens):
    bias = np.linspace(-1, 1, E, dtype=np.float32)
    output = run(tiny, tokens, change.add_bias(tiny, bias, base=change.temperature(tiny, 2.0)))
    for layer in LAYERS:
        check_rule(output, layer, bias=bias.astype(np.float64), temperature=2.0)


@pytest.mark.parametrize("k", [1, 4])
def test_fewer_and_more_experts(tiny, tokens, k):
    output = run(tiny, tokens, change.experts_per_token(tiny, k, layers=[0]))
    check_rule(output, 0, k=k)
    check_rule(output, 1)


def test_scaled_weights(tiny, tokens, plain):
    chosen = int(plain.routing[1].ids[0, 0, 0])
    output = run(tiny, tokens, change.scale_weights(tiny, {chosen: 0.25}, layers=[1]))
    wanted = np.asarray(plain.routing[1].weights)
    wanted = np.where(np.asarray(plain.routing[1].ids) == chosen, 0.25 * wanted, wanted)
    np.testing.assert_array_equal(output.routing[1].ids, plain.routing[1].ids)
    np.testing.assert_array_equal(output.routing[1].weights, wanted)
    assert (np.asarray(output.logits) != np.asarray(plain.logits)).any()


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0])
def test_the_shared_experts_strength(tiny, tokens, strength):
    """A gate of zero weights has strength 1/2, so doubling the expert's output shows any other."""
    found = run(tiny, tokens, change.shared_expert(tiny, strength))
    other = jax.tree.map(lambda leaf: leaf, tiny)
    for layer in other.layers:
        layer.mlp.shared_expert_gate.weight.set_value(jnp.zeros((1, 32)))
        down = layer.mlp.shared_expert.down_proj.weight
        down.set_value(down[...] * 2 * strength)
    wanted = run(other, tokens, None)
    for row, length in enumerate(LENGTHS):
        logits = [np.asarray(each.logits)[row, :length] for each in (found, wanted)]
        np.testing.assert_allclose(*logits, atol=2e-5)


def test_positions_and_sequences(tiny, tokens):
    first = change.ban(tiny, [2], positions=(3, 8))
    both = change.per_sequence([first, change.force(tiny, [3], positions=(5, None))])
    check_rule(
        run(tiny, tokens, both),
        1,
        banned=lambda row, t: (2,) if row == 0 and 3 <= t < 8 else (),
        forced=lambda row, t: (3,) if row == 1 and t >= 5 else (),
    )


@pytest.mark.parametrize("at_once", [0, 64])
def test_fields_of_all_layers_or_of_one_at_a_time(tiny, monkeypatch, at_once):
    """Of many tokens one at a time; each number is that of the ranges it was made of."""
    monkeypatch.setattr("qwen_jax.model.intervention.AT_ONCE", at_once)
    first = change.add_bias(tiny, {2: 0.5}, layers=[1], positions=(3, 8))
    first = change.scale_weights(tiny, {0: 2.0}, layers=[0], base=change.ban(tiny, [4], base=first))
    both = change.per_sequence([first, change.temperature(tiny, 3.0, positions=(5, None))])
    positions = np.stack([np.arange(9), np.where(np.arange(9) < 6, np.arange(9), -1)])
    step = both.over(jnp.asarray(positions, jnp.int32))
    for index, layer in enumerate(LAYERS):
        one = step.of(layer)
        assert one.stacks["bias"].shape[0] == (2 if at_once else 1)
        for name, neutral in NEUTRAL.items():
            found = np.asarray(getattr(one, name))
            ranged = jax.tree.map(np.asarray, getattr(both, name))
            for place in np.ndindex(*found.shape):
                row, token, *expert = place
                at = (index, row, *expert)
                inside = ranged.start[at] <= positions[row, token] < ranged.stop[at]
                np.testing.assert_array_equal(
                    found[place], ranged.values[at] if inside else neutral
                )
            token = np.asarray(getattr(one.token(jnp.int32(12)), name))
            np.testing.assert_array_equal(token[0, 0], found[1, 3])


def enter(model, tokens, begin, count, cache, intervention):
    """Four columns more of each row into the cache."""
    columns = np.minimum(begin[:, None] + np.arange(4), tokens.shape[1] - 1)
    piece = np.take_along_axis(tokens, columns, axis=1)
    options = {"capture": "full", "all_logits": True, "intervention": intervention}
    return run_prefill(model, cache, piece, np.asarray(count, np.int32), **options)


def test_positions_count_from_the_first_token_whatever_the_chunks(tiny, tokens):
    intervention = change.ban(tiny, [0, 1], positions=(6, 11), base=change.force(tiny, [4]))
    whole = run(tiny, tokens, intervention)
    cache = init_cache(tiny.config, 2, 32, block_size=8)
    done = np.zeros(2, np.int32)
    while (done < LENGTHS).any():
        count = np.minimum([4, 3], LENGTHS - done)
        output, cache = enter(tiny, tokens, done, count, cache, intervention)
        for row, n in enumerate(count):
            columns = slice(done[row], done[row] + n)
            for layer in LAYERS:
                wanted = np.asarray(whole.routing[layer].ids)[row, columns]
                np.testing.assert_array_equal(output.routing[layer].ids[row, :n], wanted)
            found, wanted = (np.asarray(each.logits)[row] for each in (output, whole))
            np.testing.assert_allclose(found[:n], wanted[columns], atol=2e-4)
        done += count


def test_loop_and_stream_take_it(tiny, tokens):
    """Greedy tokens are the best of one pass over all of them."""
    intervention = change.shared_expert(tiny, 0.0, base=change.ban(tiny, [1, 2, 3]))

    def begin():
        cache = init_cache(tiny.config, 2, 32, block_size=8)
        output, cache = enter(tiny, tokens, np.zeros(2, int), [4, 4], cache, intervention)
        return cache, init_state(output.logits[:, 3], max_tokens=9)

    options = {"max_steps": jnp.int32(20), "intervention": intervention}
    looped, _ = run_steps(tiny, *begin(), **options)
    for state, _ in stream(tiny, *begin(), intervention=intervention):
        streamed = np.asarray(state.tokens)
    np.testing.assert_array_equal(looped.tokens, streamed)
    text = np.concatenate([tokens[:, :4], streamed], axis=1)
    output = tiny(text, np.array([13, 13], np.int32), intervention=intervention)
    best = np.asarray(output.logits).argmax(axis=-1)
    np.testing.assert_array_equal(best[:, 3:12], streamed)


def test_twenty_interventions_are_one_program(tiny, tokens):
    traces = 0

    def forward(model, tokens, intervention):
        nonlocal traces
        traces += 1
        return model(tokens, intervention=intervention).logits

    jitted, random = jax.jit(forward), np.random.default_rng(0)
    seen = set()
    given = [
        *(change.ban(tiny, [expert], layers=[expert % 2]) for expert in range(E)),
        *(change.force(tiny, [2], positions=(first, None)) for first in range(3)),
        *(change.add_bias(tiny, random.standard_normal(E)) for _ in range(3)),
        *(change.scale_weights(tiny, {4: factor}) for factor in (0.0, 2.0)),
        *(change.temperature(tiny, value, positions=(0, 4)) for value in (0.5, 2.0, 4.0)),
        *(change.shared_expert(tiny, strength) for strength in (0.0, 0.6)),
        change.experts_per_token(tiny, 1),
    ]
    for one in given:
        seen.add(np.asarray(jitted(tiny, tokens, one)).tobytes())
    assert traces == 1
    assert len(given) == len(seen) == 20


REFUSED = {
    "few": (lambda m: change.ban(m, range(5)), "leaves 1 experts of 6 in layer 0.*takes 2"),
    "expert": (lambda m: change.ban(m, [6]), "expert 6 does not exist; accepted are 0 to 5"),
    "negative": (lambda m: change.force(m, [-1]), "expert -1 does not exist"),
    "layer": (lambda m: change.ban(m, [1], layers=[2]), "layer 2 is no MoE layer"),
    "forced": (lambda m: change.force(m, [1, 2, 3]), "forces 3 experts in layer 0.*takes 2"),
    "both": (lambda m: change.force(m, [1], base=change.ban(m, [1])), "both banned and forced"),
    "k": (lambda m: change.experts_per_token(m, 7), "k is 7; accepted is .* 1 to 6"),
    "temperature": (
        lambda m: change.temperature(m, 0.0),
        "temperature is 0.0; accepted are",
    ),
    "nan": (
        lambda m: change.add_bias(m, {1: float("nan")}),
        "value of expert 1 is nan; accepted are",
    ),
    "shape": (lambda m: change.add_bias(m, [1.0]), r"shape \(1,\); accepted are 6 numbers"),
    "strength": (
        lambda m: change.shared_expert(m, 1.5),
        "strength is 1.5; accepted are .* 0 to 1",
    ),
    "range": (lambda m: change.ban(m, [1], positions=(4, 4)), r"positions are \(4, 4\)"),
    "ranges": (
        lambda m: change.ban(m, [1], positions=(0, 3), base=change.ban(m, [1], positions=(1, 4))),
        "banned of expert 1 of layer 0 is given for positions 1 to 4 and for 0 to 3",
    ),
    "none": (lambda m: change.per_sequence([None]), "got no intervention"),
    "one": (lambda m: change.ban(m, 3), "experts is 3; accepted is a list"),
    "one layer": (lambda m: change.ban(m, [3], layers=1), "layers is 1; accepted is a list"),
    "mask": (lambda m: change.ban(m, np.arange(E) > 4), "expert False does not exist"),
    "place": (lambda m: change.ban(m, [1], positions=4), "positions are 4; accepted are two"),
    "between": (lambda m: change.ban(m, [1], positions=(1.5, 2)), "positions are .1.5, 2."),
    "far": (lambda m: change.ban(m, [1], positions=(2**31, None)), "positions are .2147483648"),
    "first": (lambda m: change.ban(m, [1], positions=(None, 2)), "positions are .None, 2."),
    "large": (lambda m: change.add_bias(m, {1: 1e300}), "value of expert 1 is 1e.300; accepted"),
    "word": (lambda m: change.scale_weights(m, {1: "a"}), "value of expert 1 is 'a'; accepted"),
    "words": (lambda m: change.temperature(m, "hot"), "temperature is 'hot'; accepted"),
    "added": (
        lambda m: change.add_bias(m, {1: 9e5}, base=change.add_bias(m, {1: 9e5})),
        "a bias of size 1.8e.06 comes out",
    ),
    "cold": (
        lambda m: change.temperature(m, 1e-4, base=change.temperature(m, 1e-4)),
        "a temperature of size 1e-08 comes out",
    ),
    "true": (lambda m: change.experts_per_token(m, True), "k is True; accepted"),
    "truth": (lambda m: change.ban(m, [1], positions=(False, True)), "positions are .False, True."),
    "digits": (lambda m: change.temperature(m, "0.5"), "temperature is '0.5'; accepted"),
    "fraction": (lambda m: change.ban(m, [1], layers=[1.0]), "layer 1.0 is no MoE layer"),
    "base": (
        lambda m: change.ban(m, [1], base="none"),
        "got a str in the place of an intervention",
    ),
    "combined": (lambda m: change.combine(change.neutral(m), None), "got a NoneType in the place"),
    "alone": (
        lambda m: change.per_sequence(change.neutral(m)),
        "got one intervention; give a list",
    ),
    "used": (
        lambda m: m(np.ones((1, 2), int), intervention="ban"),
        "the intervention is of type str",
    ),
    "no model": (lambda m: change.ban("demo", [1]), "the model is 'demo'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_input_is_refused(tiny, kind, no_type_checks):
    make, message = REFUSED[kind]
    with pytest.raises(RequestError, match=message):
        make(tiny)


def test_numbers_may_come_in_arrays(tiny):
    found = change.ban(tiny, jnp.asarray([1, 2]), layers=np.asarray([1]), positions=(3, 9))
    wanted = change.ban(tiny, [1, 2], layers=[1], positions=(3, 9))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    change.temperature(tiny, 1e6), change.temperature(tiny, 1e-6), change.add_bias(tiny, {0: -1e6})


def test_fewer_experts_are_left_in_one_sequence_at_some_positions(tiny):
    ok = change.ban(tiny, [0, 1, 2], positions=(0, 10))
    with pytest.raises(RequestError, match=r"leaves 1 .* layer 1 from position 5 on"):
        change.ban(tiny, [3, 4], layers=[1], positions=(5, None), base=ok)
    change.ban(tiny, [3, 4], positions=(10, None), base=ok)
    change.ban(tiny, [3, 4], base=change.experts_per_token(tiny, 1, base=ok))


@pytest.mark.parametrize(("k", "left"), [(4, 3), (1, 1)])
def test_a_router_of_another_number_says_how_many_must_be_left(tiny, k, left):
    """Of six experts; the configuration has two a token."""
    model = with_router(tiny, "softmax", k=k)
    assert change.neutral(model).own == k
    change.ban(model, range(6 - k))
    if left < k:
        with pytest.raises(RequestError, match=f"leaves {left} experts .* takes {k}"):
            change.ban(model, range(6 - left))
        with pytest.raises(RequestError, match="for 4 experts a token, but this model has 2"):
            tiny.check_intervention(change.neutral(model), 1)


def test_models_that_it_does_not_fit(tiny, tokens):
    dense = {key: TINY[key] for key in TINY if "expert" not in key and "moe" not in key}
    dense = QwenConfig.from_hf(dense | {"model_type": "qwen3_5_text", "intermediate_size": 16})
    with pytest.raises(RequestError, match="no MoE layers"):
        change.ban(dense, [0])
    wide = dataclasses.replace(tiny.config, num_experts=8)
    with pytest.raises(RequestError, match=r"of 8 experts, but this model has .* of 6"):
        tiny(tokens, intervention=change.ban(wide, [7]))
    single = dataclasses.replace(tiny.config, num_experts_per_tok=1)
    with pytest.raises(RequestError, match="for 1 experts a token, but this model has 2"):
        tiny(tokens, intervention=change.ban(single, range(5)))
    three = change.per_sequence([change.neutral(tiny)] * 3)
    with pytest.raises(RequestError, match="3 rows for 2 sequences"):
        tiny(tokens, intervention=three)
