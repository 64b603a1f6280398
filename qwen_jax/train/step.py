"""The compiled training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from pallas_kernels.dispatch import REFERENCE

from ..errors import RequestError
from ..model import CausalLM
from ..pytree import pytree
from .batch import Batch
from .experts import make_dense
from .losses import Penalties, loss_of_batch
from .optimiser import AdamW
from .parameters import Parameters, Skeleton, masters
from .recompute import recompute_layers

Metrics = dict[str, Array]
Assemble = Callable[[Parameters, Parameters], Parameters]


@pytree
class TrainState:
    """All that a run changes: with the same batches, the run goes on from it bit for bit.

    Attributes:
        step: int32 [], steps taken. Random draws depend on it and on the seed alone.
        trained: float32 arrays by name.
        optimiser: optax's state.
    """

    step: Array
    trained: Parameters
    optimiser: Any


@dataclasses.dataclass(frozen=True)
class Training:
    """What is done in a step; hashable, so that one compiled program serves all calls.

    Attributes:
        optimiser: how parameters follow gradients.
        penalties: what is added to the loss.
        parts: into how many parts a batch is cut whose gradients are added up, one in memory at a
            time.
        recompute: whether layers keep nothing for the backward pass and are computed again.
        seed: of the random draws.
    """

    optimiser: AdamW = dataclasses.field(default_factory=AdamW)
    penalties: Penalties = dataclasses.field(default_factory=Penalties)
    parts: int = 1
    recompute: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise RequestError(f"parts is {self.parts}; accepted is a whole number from 1 on")


def together(trained: Parameters, fixed: Parameters) -> Parameters:
    """The parameters of a model out of those that are trained and the others."""
    return {**fixed, **trained}


class Trainer:
    """Compiled steps over one model.

    Args:
        model: what is trained; it may hold shapes only. Its dtype is that of the computation; the
            parameters that are trained are float32 beside it.
        training: what is done in a step.
        assemble: (trained, fixed) -> parameters of the model; a pure function.

    Raises:
        RequestError: the model would run kernels.
    """

    def __init__(self, model: CausalLM, training: Training, assemble: Assemble = together):
        if model.config.implementation != REFERENCE:
            raise RequestError(
                f"the model's implementation is {model.config.implementation!r}; training takes "
                f"{REFERENCE!r} alone, since kernels have no backward pass of their own: load it "
                f"with implementation={REFERENCE!r}, or set it in the configuration"
            )
        self.skeleton = Skeleton.of(model)
        self.training = training
        self.assemble = assemble
        self._optimiser = training.optimiser.direction()
        self._steps = jax.jit(self._run, donate_argnames=("state",))
        self._loss = jax.jit(self._held_out)

    def start(self, trained: Parameters) -> TrainState:
        """The state before the first step; float32 copies are made of the parameters."""
        trained = masters(trained)
        return TrainState(jnp.int32(0), trained, self._optimiser.init(trained))

    def steps(
        self, state: TrainState, fixed: Parameters, batches: Batch, rates: np.ndarray
    ) -> tuple[TrainState, Metrics]:
        """Takes a step for each batch, in one compiled program.

        Args:
            state: it is given away, its arrays are gone afterwards.
            fixed: parameters that do not change.
            batches: of n steps, each array with n in front.
            rates: float32 [n], the learning rates of the steps.

        Returns:
            The state afterwards; and of each step, float32 [n], `loss` in nats a token before it,
            the penalties without their weights, and `gradient_norm` before clipping.

        Raises:
            RequestError: rows that cannot be cut into equal parts.
        """
        rows, parts = batches.inputs.shape[1], self.training.parts
        if rows % parts:
            raise RequestError(f"{rows} rows cannot be cut into {parts} equal parts")
        return self._steps(state, fixed, batches, rates)

    def loss(self, trained: Parameters, fixed: Parameters, batch: Batch) -> Array:
        """Float32 [2]: the sum of the losses of the targets that count, and how many there are."""
        return self._loss(trained, fixed, batch)

    def model(self, trained: Parameters, fixed: Parameters) -> CausalLM:
        """The model as the step computes with it."""
        return self.skeleton.filled(self.assemble(trained, fixed))

    def _held_out(self, trained: Parameters, fixed: Parameters, batch: Batch) -> Array:
        model = self._prepared(trained, fixed)
        count = jnp.sum(batch.scored.astype(jnp.float32))
        _, found = loss_of_batch(model, batch, Penalties(), jnp.float32(1), 1.0)
        return jnp.stack([found["loss"], count])

    def _prepared(self, trained: Parameters, fixed: Parameters) -> CausalLM:
        model = self.model(trained, fixed)
        make_dense(model)
        if self.training.recompute:
            recompute_layers(model)
        return model

    def _run(
        self, state: TrainState, fixed: Parameters, batches: Batch, rates: Array
    ) -> tuple[TrainState, Metrics]:
        def one(state: TrainState, inputs: tuple[Batch, Array]) -> tuple[TrainState, Metrics]:
            return self._step(state, fixed, *inputs)

        return jax.lax.scan(one, state, (batches, rates))

    def _step(
        self, state: TrainState, fixed: Parameters, batch: Batch, rate: Array
    ) -> tuple[TrainState, Metrics]:
        slopes, found = self._gradients(state, fixed, batch)
        ways, optimiser = self._optimiser.update(slopes, state.optimiser, state.trained)
        trained = {name: value - rate * ways[name] for name, value in state.trained.items()}
        found = {**found, "gradient_norm": optax.global_norm(slopes)}
        return TrainState(state.step + 1, trained, optimiser), found

    def _gradients(
        self, state: TrainState, fixed: Parameters, batch: Batch
    ) -> tuple[Parameters, Metrics]:
        """Gradients of the trained parameters, added up over the parts of the batch."""
        parts = self.training.parts
        tokens = jnp.maximum(jnp.sum(batch.scored.astype(jnp.float32)), 1.0)

        def loss(trained: Parameters, part: Batch) -> tuple[Array, Metrics]:
            model = self._prepared(trained, fixed)
            return loss_of_batch(model, part, self.training.penalties, tokens, 1 / parts)

        slopes_of = jax.grad(loss, has_aux=True)
        if parts == 1:
            return slopes_of(state.trained, batch)
        pieces = batch.split(parts)
        shapes = jax.eval_shape(slopes_of, state.trained, jax.tree.map(lambda x: x[0], pieces))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, slopes_of(state.trained, part)), None

        return jax.lax.scan(add, nothing, pieces)[0]
