"""Activations in few bits: the rounding is its definition, and the wrapped model the same model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from qwen_jax.errors import RequestError
from qwen_jax.evaluate import Windows
from qwen_jax.evaluate.activation_scales import SHARES, activation_scales
from qwen_jax.evaluate.activations import (
    RoundedExperts,
    RoundedLinear,
    run_experts,
    with_activations,
)
from qwen_jax.model import Routing
from qwen_jax.model.moe import Experts
from qwen_jax.quant import (
    ActivationFormat,
    TensorScheme,
    WeightFormat,
    abstract_qtensor,
    fake_quantise,
)
from qwen_jax.quant.random import random_qtensor

BITS = range(3, 9)
STATIC = ActivationFormat(4, "static")
Q_PROJ = "layers.0.self_attn.q_proj"
PATHS = {
    "layers.0.linear_attn.in_proj_qkv",
    "layers.0.linear_attn.in_proj_z",
    "layers.0.linear_attn.out_proj",
    "layers.1.self_attn.q_proj",
    "layers.1.self_attn.k_proj",
    "layers.1.self_attn.v_proj",
    "layers.1.self_attn.o_proj",
}
MLP = ("experts", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj")
PATHS |= {f"layers.{layer}.mlp.{name}" for layer in (0, 1) for name in MLP}


@pytest.mark.parametrize("bits", BITS)
def test_dynamic_rounding_is_the_definition(bits):
    x = np.random.default_rng(bits).normal(0, 2, (3, 5, 40)).astype(np.float32)
    x[1, 2] = 0
    format = ActivationFormat(bits)
    y = np.asarray(fake_quantise(jnp.asarray(x), format))
    top = {3: 3, 4: 7, 5: 15, 6: 31, 7: 63, 8: 127}[bits]
    assert format.largest_code == top
    step = np.abs(x).max(-1, keepdims=True).astype(np.float64) / top
    step[step == 0] = 1
    codes = y / step
    assert np.abs(codes - np.round(codes)).max() < 1e-4
    # Nothing is clipped: no value moves by more than half a step.
    assert (np.abs(y - x) <= step * (0.5 + 1e-5)).all()
    assert np.round(np.abs(codes)).max() == top
    assert (y[1, 2] == 0).all()


@given(st.sampled_from(BITS), st.lists(st.floats(-50, 50, width=32), min_size=4, max_size=4))
def test_static_rounding_is_the_definition(bits, values):
    scale = np.array([0.5, 1.0, 0.125, 4.0], np.float32)
    format = ActivationFormat(bits, "static")
    y = np.asarray(fake_quantise(jnp.array(values, jnp.float32), format, jnp.asarray(scale)))
    top = 2 ** (bits - 1) - 1
    # numpy rounds half to even too, and powers of two divide exactly.
    assert (y == scale * np.clip(np.round(np.float32(values) / scale), -top, top)).all()
    again = fake_quantise(jnp.asarray(y), format, jnp.asarray(scale))
    assert (np.asarray(again) == y).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((2,), "bits are 2"), ((9,), "bits are 9; accepted are 3 to 8"), ((4, "fixed"), "'fixed'")],
)
def test_formats_are_refused(arguments, words):
    with pytest.raises(RequestError, match=words):
        ActivationFormat(*arguments)


def test_scale_belongs_to_the_static_kind():
    with pytest.raises(RequestError, match="'static' need scale"):
        fake_quantise(jnp.ones(3), ActivationFormat(4, "static"))
    with pytest.raises(RequestError, match="'dynamic' take no scale"):
        fake_quantise(jnp.ones(3), ActivationFormat(4), jnp.ones(3))


def test_experts_one_by_one_are_the_experts(sparse):
    experts = sparse.layers[0].mlp.experts
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(0, 1, (2, 20, 32)), jnp.float32)
    # Id 6 is an empty slot.
    ids = np.stack([random.permutation(7)[:2] for _ in range(40)]).reshape(2, 20, 2)
    weights = jnp.asarray(random.random(ids.shape), jnp.float32)
    routing = Routing(jnp.asarray(ids, jnp.int32), weights)

    @jax.jit
    def both(experts: Experts, x: jax.Array, routing: Routing):
        one = run_experts(experts, x, routing, lambda h, used, _: (h, used), None)
        return *one, experts(x, routing)

    found, used, expected = both(experts, x, routing)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.asarray(used).sum() == (ids < 6).sum()


def test_experts_in_codes_are_those_they_stand_for(sparse):
    """Rounding works the same whether an expert is stored in codes or as the same numbers."""
    model = nnx.clone(sparse)
    experts = with_activations(model, ActivationFormat(4)).layers[0].mlp.experts
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(0, 1, (1, 12, 32)), jnp.float32)
    ids = jnp.asarray(random.integers(0, 6, (1, 12, 2)), jnp.int32)
    routing = Routing(ids, jnp.full(ids.shape, 0.5, jnp.float32))
    run = jax.jit(lambda experts: experts(x, routing))
    found = []
    for plain in (False, True):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(experts.experts, name)
            scheme = TensorScheme(WeightFormat(8, 32))
            like = abstract_qtensor(parameter.shape, scheme)
            codes = random_qtensor(like, 0.3, jax.random.key(1))
            parameter.set_value(codes.dequantise("float32") if plain else codes)
        found.append(run(experts))
    assert np.abs(found[0]).max() > 0.1
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_every_matrix_of_a_recipe_is_wrapped_and_nothing_else(tiny):
    wrapped = with_activations(tiny, ActivationFormat(4))
    kinds = RoundedLinear | RoundedExperts
    found = {".".join(map(str, p)) for p, m in nnx.iter_modules(wrapped) if isinstance(m, kinds)}
    assert found == PATHS
    assert not any(isinstance(module, kinds) for _, module in nnx.iter_modules(tiny))


def test_a_rounded_layer_is_the_layer_on_rounded_inputs(sparse):
    """Composed by hand: inputs of the experts rounded, then what each expert makes of them."""
    format = ActivationFormat(4)
    moe = with_activations(sparse, format).layers[0].mlp
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, 12, 32)), jnp.float32)
    routing = Routing(jnp.full((1, 12, 1), 3, jnp.int32), jnp.ones((1, 12, 1), jnp.float32))
    experts = sparse.layers[0].mlp.experts
    up, down = experts.gate_up_proj[3], experts.down_proj[3]
    gate, linear = jnp.split(fake_quantise(x, format) @ up.T, 2, axis=-1)
    expected = fake_quantise(jax.nn.silu(gate) * linear, format) @ down.T
    np.testing.assert_allclose(jax.jit(moe.experts)(x, routing), expected, atol=1e-5)

    o_proj = with_activations(sparse, format).layers[0].self_attn.o_proj
    expected = fake_quantise(x, format) @ o_proj.linear.weight[...].T
    np.testing.assert_allclose(o_proj(x), expected, atol=1e-5)


@pytest.fixture(scope="module")
def windows(random_text) -> Windows:
    return Windows([random_text(52)], window=20)


@pytest.fixture(scope="module")
def scales(sparse, windows):
    return activation_scales(sparse, windows, STATIC, batch_size=2)


@pytest.fixture(scope="module")
def first_inputs(sparse, windows) -> np.ndarray:
    """What the first layer's projections read, [tokens, D]: padding has no part in it."""
    tokens = windows.documents[0].tokens[None, : windows.tokens]
    return np.asarray(sparse.layers[0].input_layernorm(sparse.embed_tokens(jnp.asarray(tokens))))[0]


