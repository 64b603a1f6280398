"""The training step: its gradients, its optimiser, and what must not change it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qwen_jax.errors import RequestError
from qwen_jax.model import CausalLM
from qwen_jax.train import (
    AdamW,
    NextTokens,
    Schedule,
    Skeleton,
    Trainer,
    Training,
    parameters_of,
    split,
)
from qwen_jax.train.experts import make_dense
from qwen_jax.train.recompute import recompute_layers
from tests.qwen_jax.train.conftest import one_step, stacked


@pytest.fixture(scope="module")
def slopes(skeleton, parameters, batch) -> dict[str, np.ndarray]:
    """Gradients through the model as it is: no dense experts, nothing computed twice."""
    objective, frame = NextTokens(), Skeleton.of(skeleton)

    def loss(parameters):
        return objective.loss(frame.filled(parameters), batch, jnp.float32(26), 1.0)[0]

    return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(parameters))


@pytest.fixture(scope="module")
def stepped(plain, parameters, batch):
    return one_step(plain, parameters, batch)


def norm(slopes: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in slopes.values())))


def test_gradients_are_those_of_finite_differences(hybrid, tiny, batch):
    frame, random, parameters = Skeleton.of(hybrid), np.random.default_rng(2), parameters_of(tiny)
    ways = {n: random.normal(size=x.shape).astype(np.float32) for n, x in parameters.items()}

    @jax.jit
    def loss(reach):
        """The loss, and its slope along `ways`, by the backward pass of all that a step does."""

        def at(parameters):
            model = frame.filled(parameters)
            make_dense(model.layers, model.config)
            recompute_layers(model)
            return NextTokens().loss(model, batch, jnp.float32(26), 1.0)[0]

        value, slopes = jax.value_and_grad(at)(
            {n: x + reach * ways[n] for n, x in parameters.items()}
        )
        return value, sum(jnp.sum(slopes[n] * ways[n]) for n in slopes)

    reach = 2e-4
    found = (float(loss(reach)[0]) - float(loss(-reach)[0])) / (2 * reach)
    assert found == pytest.approx(float(loss(0.0)[1]), rel=0.03)


def test_the_step_is_adamw_in_float64(stepped, parameters, slopes):
    state, found = stepped
    assert float(found["gradient_norm"][0]) == pytest.approx(norm(slopes), rel=1e-4)
    shorter = min(1.0, 1.0 / norm(slopes))
    for name, start in parameters.items():
        slope = slopes[name].astype(np.float64) * shorter
        decay = 0.1 if start.ndim >= 2 and "conv1d" not in name else 0.0
        # The first step's means are the gradient and its square, exactly.
        way = slope / (np.abs(slope) + 1e-8) + decay * np.asarray(start, np.float64)
        clear = np.abs(slope) > 1e-6
        wanted = np.asarray(start, np.float64) - 1e-2 * way
        np.testing.assert_allclose(np.asarray(state.trained[name])[clear], wanted[clear], atol=1e-4)
        np.testing.assert_allclose(
            state.optimiser[1].mu[name], 0.1 * slope, atol=1e-6 + 1e-4 * np.abs(slope).max()
        )
    assert int(state.step) == 1


def test_parts_of_a_batch_and_several_steps_add_up(skeleton, parameters, batch, plain, stepped):
    rates = np.array([1e-2, 1e-3], np.float32)
    trainer = Trainer(skeleton, Training(parts=2, recompute=False))
    both, found = trainer.steps(trainer.start(parameters), {}, stacked(batch, 2), rates)
    first, of_first = stepped
    assert float(found["loss"][0]) == pytest.approx(float(of_first["loss"][0]), rel=1e-5)
    norms = found["gradient_norm"][0], of_first["gradient_norm"][0]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-4)
    second, of_second = plain.steps(jax.tree.map(jnp.copy, first), {}, stacked(batch), rates[1:])
    assert float(found["loss"][1]) == pytest.approx(float(of_second["loss"][0]), rel=1e-4)
    assert found["loss"][1] < found["loss"][0]
    for name, mean in both.optimiser[1].mu.items():
        np.testing.assert_allclose(mean, second.optimiser[1].mu[name], atol=2e-6)


@pytest.mark.slow
def test_bfloat16_computes_and_float32_remembers(skeleton, parameters, batch, slopes):
    config = dataclasses.replace(skeleton.config, dtype="bfloat16")
    trainer = Trainer(CausalLM(config), Training())
    state, found = one_step(trainer, parameters, batch, rate=1e-6)
    assert {value.dtype for value in state.trained.values()} == {jnp.dtype("float32")}
    moved = state.trained["embed_tokens.weight"] - parameters["embed_tokens.weight"]
    assert 0 < float(jnp.abs(moved).max()) < 1e-5
    assert float(found["gradient_norm"][0]) == pytest.approx(norm(slopes), rel=0.1)
    filled = trainer.model(state.trained, {})
    assert filled.lm_head.weight.dtype == jnp.bfloat16


def test_held_out_loss(plain, stepped, parameters, batch):
    total, count = plain.loss(parameters, {}, batch)
    assert float(count) == 26
    assert float(total) / 26 == pytest.approx(float(stepped[1]["loss"][0]), rel=1e-5)


def test_variables_of_a_router_of_ones_own(skeleton, parameters):
    """Kinds of variables stay; what is not floating is never trained."""
    model = Skeleton.of(skeleton).filled(parameters)
    gate: Any = model.layers[0].mlp.gate
    gate.bias, gate.seen = nnx.Param(jnp.zeros(6)), nnx.Variable(jnp.zeros(6, jnp.int32))
    found = parameters_of(model)
    parts = split(found, ["*.mlp.gate.*"])
    assert sorted(parts.trained) == [f"layers.0.mlp.gate.{name}" for name in ("bias", "weight")]
    again: Any = Skeleton.of(model).filled({**parts.trained, **parts.fixed}).layers[0].mlp.gate
    assert (type(again.bias), type(again.seen)) == (nnx.Param, nnx.Variable)
    assert again.seen.dtype == jnp.int32


def test_kernels_are_refused(tiny):
    with pytest.raises(RequestError, match=r"implementation is None.*'reference'"):
        Trainer(tiny, Training())


def test_refusals(plain, skeleton, parameters, batch):
    with pytest.raises(RequestError, match=r"no parameter matches '\*\.gates\.\*'"):
        split(parameters, ["*.gates.*"])
    with pytest.raises(RequestError, match="4 rows cannot be cut into 3"):
        one_step(Trainer(skeleton, Training(parts=3)), parameters, batch)
    with pytest.raises(RequestError, match="parts is 0"):
        Training(parts=0)
    with pytest.raises(RequestError, match="decay is -1"):
        AdamW(decay=-1)
    with pytest.raises(RequestError, match="warmup is 9; accepted is 0 to 8"):
        Schedule(steps=8, warmup=9)


def test_the_rate_rises_and_falls():
    schedule = Schedule(steps=10, rate=2.0, warmup=4, final=0.1)
    rates = schedule.rates(0, 10)
    np.testing.assert_allclose(rates[:5], [0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[-1] == pytest.approx(0.2)
    assert (np.diff(rates[4:]) < 0).all()
    np.testing.assert_array_equal(schedule.rates(3, 2), rates[3:5])
