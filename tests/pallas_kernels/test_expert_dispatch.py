"""`expert_dispatch` against a loop over tokens and slots in float64; its cost follows the slots."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_dispatch import expert_dispatch
from pallas_kernels.expert_dispatch.reference import GATHER_TOKENS
from pallas_kernels.expert_dispatch.shared import SharedExpert

run = jax.jit(expert_dispatch)

WIDTH, HIDDEN = 12, 10


@dataclasses.dataclass
class Layer:
    """Random tokens, routing and experts."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    gate_up_proj: np.ndarray
    down_proj: np.ndarray

    @classmethod
    def random(cls, tokens: int, experts: int = 8, slots: int = 3):
        rng = np.random.default_rng(4)
        ids = np.stack([rng.permutation(experts)[:slots] for _ in range(tokens)])
        shapes = ((experts, 2 * HIDDEN, WIDTH), (experts, WIDTH, HIDDEN))
        return cls(
            rng.standard_normal((tokens, WIDTH)).astype(np.float32),
            ids.astype(np.int32),
            rng.random((tokens, slots), np.float32),
            *(rng.standard_normal(shape).astype(np.float32) for shape in shapes),
        )

    def values(self):
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def check(self, tolerance=1e-5):
        wanted = oracle(*self.values())
        actual = np.asarray(run(*self.values()))
        assert np.abs(actual - wanted).max() < tolerance * max(1, wanted.std())


def oracle(x, ids, weights, gate_up_proj, down_proj):
    x, weights, up, down = (
        np.asarray(array, np.float64) for array in (x, weights, gate_up_proj, down_proj)
    )
    result = np.zeros(x.shape)
    for m, a in np.ndindex(*ids.shape):
        expert = ids[m, a]
        if 0 <= expert < len(up):
            gate, value = np.split(up[expert] @ x[m], 2)
            result[m] += weights[m, a] * (down[expert] @ (gate / (1 + np.exp(-gate)) * value))
    return result


# 64 and 65 tokens are on both sides of the border between the two ways to compute it.
TOKENS = [1, 7, 31, 33, 64, 65]


@pytest.mark.parametrize("tokens", TOKENS)
def test_any_routing_matches_the_loop(tokens):
    layer = Layer.random(tokens)
    layer.check()
    layer.ids[:] = 5  # one expert takes all, several times a token
    layer.check()
    layer.ids[:] = 1 + layer.ids % 6  # nothing for the first and the last
    layer.check()


@pytest.mark.parametrize("tokens", TOKENS)
def test_empty_slots_add_nothing(tokens):
    layer, rng = Layer.random(tokens), np.random.default_rng(5)
    ids = layer.ids.copy()
    for part in (0.5, 0.95, 1):
        empty = rng.random(ids.shape) < part
        layer.ids = np.where(empty, rng.choice([8, -1, 9, 2**31 - 1, -(2**31)], ids.shape), ids)
        layer.ids = layer.ids.astype(np.int32)
        layer.check()
    assert not np.asarray(run(*layer.values())).any()


@pytest.mark.parametrize("tokens", [3, 65])
def test_empty_slots_may_hold_anything(tokens):
    layer = Layer.random(tokens)
    layer.ids[::2, 1], layer.ids[1] = -1, 8
    wanted = np.asarray(run(*layer.values()))
    layer.weights[::2, 1], layer.weights[1] = np.nan, np.inf
    layer.x[1] = np.nan  # a token of padding: all its slots are empty
    np.testing.assert_array_equal(np.asarray(run(*layer.values())), wanted)
    assert not wanted[1].any()


@pytest.mark.parametrize("tokens", [3, 65])
def test_the_sum_is_added_to_the_residual(tokens):
    layer = Layer.random(tokens)
    residual = np.random.default_rng(6).standard_normal((tokens, WIDTH)).astype(np.float32)
    wanted = residual + np.asarray(run(*layer.values()))
    np.testing.assert_allclose(run(*layer.values(), None, residual), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [3, 65])
def test_a_logit_given_takes_the_place_of_the_shared_experts_own(tokens):
    layer, rng = Layer.random(tokens), np.random.default_rng(7)
    shapes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (1, WIDTH))
    gate, up, down, row = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    x = layer.x.astype(np.float64)
    logit = np.resize([np.nan, -np.inf, 0.5, np.inf], (tokens, 1)).astype(np.float32)
    counted = np.where(np.isnan(logit), x @ row.T.astype(np.float64), logit)
    made = x @ gate.T
    made = (made / (1 + np.exp(-made)) * (x @ up.T)) @ down.T
    shared = SharedExpert(gate, up, down, row, jnp.asarray(logit))
    wanted = oracle(*layer.values()) + made / (1 + np.exp(-counted))
    np.testing.assert_allclose(run(*layer.values(), shared), wanted, rtol=1e-4, atol=1e-4)
    nothing = dataclasses.replace(shared, logit=jnp.full((tokens, 1), jnp.nan))
    without = dataclasses.replace(shared, logit=None)
    np.testing.assert_array_equal(run(*layer.values(), nothing), run(*layer.values(), without))
    wrong = dataclasses.replace(shared, logit=jnp.zeros((tokens,)))
    with pytest.raises(ExceptionGroup) as caught:
        run(*layer.values(), wrong)
    assert "shared logit is float32[" in str(caught.value.exceptions)