def test_scales_are_shares_of_the_largest_input(scales, first_inputs):
    assert {*scales} == {f"layers.0.self_attn.{name}_proj" for name in "qkvo"} | {
        f"layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    }
    assert all((scale > 0).all() for scale in scales.values())
    assert scales["layers.0.mlp.experts.gate_up_proj"].shape == (32,)
    assert scales["layers.0.mlp.experts.down_proj"].shape == (6, 16)
    share = scales[Q_PROJ] * 7 / np.abs(first_inputs).max(0)
    assert np.abs(share[:, None] - np.array(SHARES)).min(-1).max() < 1e-5
    assert len(np.unique(np.round(share, 3))) > 2


def test_shares_have_the_least_squared_error(scales, first_inputs):
    def errors(scale: np.ndarray) -> np.ndarray:
        rounded = scale * np.clip(np.round(first_inputs / scale), -7, 7)
        return ((first_inputs - rounded) ** 2).sum(0)

    chosen = errors(scales[Q_PROJ])
    for share in SHARES:
        other = errors(np.float32(share) * np.abs(first_inputs).max(0) / 7)
        assert (chosen <= other * (1 + 1e-3)).all()


def test_experts_without_tokens_and_dark_channels_get_scales(monkeypatch, sparse, windows):
    largest = {
        "experts": np.array([[1.0, 0.0, 4.0], [0.0, 0.0, 0.0], [2.0, 3.0, 1.0]], np.float32),
        "linear": np.array([0.0, 2.0, 4.0], np.float32),
        "dark": np.zeros(3, np.float32),
    }
    flat = {path: np.zeros((*a.shape[:-1], len(SHARES), 3)) for path, a in largest.items()}
    found = iter([largest, flat])
    monkeypatch.setattr("qwen_jax.evaluate.activation_scales._observed", lambda *_: next(found))
    one = Windows(windows.documents, window=20, max_windows=1)
    scales = activation_scales(sparse, one, STATIC)
    assert (scales["experts"] * 7).tolist() == [[1.0, 2.5, 4.0], [2.0, 3.0, 4.0], [2.0, 3.0, 1.0]]
    assert (scales["linear"] * 7).tolist() == [3.0, 2.0, 4.0]
    assert (scales["dark"] * 7).tolist() == [1.0, 1.0, 1.0]
    found = iter([{"linear": np.array([np.nan, 1.0])}])
    with pytest.raises(FloatingPointError, match="inputs of linear"):
        activation_scales(sparse, one, STATIC)


def test_static_scales_round_the_model(sparse, scales):
    o_proj = with_activations(sparse, STATIC, scales).layers[0].self_attn.o_proj
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (1, 12, 32)), jnp.float32)
    scale = scales["layers.0.self_attn.o_proj"]
    rounded = scale * np.clip(np.round(np.asarray(x) / scale), -7, 7)
    np.testing.assert_allclose(o_proj(x), rounded @ o_proj.linear.weight[...].T, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "'static' need scales"),
        (np.ones(3, np.float32), r"q_proj: \(3,\), but the model needs \(32,\)"),
        (np.zeros(32, np.float32), "q_proj are not all finite and above 0"),
    ],
)
def test_scales_that_do_not_fit_are_refused(sparse, scales, change, words):
    given = None if change is None else scales | {Q_PROJ: change}
    with pytest.raises(RequestError, match=words):
        with_activations(sparse, STATIC, given)


def test_scales_are_refused_by_the_dynamic_kind(sparse, windows, scales):
    with pytest.raises(RequestError, match="'dynamic' take no scales"):
        with_activations(sparse, ActivationFormat(8), scales)
    with pytest.raises(RequestError, match="accepted is 'static'"):
        activation_scales(sparse, windows, ActivationFormat(8))
