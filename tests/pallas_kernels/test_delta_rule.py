"""`gated_delta_rule` against the formulas, token by token in float64, in any ragged chunking."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.delta_rule import gated_delta_rule
from tests.pallas_kernels.layers import Layer, assert_ring

run = jax.jit(gated_delta_rule)


def call(layer: Layer, inputs, states, start, lengths):
    qkv, b, a = inputs
    counts = np.array(start, np.int32), np.array(lengths, np.int32)
    return run(qkv, b, a, *layer.weights, *states, *counts)


def assert_close(actual, wanted, tolerance=1e-5):
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert np.abs(actual - wanted).max() < tolerance * max(1e-3, wanted.std())


LENGTHS = [515, 1, 63, 200, 64, 65]


def test_ragged_batch_matches_the_formulas():
    layer = Layer()
    inputs = layer.inputs(6, 515)
    for row, length in enumerate(LENGTHS):
        for x in inputs:
            x[row, length:] = np.nan
    mixed, conv_state, delta_state = call(layer, inputs, layer.states(6, np.nan), [0] * 6, LENGTHS)
    assert delta_state.dtype == jnp.float32
    for row, length in enumerate(LENGTHS):
        real = [x[row, :length] for x in inputs]
        read, state = layer.expected(*real)
        assert_close(mixed[row, :length], read)
        assert_close(delta_state[row], state)
        assert_ring(conv_state[row], real[0])


@pytest.mark.parametrize(("seed", "garbage"), [(0, np.nan), (1, np.inf), (2, 7.0)])
def test_any_ragged_chunking_gives_the_same(seed, garbage):
    layer, rng, totals = Layer(), np.random.default_rng(seed), np.array([515, 130, 65])
    inputs = layer.inputs(3, 515)
    states, done, reads = layer.states(3, np.nan), np.zeros(3, np.int32), [[], [], []]
    while (done < totals).any():
        width = int(rng.choice([1, 7, 130]))
        lengths = np.minimum(rng.integers(0, width, 3, endpoint=True), totals - done)
        lengths[rng.integers(3)] *= rng.integers(2)
        piece = [np.full((3, width, x.shape[2]), garbage, np.float32) for x in inputs]
        for row, (at, count) in enumerate(zip(done, lengths, strict=True)):
            for x, whole in zip(piece, inputs, strict=True):
                x[row, :count] = whole[row, at : at + count]
        mixed, *states = call(layer, piece, states, done, lengths)
        for row, count in enumerate(lengths):
            reads[row].append(np.asarray(mixed)[row, :count])
        done += lengths.astype(np.int32)
        for row, at in enumerate(done):
            assert_ring(states[0][row], inputs[0][row, :at])
    for row, total in enumerate(totals):
        read, state = layer.expected(*(x[row, :total] for x in inputs))
        assert_close(np.concatenate(reads[row]), read)
        assert_close(states[1][row], state)


@pytest.mark.parametrize(
    "layer",
    [
        Layer(key_heads=1, heads=3, key_width=4, value_width=4, taps=2),
        Layer(key_heads=4, heads=4, key_width=3, value_width=8, taps=1),
    ],
    ids=lambda layer: f"{layer.key_heads} to {layer.heads} heads, {layer.taps} taps",
)
@pytest.mark.parametrize("length", [1, 64])
def test_other_sizes(layer, length):
    inputs, before = layer.inputs(1, 2 * length), layer.states(1, np.nan)
    first, second = ([x[:, part] for x in inputs] for part in (slice(length), slice(length, None)))
    early, *states = call(layer, first, before, [0], [length])
    late, conv_state, delta_state = call(layer, second, states, [length], [length])
    read, state = layer.expected(*(x[0] for x in inputs))
    assert_close(np.concatenate([early[0], late[0]]), read)
    assert_close(delta_state[0], state)
    assert_ring(conv_state[0], inputs[0][0])


def test_bfloat16_keeps_the_state_in_float32():
    layer = Layer()
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in layer.inputs(1, 130)]
    layer.conv_weight = jnp.asarray(layer.conv_weight, jnp.bfloat16)
    mixed, *states = call(layer, inputs, layer.states(1, np.nan, jnp.bfloat16), [0], [130])
    assert [x.dtype for x in (mixed, *states)] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    read, state = layer.expected(*(np.asarray(x[0], np.float32) for x in inputs))
    assert_close(mixed[0], read, 0.1)
    assert_close(states[1][0], state, 0.1)
    assert_ring(states[0][0], np.asarray(inputs[0][0]))

    first, *halfway = call(layer, inputs, layer.states(1, np.nan, jnp.bfloat16), [0], [65])
    rest = [jnp.roll(x, -65, axis=1) for x in inputs]
    second, *joined = call(layer, rest, halfway, [65], [65])
    np.testing.assert_array_equal(first[0, :65], mixed[0, :65])
    assert_close(second[0, :65], mixed[0, 65:], 0.01)
    assert_close(joined[1], states[1])


def test_gradient(check_gradient, normal):
    layer = Layer(key_heads=1, heads=2, key_width=3, value_width=4)
    real, padded = 66, 70
    qkv, b, a = (x[0, :real] for x in layer.inputs(1, padded))
    history, state = normal(layer.taps, layer.channels), normal(2, 3, 4)
    counts = jnp.array([2 * layer.taps], jnp.int32), jnp.array([real], jnp.int32)

    def function(qkv, b, a, conv_weight, a_log, dt_bias, state):
        rows = (jnp.pad(x[None], ((0, 0), (0, padded - real), (0, 0))) for x in (qkv, b, a))
        ring = jnp.asarray(history.T)  # in order, as `start` is a multiple of the taps
        out = gated_delta_rule(*rows, conv_weight, a_log, dt_bias, ring[None], state[None], *counts)
        return jnp.concatenate([out.mixed[0, :real].reshape(-1), out.delta_state.reshape(-1)])

    def oracle(qkv, b, a, conv_weight, a_log, dt_bias, state):
        given = (qkv, b, a, conv_weight, a_log, dt_bias, state, history[1:])
        return np.concatenate([x.reshape(-1) for x in layer.oracle(*given)])

    grad = check_gradient(function, oracle, qkv, b, a, *layer.weights, state)
    qkv, b, a = qkv.copy(), b.copy(), a.copy()
    qkv[:40] = 0  # the L2 norms of zero
    a[10:20], a[20:30], b[30:50] = 1e4, -1e4, 1e4
    for leaf in jax.tree.leaves(grad(qkv, b, a, *layer.weights, state)):
        assert np.isfinite(leaf).all()
