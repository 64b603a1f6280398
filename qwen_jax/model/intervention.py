"""What an experiment changes in the routing of a forward pass: data, given beside the tokens.

Constructors are in `qwen_jax.research.interventions`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, Shaped

from ..config import QwenConfig
from ..errors import RequestError
from ..pytree import pytree
from .layer_intervention import LayerIntervention
from .routing import RouterContext, Routing, TopKRouter, name_of, own_number

AT_ONCE = 64
"""Most tokens whose fields are made for all layers at once."""

NEUTRAL = {
    "banned": False,
    "forced": False,
    "bias": 0.0,
    "scale": 1.0,
    "limit": 0,
    "temperature": 1.0,
    "shared_logit": np.nan,
}
"""The value of each field of an `Intervention` that changes nothing."""


@pytree
class Ranged:
    """A value for each layer, row and perhaps expert, in force at some positions.

    Attributes:
        values: [L, R] or [L, R, E].
        start: int32, of the same shape, first position at which the value counts.
        stop: int32, first position at which it counts no more.
    """

    values: Array
    start: Array
    stop: Array

    def over(self, positions: Int[Array, "B T"], neutral: float | int) -> Shaped[Array, "L B T *e"]:
        """The values at positions; the neutral one where they are not in force."""
        values, start, stop = (each[:, :, None] for each in (self.values, self.start, self.stop))
        where = positions.reshape(1, *positions.shape, *[1] * (values.ndim - 3))
        inside = (where >= start) & (where < stop)
        return jnp.where(inside, values, jnp.asarray(neutral, values.dtype))


@pytree
class Intervention:
    """Changes to the routing of all MoE layers, of each sequence or of all alike.

    All interventions for one model and number of rows have the same structure, so that a compiled
    program takes them all; but for a larger `slots`. L counts the MoE layers alone; R is the number
    of sequences, or 1 for all alike. Positions are absolute: they count from the sequence's first
    token, wherever a chunk of the prompt begins.

    Attributes:
        banned: bool [L, R, E], must not be chosen.
        forced: bool [L, R, E], is chosen whatever its score. Its weight is that of its own score.
        bias: float32 [L, R, E], added to the logits, for the choice and the weights.
        scale: float32 [L, R, E], times the weight of the expert, after any renormalising.
        limit: int32 [L, R], experts a token; 0 for the router's own number.
        temperature: float32 [L, R], which divides logits and bias.
        shared_logit: float32 [L, R], whose sigmoid is the strength of the shared expert in place
            of its gate's; NaN for the gate's.
        layers: static, numbers of the MoE layers.
        own: static, experts a token without an intervention.
        slots: static, the most experts that a token may have.
    """

    banned: Ranged
    forced: Ranged
    bias: Ranged
    scale: Ranged
    limit: Ranged
    temperature: Ranged
    shared_logit: Ranged
    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    own: int = dataclasses.field(metadata={"static": True})
    slots: int = dataclasses.field(metadata={"static": True})

    def over(self, positions: Int[Array, "B T"]) -> "StepIntervention":
        """What it says of some tokens, in all layers."""
        few = positions.size <= AT_ONCE
        return StepIntervention(self, positions, self.fields(positions) if few else None)

    def fields(self, positions: Int[Array, "B T"]) -> dict[str, Array]:
        """Values at positions by the name of the field, [L, B, T, E] or [L, B, T]."""
        return {
            name: getattr(self, name).over(positions, neutral) for name, neutral in NEUTRAL.items()
        }

    def check_fits(self, config: QwenConfig, routers: Mapping[int, Any], rows: int) -> None:
        """Refuse an intervention that was made for another model or batch; shapes alone.

        Args:
            config: the model's.
            routers: of the MoE layers, by number.
            rows: B.

        Raises:
            RequestError: other MoE layers, experts or experts a token, or a wrong number of rows.
        """
        layers = sparse_layers(config)
        _, own_rows, experts = self.bias.values.shape
        if self.layers != layers or experts != config.num_experts:
            raise RequestError(
                f"the intervention is for MoE layers {self.layers} of {experts} experts, but this "
                f"model has layers {layers} of {config.num_experts}; make it with this model"
            )
        if self.own != (own := own_number(config.num_experts_per_tok, routers)):
            raise RequestError(
                f"the intervention is for {self.own} experts a token, but this model has {own}; "
                "make it with this model"
            )
        if own_rows not in (1, rows):
            raise RequestError(
                f"the intervention has {own_rows} rows for {rows} sequences; accepted are 1 and "
                f"{rows}"
            )

    def check_routers(self, config: QwenConfig, routers: Mapping[int, Any]) -> None:
        """Refuse bias and temperature where a router does not read them, and k beyond its slots.

        Values that are traced are not seen; there such a layer's output becomes NaN.

        Args:
            config: the model's.
            routers: of the MoE layers, by number.

        Raises:
            RequestError: names the layer and the router.
        """
        for name in ("bias", "temperature"):
            values = getattr(self, name).values
            if isinstance(values, Tracer):
                continue
            used = np.asarray(values) != NEUTRAL[name]
            for index, layer in enumerate(self.layers):
                router = routers.get(layer)
                if used[index].any() and not getattr(router, "intervenes", False):
                    raise RequestError(
                        f"the intervention changes the {name} of layer {layer}, whose router "
                        f"{name_of(router)} takes none; it takes ban, force, scale and k. A "
                        "router that reads context.intervention itself says so with the attribute "
                        "`intervenes = True`"
                    )
        if isinstance(self.limit.values, Tracer):
            return
        most = np.asarray(self.limit.values).max(axis=1)
        for layer, k in zip(self.layers, most.tolist(), strict=True):
            # The released rule gives as many as are asked for.
            if k == 0 or isinstance(router := routers.get(layer), TopKRouter):
                continue
            if k > (slots := self._slots(layer, router, config)):
                raise RequestError(
                    f"the intervention gives tokens of layer {layer} {k} experts, but its router "
                    f"{name_of(router)} has {slots} slots; lower k there, name other `layers`, or "
                    "make the router with more"
                )

    def _slots(self, layer: int, router: Any, config: QwenConfig) -> int:
        """How many experts a layer's router gives a token at most under this; shapes alone."""

        def route(x: Array, mixed: Array, tokens: Array) -> Routing:
            change = self.over(tokens).of(layer)
            return router(x, RouterContext(tokens >= 0, mixed, tokens, tokens, layer, change))

        shape = self.limit.values.shape[1], 1
        x, mixed = (
            jax.ShapeDtypeStruct((*shape, config.hidden_size), dtype)
            for dtype in ("float32", config.dtype)
        )
        routing = jax.eval_shape(route, x, mixed, jax.ShapeDtypeStruct(shape, jnp.int32))
        return routing.ids.shape[-1]