def test_both_ways_agree_at_their_border():
    layer = Layer.random(GATHER_TOKENS + 1)
    many = np.asarray(run(*layer.values()))
    few = dataclasses.replace(
        layer, **{name: getattr(layer, name)[:-1] for name in ("x", "ids", "weights")}
    )
    np.testing.assert_allclose(run(*few.values()), many[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "experts", "slots"), [(9, 1, 1), (70, 1, 1), (70, 70, 70)])
def test_one_expert_and_all_experts(tokens, experts, slots):
    Layer.random(tokens, experts, slots).check()


def test_many_experts():
    Layer.random(100, experts=256, slots=8).check()


def test_crowded_expert_beside_sparse_ones():
    layer = Layer.random(600, experts=16, slots=2)
    layer.ids[:590] = [[3, 15]]
    layer.check()


@pytest.mark.parametrize("tokens", [20, 100])
def test_bfloat16_is_summed_in_float32(tokens):
    layer = Layer.random(tokens)
    for name in ("x", "gate_up_proj", "down_proj"):
        setattr(layer, name, jnp.asarray(getattr(layer, name), jnp.bfloat16))
    assert run(*layer.values()).dtype == jnp.bfloat16
    layer.check(0.05)


@pytest.mark.parametrize("tokens", [5, 70])
def test_gradient(check_gradient, tokens):
    layer = Layer.random(tokens, experts=5, slots=2)
    layer.ids[0], layer.ids[1, 0] = 5, -1

    def of(function):
        return lambda x, weights, *experts: function(x, layer.ids, weights, *experts)

    def function(x, *rest):
        return of(lambda x, ids, *rest: expert_dispatch(x, jnp.asarray(ids), *rest))(x, *rest)

    check_gradient(
        function, of(oracle), layer.x, layer.weights, layer.gate_up_proj, layer.down_proj
    )


def arguments(tokens: int, slots: int, experts: int, width: int = 32):
    of = jax.ShapeDtypeStruct
    return (
        of((tokens, width), jnp.float32),
        of((tokens, slots), jnp.int32),
        of((tokens, slots), jnp.float32),
        of((experts, 2 * width, width), jnp.float32),
        of((experts, width, width), jnp.float32),
    )


def products(jaxpr) -> int:
    """Multiplications in a program's matrix products; a scan's body counts as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += depth * math.prod(eqn.outvars[0].aval.shape)
        assert eqn.primitive.name not in ("while", "cond", "ragged_dot_general")
        for inner in eqn.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += eqn.params.get("length", 1) * products(inner)
    return total


def products_a_slot(tokens: int, slots: int, experts: int) -> float:
    """Multiplications a slot, where 1 is what one expert costs for one token."""
    shapes = arguments(tokens, slots, experts)
    width = shapes[0].shape[1]
    expert = 3 * width * width + width  # the last term weights the outputs
    return products(jax.make_jaxpr(expert_dispatch)(*shapes).jaxpr) / (tokens * slots * expert)


@pytest.mark.parametrize("tokens", [1, 20, 64])
def test_few_tokens_cost_their_slots_only(tokens):
    assert products_a_slot(tokens, 8, 256) <= 1
    assert products_a_slot(tokens, 8, 256) == products_a_slot(tokens, 8, 4096)


def test_many_tokens_cost_their_slots_and_not_the_experts():
    # From 16 slots an expert on, tiles that are not full cost at most twice the slots on top.
    for tokens, experts in ((512, 256), (1024, 256), (8192, 256), (512, 64), (512, 8), (8192, 8)):
        assert products_a_slot(tokens, 8, experts) <= 3
    # With fewer, at most one tile of 16 an expert that has a slot.
    for tokens, experts in ((65, 256), (65, 1024), (65, 4096)):
        assert products_a_slot(tokens, 8, experts) <= 18
    assert products_a_slot(65, 8, 4096) == products_a_slot(65, 8, 520)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 256), (64, 256), (512, 256)])
def test_memory_is_bounded_by_what_is_routed(optimised, tokens, experts):
    # In float32, as XLA for CPUs before JAX 0.12 widens all bfloat16 weights at once.
    shapes = arguments(tokens, 8, experts)
    width, slots = shapes[0].shape[1], 8 * tokens
    compiled = jax.jit(expert_dispatch).lower(*shapes).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes / 4
    one_expert = 3 * width * width
    if tokens <= GATHER_TOKENS:
        assert memory < min(64, slots) * (one_expert + 8 * width)
    else:
        assert memory < one_expert + 2 * tokens * width + 4 * slots
    flops = compiled.cost_analysis()["flops"]  # the body of a loop counts once
    assert flops < 2 * tokens * experts * one_expert / 8


def test_memory_does_not_grow_with_the_number_of_layers(optimised):
    x, *routed = arguments(512, 8, 8)

    def memory(layers: int) -> int:
        def stack(x, *routed):
            for _ in range(layers):
                x = x + expert_dispatch(x, *routed)
            return x

        return jax.jit(stack).lower(x, *routed).compile().memory_analysis().temp_size_in_bytes

    assert memory(4) < memory(1) + 2 * 4 * math.prod(x.shape)
