"""Expert dropout and gradient routing: by hand, and by finite differences in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen_jax.errors import RequestError
from qwen_jax.model import RouterContext, Routing
from qwen_jax.model.moe import Experts
from qwen_jax.model.routing import TopKRouter
from qwen_jax.train import Skeleton
from qwen_jax.train.dropout import DroppingRouter, drop_experts, kept_experts
from qwen_jax.train.experts import DenseExperts, make_dense
from qwen_jax.train.gradient_routing import GradientRouting, ListeningExperts, let_listen

EXPERTS, WIDTH, HIDDEN = 2, 3, 2


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def of_one_token(x: Any) -> RouterContext:
    """What a router sees of a token x."""
    position = jnp.zeros((1, 1), jnp.int32)
    return RouterContext(position >= 0, x[None, None], position, position, layer=0)


@pytest.fixture(scope="module")
def numbers() -> dict[str, np.ndarray]:
    """Two experts, one token; each token uses one."""
    random = np.random.default_rng(1)
    shapes = {
        "x": (WIDTH,),
        "gate": (EXPERTS, WIDTH),
        "up": (EXPERTS, 2 * HIDDEN, WIDTH),
        "down": (EXPERTS, WIDTH, HIDDEN),
        "slope": (WIDTH,),
    }
    return {name: random.normal(size=shape) for name, shape in shapes.items()}


def experts_of(parameters: dict[str, Any]) -> Experts:
    experts = Experts(EXPERTS, WIDTH, HIDDEN, "float32", implementation="reference")
    experts.gate_up_proj = nnx.Param(parameters["up"])
    experts.down_proj = nnx.Param(parameters["down"])
    return experts


def loss_of(wrap: Any, parameters: dict[str, Any], x: Any, slope: Any, chosen: int = 1) -> Any:
    """A loss that is linear in the layer's output, routed by logits = gate x."""
    gate = TopKRouter(
        WIDTH, EXPERTS, chosen, "float32", renormalise=False, implementation="reference"
    )
    gate.weight = nnx.Param(parameters["gate"])
    routing = gate(x[None, None], of_one_token(x))
    return jnp.sum(wrap(experts_of(parameters))(x[None, None], routing)[0, 0] * slope)


def in_float32(numbers: dict[str, np.ndarray]) -> tuple[dict[str, Any], Any, Any]:
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in numbers.items()}
    x, slope = arrays.pop("x"), arrays.pop("slope")
    return arrays, x, slope


def output(numbers: dict[str, np.ndarray], weights: np.ndarray) -> float:
    """The loss with these weights of the experts, in float64."""
    total = 0.0
    for expert in range(EXPERTS):
        gate, up = np.split(numbers["up"][expert] @ numbers["x"], 2)
        down = numbers["down"][expert] @ (silu(gate) * up)
        total += weights[expert] * float(down @ numbers["slope"])
    return total


@pytest.mark.parametrize("settings", [GradientRouting(0.5, 1.0), GradientRouting(0.5, 0.02)])
def test_gradients_are_those_of_the_faint_weights(numbers, settings):
    """Of the surrogate whose forward pass has the unselected expert's small weight in it."""

    def surrogate(numbers: dict[str, np.ndarray]) -> float:
        logits = numbers["gate"] @ numbers["x"]
        odds = np.exp(logits) / np.exp(logits).sum()
        faint = np.minimum(settings.strength * odds, settings.cap)
        best = int(np.argmax(logits))
        return output(numbers, np.where(np.arange(EXPERTS) == best, odds, faint))

    parameters, x, slope = in_float32(numbers)

    def loss(parameters):
        return loss_of(
            lambda experts: ListeningExperts(DenseExperts(experts), settings), parameters, x, slope
        )

    slopes = jax.jit(jax.grad(loss))(parameters)
    for name, found in slopes.items():
        for place in np.ndindex(found.shape):
            moved = []
            for reach in (1e-6, -1e-6):
                copy = {key: value.copy() for key, value in numbers.items()}
                copy[name][place] += reach
                moved.append(surrogate(copy))
            assert float(found[place]) == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-5)


