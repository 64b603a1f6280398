"""The compiled training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from pallas_kernels.dispatch import REFERENCE

from ..errors import RequestError
from ..model import CausalLM
from ..pytree import pytree
from ..sharding import of_batch, of_parameters
from ..whole_number import check_whole
from .batch import Batch
from .data import refuse_seed
from .dropout import drop_experts
from .experts import make_dense
from .gradient_routing import GradientRouting, let_listen
from .losses import NextTokens, Objective
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
        objective: what gets smaller.
        parts: into how many parts a batch is cut whose gradients are added up, one in memory at a
            time.
        expert_dropout: probability with which an expert is left out of a step.
        gradient_routing: the signal to experts that are not chosen; None for none.
        recompute: whether layers keep nothing for the backward pass and are computed again.
        seed: of the random draws.
    """

    optimiser: AdamW = dataclasses.field(default_factory=AdamW)
    objective: Objective = dataclasses.field(default_factory=NextTokens)
    parts: int = 1
    expert_dropout: float = 0.0
    gradient_routing: GradientRouting | None = None
    recompute: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("parts", self.parts, 1)
        refuse_seed(self.seed)


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
        mesh: devices that share the work (`sharding.device_mesh`); one device if None.

    Raises:
        RequestError: the model would run kernels.
    """

    def __init__(
        self,
        model: CausalLM,
        training: Training,
        assemble: Assemble = together,
        mesh: Mesh | None = None,
    ):
        if model.config.implementation != REFERENCE:
            raise RequestError(
                f"the model's implementation is {model.config.implementation!r}; training takes "
                f"{REFERENCE!r} alone, since kernels have no backward pass of their own: load it "
                f"with implementation={REFERENCE!r}, or set it in the configuration"
            )
        self.skeleton = Skeleton.of(model)
        self.training = training
        self.assemble = assemble
        self.mesh = mesh
        self._optimiser = training.optimiser.direction()
        self._steps = jax.jit(self._run, donate_argnames=("state",))
        self._loss = jax.jit(self._held_out)

    def start(self, trained: Parameters) -> TrainState:
        """The state before the first step; float32 copies are made of the parameters."""
        trained = masters(trained)
        return self.placed(TrainState(jnp.int32(0), trained, self._optimiser.init(trained)))

    def placed(self, tree: Any) -> Any:
        """A state, or parameters, where the mesh wants them."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, of_parameters(self.mesh, tree))

    def steps(
        self, state: TrainState, fixed: Parameters, batches: Any, rates: np.ndarray
    ) -> tuple[TrainState, Metrics]:
        """Takes a step for each batch, in one compiled program.

        Args:
            state: it is given away, its arrays are gone afterwards.
            fixed: parameters that do not change.
            batches: of n steps, as the objective takes them, each array with n in front.
            rates: float32 [n], the learning rates of the steps.

        Returns:
            The state afterwards; and of each step, float32 [n], the parts of the objective
            before it and `gradient_norm` before clipping.

        Raises:
            RequestError: rows that cannot be cut into equal parts.
        """
        rows, parts = jax.tree.leaves(batches)[0].shape[1], self.training.parts
        if rows % parts:
            raise RequestError(f"{rows} rows cannot be cut into {parts} equal parts")
        if self.mesh is not None:
            batches = jax.device_put(batches, of_batch(self.mesh, batches, leading=1))
        return self._steps(state, fixed, batches, rates)

    def loss(self, trained: Parameters, fixed: Parameters, batch: Batch) -> Array:
        """Float32 [2]: the sum of the losses of the targets that count, and how many there are."""
        return self._loss(trained, fixed, batch)

    def model(self, trained: Parameters, fixed: Parameters) -> CausalLM:
        """The model as the step computes with it."""
        return self.skeleton.filled(self.assemble(trained, fixed))

    def _held_out(self, trained: Parameters, fixed: Parameters, batch: Batch) -> Array:
        model = self.model(trained, fixed)
        make_dense(model.layers, model.config)
        objective = NextTokens()
        total, _ = objective.loss(model, batch, jnp.float32(1), 1.0)
        return jnp.stack([total, objective.size(batch)])

    def _prepared(self, trained: Parameters, fixed: Parameters, key: Array) -> CausalLM:
        """The model as a training step computes it."""
        model, training = self.model(trained, fixed), self.training
        make_dense(model.layers, model.config)
        if training.expert_dropout:
            drop_experts(model, key, training.expert_dropout)
        if training.gradient_routing is not None:
            let_listen(model, training.gradient_routing)
        if training.recompute:
            recompute_layers(model)
        return model

    def _run(
        self, state: TrainState, fixed: Parameters, batches: Any, rates: Array
    ) -> tuple[TrainState, Metrics]:
        def one(state: TrainState, inputs: tuple[Any, Array]) -> tuple[TrainState, Metrics]:
            return self._step(state, fixed, *inputs)

        return jax.lax.scan(one, state, (batches, rates))

    def _step(
        self, state: TrainState, fixed: Parameters, batch: Any, rate: Array
    ) -> tuple[TrainState, Metrics]:
        slopes, found = self._gradients(state, fixed, batch)
        found_ways = self._optimiser.update(slopes, state.optimiser, state.trained)
        ways, optimiser = cast("tuple[Parameters, Any]", found_ways)
        trained = {name: value - rate * ways[name] for name, value in state.trained.items()}
        found = {**found, "gradient_norm": _norm(slopes)}
        state = TrainState(state.step + 1, trained, optimiser)
        if self.mesh is not None:
            state = jax.lax.with_sharding_constraint(state, of_parameters(self.mesh, state))
        return state, found

    def _gradients(
        self, state: TrainState, fixed: Parameters, batch: Any
    ) -> tuple[Parameters, Metrics]:
        """Gradients of the trained parameters, added up over the parts of the batch."""
        parts, objective = self.training.parts, self.training.objective
        size = jnp.maximum(objective.size(batch), 1.0)

        key = jax.random.fold_in(jax.random.key(self.training.seed), state.step)

        def loss(trained: Parameters, part: Any) -> tuple[Array, Metrics]:
            model = self._prepared(trained, fixed, key)
            return objective.loss(model, part, size, 1 / parts)

        slopes_of = jax.grad(loss, has_aux=True)
        if parts == 1:
            return slopes_of(state.trained, batch)
        pieces = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)
        shapes = jax.eval_shape(slopes_of, state.trained, jax.tree.map(lambda x: x[0], pieces))
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, slopes_of(state.trained, part)), None

        return jax.lax.scan(add, nothing, pieces)[0]


def _norm(tree: Parameters) -> Array:
    return jnp.sqrt(sum((jnp.sum(x * x) for x in tree.values()), jnp.float32(0)))
