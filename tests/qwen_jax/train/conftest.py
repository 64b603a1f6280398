"""A model of one layer that compiles fast, and a batch; and the tiny hybrid one for gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.model import CausalLM
from qwen_jax.train import Batch, Trainer, Training, TrainState, parameters_of
from qwen_jax.train.parameters import Parameters

ROWS, WINDOW = 4, 11


@pytest.fixture(scope="session")
def hybrid(tiny: CausalLM) -> CausalLM:
    """The tiny model's shapes, every operation of which is its reference."""
    return CausalLM(dataclasses.replace(tiny.config, implementation="reference"))


@pytest.fixture(scope="session")
def skeleton(hybrid: CausalLM) -> CausalLM:
    """The shapes of a model that has the tiny one's last layer alone."""
    one = dataclasses.replace(
        hybrid.config, num_hidden_layers=1, layer_types=hybrid.config.layer_types[1:]
    )
    return CausalLM(one)


@pytest.fixture(scope="session")
def parameters(tiny: CausalLM) -> Parameters:
    """Those of the tiny model that `skeleton` has."""
    found = parameters_of(tiny)
    kept = {name: value for name, value in found.items() if not name.startswith("layers.0.")}
    return {name.replace("layers.1.", "layers.0."): value for name, value in kept.items()}


@pytest.fixture(scope="session")
def batch(tiny: CausalLM) -> Batch:
    """Rows of 11 tokens, two of them with padding, and half of one row not scored."""
    random = np.random.default_rng(11)
    whole = Batch.of_windows(random.integers(0, tiny.config.vocab_size, (ROWS, WINDOW + 1)))
    lengths = np.array([WINDOW, 6, WINDOW, 3], np.int32)
    scored = np.arange(WINDOW)[None, :] < lengths[:, None]
    scored[2, :5] = False
    return jax.tree.map(jnp.asarray, dataclasses.replace(whole, lengths=lengths, scored=scored))


@pytest.fixture(scope="session")
def plain(skeleton: CausalLM) -> Trainer:
    """A trainer with all defaults: one compiled program for the tests that want no other."""
    return Trainer(skeleton, Training())


def stacked(batch: Batch, steps: int = 1) -> Batch:
    """The batch of several steps, the same in each."""
    return jax.tree.map(lambda x: np.stack([x] * steps), batch)


def one_step(trainer: Trainer, parameters: Parameters, batch: Batch, rate: float = 1e-2):
    """State and figures after one step from parameters, all of which are trained."""
    state: TrainState = trainer.start(parameters)
    return trainer.steps(state, {}, stacked(batch), np.array([rate], np.float32))
