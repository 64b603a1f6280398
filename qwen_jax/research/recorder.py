"""The routing of each step of a decode loop, recorded on the device."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ..config import QwenConfig
from ..decode import StepOutput
from ..errors import RequestError
from ..model import Capture, RoutingTrace
from ..model.intervention import sparse_layers
from ..model.trace import stacked
from ..pytree import pytree
from ..whole_number import check_whole
from .trace import fingerprint


@pytree
class RoutingRecorder:
    """Ids and weights of each step, in arrays that are laid out beforehand.

    An observer of decode loops: `init_state(..., observer=RoutingRecorder.empty(config, ...))`, and
    after the loop `state.observer.trace(state.tokens)`. Steps are the first axis, so that a step
    writes one run of memory. With capture "ids" it takes 8 L B A bytes a step, with "full" 4 L B E
    more.

    Attributes:
        ids: int32 [steps, L, B, A], as in `Routing`.
        weights: float32 [steps, L, B, A].
        logits: float32 [steps, L, B, E], or None.
        taken: bool [steps, B], rows that entered a token in that step.
        step: int32 [], steps seen.
        layers: numbers of the MoE layers (static).
        experts: E (static).
        fingerprint: of the configuration (static).
    """

    ids: Array
    weights: Array
    logits: Array | None
    taken: Array
    step: Array
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    experts: int = dataclasses.field(metadata={"static": True})
    fingerprint: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(
        cls,
        config: QwenConfig,
        *,
        batch_size: int,
        steps: int,
        capture: Capture = "ids",
        slots: int | None = None,
    ) -> RoutingRecorder:
        """A recorder that has seen no step.

        Args:
            config: the model's.
            batch_size: rows of the loop.
            steps: most steps, one fewer than the new tokens of a loop: the last is never entered.
            capture: "full" to keep the router's logits too.
            slots: A, experts a token; the configuration's if None. Another router may have more.

        Raises:
            RequestError: the model has no MoE layers, a size below 1, or capture "none".
        """
        if capture not in ("ids", "full"):
            raise RequestError(f'capture is {capture!r}; accepted are "ids" and "full"')
        slots = config.num_experts_per_tok if slots is None else slots
        for name, size in {"batch_size": batch_size, "steps": steps, "slots": slots}.items():
            check_whole(name, size, 1)
        layers, experts = sparse_layers(config), config.num_experts
        shape = (steps, len(layers), batch_size, slots)
        full = jnp.zeros((*shape[:3], experts), jnp.float32) if capture == "full" else None
        return cls(
            jnp.full(shape, experts, jnp.int32),
            jnp.zeros(shape, jnp.float32),
            full,
            jnp.zeros((steps, batch_size), jnp.bool_),
            jnp.int32(0),
            layers,
            experts,
            fingerprint(config),
        )

    @property
    def capture(self) -> Capture:
        """How much of the routing `observe` reads."""
        return "ids" if self.logits is None else "full"

    def observe(self, output: StepOutput, taken: Bool[Array, " B"]) -> RoutingRecorder:
        """One more step of a loop. Steps beyond the last are counted, and refused by `trace`."""
        choice = stacked(output.routing, self.experts)
        shape = (*self.ids.shape[1:3], 1)
        if choice.ids.shape[:3] != shape or choice.ids.shape[3] > self.ids.shape[3]:
            raise RequestError(
                f"a step routes {choice.ids.shape} (layers, rows, tokens, slots); this recorder "
                f"takes {(*shape, self.ids.shape[3])}. Make it with the loop's batch_size and slots"
            )
        missing = [(0, 0), (0, 0), (0, self.ids.shape[3] - choice.ids.shape[3])]
        ids = jnp.pad(choice.ids[:, :, 0], missing, constant_values=self.experts)
        ids = jnp.where(taken[None, :, None], ids, self.experts)
        weights = jnp.pad(choice.weights[:, :, 0], missing)

        def put(array: Array, value: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(array, value, self.step, 0)

        logits = self.logits
        if logits is not None:
            assert choice.logits is not None
            logits = put(logits, choice.logits[:, :, 0])
        return dataclasses.replace(
            self,
            ids=put(self.ids, ids),
            weights=put(self.weights, weights),
            logits=logits,
            taken=put(self.taken, taken),
            step=self.step + 1,
        )

    def trace(self, tokens: Int[Array | np.ndarray, "B N"]) -> RoutingTrace:
        """What was recorded, on the host; row b is sequence b.

        Args:
            tokens: `state.tokens` after the loop.

        Raises:
            RequestError: more steps than there was room for, or tokens of another loop.
        """
        recorded = jax.device_get(self)
        steps, rows = recorded.taken.shape
        if recorded.step > steps:
            raise RequestError(
                f"{int(recorded.step)} steps were observed, but the recorder was made for {steps}; "
                "make it with as many steps as the loop can take"
            )
        taken = recorded.taken.T
        tokens = np.asarray(tokens)
        if tokens.shape[0] != rows or taken.sum(1).max(initial=0) > tokens.shape[1]:
            raise RequestError(
                f"tokens are {tokens.shape}; accepted are those of the loop, {rows} rows of at "
                f"least {int(taken.sum(1).max(initial=0))}"
            )
        row, step = np.nonzero(taken)
        # A row's n-th entered token is its n-th generated one.
        column = np.cumsum(taken, axis=1)[row, step] - 1
        logits = recorded.logits
        return RoutingTrace(
            recorded.ids.transpose(1, 2, 0, 3)[:, row, step],
            recorded.weights.transpose(1, 2, 0, 3)[:, row, step],
            None if logits is None else logits.transpose(1, 2, 0, 3)[:, row, step],
            tokens[row, column].astype(np.int32),
            row.astype(np.int32),
            self.layers,
            self.experts,
            self.fingerprint,
        )
