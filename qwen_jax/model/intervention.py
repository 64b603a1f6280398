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
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..config import QwenConfig
from ..errors import RequestError
from ..pytree import pytree
from .routing import RouterContext, Routing, TopKRouter, name_of, own_number

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

    def at(
        self, index: int, positions: Int[Array, "B T"], neutral: float | int
    ) -> Shaped[Array, "B T *e"]:
        """The values of the layer at `index`; the neutral one outside their positions."""
        values, start, stop = (
            array[index][:, None] for array in (self.values, self.start, self.stop)
        )
        where = positions.reshape(*positions.shape, *[1] * (values.ndim - 2))
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

    def at(self, layer: int, positions: Int[Array, "B T"]) -> "LayerIntervention":
        """What it says of some tokens in a layer."""
        index = self.layers.index(layer)
        fields: dict[str, Any] = {
            name: getattr(self, name).at(index, positions, neutral)
            for name, neutral in NEUTRAL.items()
        }
        return LayerIntervention(**fields, slots=self.slots)

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
            change = self.at(layer, tokens)
            return router(x, RouterContext(tokens >= 0, mixed, tokens, tokens, layer, change))

        shape = self.limit.values.shape[1], 1
        x, mixed = (
            jax.ShapeDtypeStruct((*shape, config.hidden_size), dtype)
            for dtype in ("float32", config.dtype)
        )
        routing = jax.eval_shape(route, x, mixed, jax.ShapeDtypeStruct(shape, jnp.int32))
        return routing.ids.shape[-1]


@pytree
class LayerIntervention:
    """An `Intervention` in one layer at some tokens; see there.

    Attributes:
        banned: bool [B, T, E].
        forced: bool [B, T, E].
        bias: float32 [B, T, E].
        scale: float32 [B, T, E].
        limit: int32 [B, T].
        temperature: float32 [B, T].
        shared_logit: float32 [B, T].
        slots: static, the most experts that a token may have.
    """

    banned: Array
    forced: Array
    bias: Array
    scale: Array
    limit: Array
    temperature: Array
    shared_logit: Array
    slots: int = dataclasses.field(metadata={"static": True})

    def scores(self, logits: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Logits with bias and temperature; -infinity where banned."""
        scores = (logits + self.bias) / self.temperature[..., None]
        return jnp.where(self.banned, -jnp.inf, scores)

    def options_of_router(self, own: int, *, scaled: bool) -> dict[str, Any]:
        """For `pallas_kernels.router.router` over the flat tokens, of a router that takes `own`.

        Args:
            own: experts a token.
            scaled: whether weights are scaled there.
        """
        names = {"bias": self.bias, "forced": self.forced, "mask": ~self.banned}
        names |= {"scale": self.scale} if scaled else {}
        experts = self.bias.shape[-1]
        return {name: array.reshape(-1, experts) for name, array in names.items()} | {
            "slots": max(own, self.slots),
            "limit": self.most(own).reshape(-1),
            "temperature": self.temperature.reshape(-1),
        }

    def most(self, own: int) -> Int[Array, "B T"]:
        """How many experts a token takes where a router by itself takes `own`."""
        return jnp.where(self.limit == 0, own, self.limit)

    def within(self, routing: Routing) -> Routing:
        """The routing, with NaN as weights of tokens that are to have more experts than slots."""
        if (slots := routing.ids.shape[-1]) >= self.slots:
            return routing
        beyond = (self.limit > slots)[..., None]
        return dataclasses.replace(routing, weights=jnp.where(beyond, jnp.nan, routing.weights))

    def scaled(self, routing: Routing) -> Routing:
        """The routing with scaled weights."""
        return dataclasses.replace(
            routing, weights=routing.weights * at_slots(self.scale, routing.ids, 1.0)
        )

    def imposed(self, routing: Routing) -> Routing:
        """Bans, forced experts and k, on what a router chose that knows nothing of them.

        A banned expert's slot becomes empty, and of the others the first k are kept. A forced
        expert that was not chosen takes the place, and the weight, of the last that is not forced;
        an empty place among the k is taken first, with the weight 1 / slots. Where bias or
        temperature is set, weights are NaN: they cannot be imposed.
        """
        experts, slots = self.bias.shape[-1], routing.ids.shape[-1]
        ids = jnp.where(at_slots(self.banned, routing.ids, False), experts, routing.ids)
        filled = (ids < experts).astype(jnp.float32)
        routing = in_order(dataclasses.replace(routing, ids=ids), filled)
        place = jnp.arange(slots, dtype=jnp.int32)[None, None, :] < self.most(slots)[..., None]
        ids = jnp.where(place, routing.ids, experts)
        weights = jnp.where(ids < experts, routing.weights, 0.0)
        routing = dataclasses.replace(routing, ids=ids, weights=weights)
        routing = self._with_forced(routing, place)
        foreign = jnp.any(self.bias != 0, axis=-1) | (self.temperature != 1)
        weights = jnp.where(foreign[..., None], jnp.nan, routing.weights)
        return dataclasses.replace(routing, weights=weights)

    def _with_forced(self, routing: Routing, place: Bool[Array, "B T A"]) -> Routing:
        ids, weights = routing.ids, routing.weights
        experts, slots = self.forced.shape[-1], ids.shape[-1]
        numbers = jnp.arange(experts, dtype=jnp.int32)[None, None, None, :]
        chosen = jnp.any(ids[..., None] == numbers, axis=-2)
        missing = self.forced & ~chosen
        # The n-th missing expert goes to the n-th free place, counted from the last.
        free = place & ~at_slots(self.forced, routing.ids, False)
        open_places = jnp.flip(jnp.cumsum(jnp.flip(free, -1).astype(jnp.int32), axis=-1), -1)
        number = jnp.cumsum(missing.astype(jnp.int32), axis=-1)
        match = missing[..., None, :] & (number[..., None, :] == open_places[..., None])
        match = match & free[..., None]
        takes = jnp.any(match, axis=-1)
        newcomer = jnp.argmax(match, axis=-1).astype(jnp.int32)
        weights = jnp.where(takes & (ids == experts), 1 / slots, weights)
        return dataclasses.replace(routing, ids=jnp.where(takes, newcomer, ids), weights=weights)


def at_slots(
    values: Shaped[Array, "B T E"], ids: Int[Array, "B T A"], neutral: float | int
) -> Shaped[Array, "B T A"]:
    """The values of chosen experts; the neutral one in empty slots."""
    experts = values.shape[-1]
    found = jnp.take_along_axis(values, jnp.clip(ids, 0, experts - 1), axis=-1)
    filled = (ids >= 0) & (ids < experts)
    return jnp.where(filled, found, jnp.asarray(neutral, values.dtype))


def in_order(routing: Routing, key: Float[Array, "B T A"]) -> Routing:
    """The slots in order of a falling key; of equals, as they were."""
    slot = jnp.arange(key.shape[-1], dtype=jnp.int32)
    other, own = key[:, :, None, :], key[..., None]
    earlier = slot[None, None, None, :] < slot[None, None, :, None]
    rank = jnp.sum(((other > own) | ((other == own) & earlier)).astype(jnp.int32), axis=-1)
    to = rank[..., None] == slot[None, None, None, :]
    return dataclasses.replace(
        routing,
        ids=jnp.sum(jnp.where(to, routing.ids[..., None], 0), axis=-2),
        weights=jnp.sum(jnp.where(to, routing.weights[..., None], 0.0), axis=-2),
    )


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