@pytree
class StepIntervention:
    """An `Intervention` at the tokens of a step.

    Of few tokens, such as those of a decode step, the fields of all layers are made at once, so
    that no layer has a launch of its own for them. Of many they are made layer by layer: they are
    10 bytes an expert and token.

    Attributes:
        whole: the intervention.
        positions: int32 [B, T].
        fields: see `Intervention.fields`; None of many tokens.
    """

    whole: Intervention
    positions: Array
    fields: dict[str, Array] | None

    def of(self, layer: int) -> LayerIntervention:
        """What it says in one layer."""
        index, fields = self.whole.layers.index(layer), self.fields
        if fields is None:
            one = jax.tree.map(lambda array: array[index : index + 1], self.whole)
            index, fields = 0, one.fields(self.positions)
        own = {name: fields[name][index] for name in ("limit", "temperature", "shared_logit")}
        stacks = {name: each for name, each in fields.items() if name not in own}
        return LayerIntervention(stacks, **own, index=index, slots=self.whole.slots)


def sparse_layers(config: QwenConfig) -> tuple[int, ...]:
    """Numbers of the MoE layers.

    Raises:
        RequestError: there are none.
    """
    layers = tuple(i for i in range(config.num_hidden_layers) if config.is_sparse(i))
    if not layers:
        raise RequestError(
            f"no MoE layers: a {config.model_type} of {config.num_hidden_layers} layers routes "
            "nothing; give a model with experts"
        )
    return layers