def test_the_signal_by_hand(numbers):
    """The down projection of the expert not chosen: cap times what it was given times the slope."""
    parameters, x, slope = in_float32(numbers)
    settings = GradientRouting(1.0, 0.02)
    other = int(np.argmin(numbers["gate"] @ numbers["x"]))
    gate, up = np.split(numbers["up"][other] @ numbers["x"], 2)
    wanted = 0.02 * np.outer(numbers["slope"], silu(gate) * up)

    def slopes(wrap):
        run = jax.value_and_grad(lambda p: loss_of(wrap, p, x, slope))
        return jax.jit(run)(parameters)

    quiet, without = slopes(DenseExperts)
    heard, with_signal = slopes(lambda e: ListeningExperts(DenseExperts(e), settings))
    assert np.asarray(quiet).tobytes() == np.asarray(heard).tobytes()
    np.testing.assert_allclose(with_signal["down"][other], wanted, rtol=1e-5)
    assert not np.asarray(without["down"][other]).any()
    np.testing.assert_array_equal(with_signal["down"][1 - other], without["down"][1 - other])


def test_padding_gives_no_signal():
    random = np.random.default_rng(3)
    logits = jnp.asarray(random.normal(size=(1, 2, EXPERTS)), jnp.float32)
    routing = Routing(jnp.array([[[0], [EXPERTS]]]), jnp.array([[[0.5], [0.0]]]), logits)
    faint = ListeningExperts(None, GradientRouting())._faint(routing, EXPERTS)
    assert (np.asarray(faint[0, 0]) > 0).tolist() == [False, True]
    assert not np.asarray(faint[0, 1]).any()


def test_dense_experts_are_the_experts(numbers):
    parameters, x, slope = in_float32(numbers)

    def run(wrap):
        return jax.jit(jax.value_and_grad(lambda p: loss_of(wrap, p, x, slope, 2)))(parameters)

    value, slopes = run(DenseExperts)
    wanted, of_reference = run(lambda experts: experts)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    for name in slopes:
        np.testing.assert_allclose(slopes[name], of_reference[name], atol=1e-6)


def test_enough_experts_stay():
    keys = jax.random.split(jax.random.key(0), 2000)
    kept = np.asarray(jax.vmap(lambda key: kept_experts(key, 8, 3, 0.5))(keys))
    assert kept.sum(1).min() == 3
    often = kept.mean(0)
    # Without the least number it would be 0.5: 3 stay where fewer would.
    assert often.max() - often.min() < 0.08
    assert 0.5 < often.mean() < 0.56
    assert np.asarray(jax.vmap(lambda key: kept_experts(key, 8, 3, 0.0))(keys)).all()


def test_a_dropped_expert_takes_no_token_and_learns_nothing(numbers):
    parameters, x, slope = in_float32(numbers)
    best = int(np.argmax(numbers["gate"] @ numbers["x"]))
    kept = jnp.arange(EXPERTS) != best

    def loss(parameters):
        gate = TopKRouter(
            WIDTH, EXPERTS, 1, "float32", renormalise=False, implementation="reference"
        )
        gate.weight = nnx.Param(parameters["gate"])
        routing = DroppingRouter(gate, kept)(x[None, None], of_one_token(x))
        y = DenseExperts(experts_of(parameters))(x[None, None], routing)
        return jnp.sum(y[0, 0] * slope), routing

    (value, routing), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    assert routing.ids.tolist() == [[[1 - best]]]
    # Among those that stay: of one, its weight is 1.
    wanted = output(numbers, np.arange(EXPERTS) != best)
    assert float(value) == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(routing.logits[0, 0], numbers["gate"] @ numbers["x"], rtol=1e-5)
    assert not np.asarray(slopes["down"][best]).any()
    assert np.asarray(slopes["down"][1 - best]).any()


def test_what_cannot_be_wrapped(skeleton, parameters):
    model = Skeleton.of(skeleton).filled(parameters)
    with pytest.raises(RequestError, match=r"expert dropout is 1\.0"):
        drop_experts(model, jax.random.key(0), 1.0)
    moe = model.layers[0].mlp
    moe.gate = DroppingRouter(moe.gate, jnp.ones(6, bool))
    with pytest.raises(RequestError, match="released router, not a DroppingRouter"):
        drop_experts(model, jax.random.key(0), 0.1)
    make_dense(model.layers, model.config)
    let_listen(model, GradientRouting())
    with pytest.raises(RequestError, match="experts are a ListeningExperts"):
        let_listen(model, GradientRouting())
    with pytest.raises(RequestError, match="cap is 2"):
        GradientRouting(cap=2)
    model.layers = nnx.List([])
    with pytest.raises(RequestError, match="no MoE layers: gradient routing"):
        let_listen(model, GradientRouting())
