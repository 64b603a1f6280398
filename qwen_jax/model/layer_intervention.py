"""What an intervention says of some tokens in one layer, and what it makes of a routing."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..pytree import pytree

if TYPE_CHECKING:
    from .routing import Routing


@pytree
class LayerIntervention:
    """An `Intervention` in one layer at some tokens; see there.

    Attributes:
        stacks: what it says of each expert, by name, in this layer and perhaps others [L, B, T, E].
        limit: int32 [B, T].
        temperature: float32 [B, T].
        shared_logit: float32 [B, T].
        index: static, of the layer in the stacks.
        slots: static, the most experts that a token may have.
    """

    stacks: dict[str, Array]
    limit: Array
    temperature: Array
    shared_logit: Array
    index: int = dataclasses.field(metadata={"static": True})
    slots: int = dataclasses.field(metadata={"static": True})

    @property
    def banned(self) -> Bool[Array, "B T E"]:
        """Experts that must not be chosen."""
        return self.stacks["banned"][self.index]

    @property
    def forced(self) -> Bool[Array, "B T E"]:
        """Experts that are chosen whatever their score."""
        return self.stacks["forced"][self.index]

    @property
    def bias(self) -> Float[Array, "B T E"]:
        """Added to the logits."""
        return self.stacks["bias"][self.index]

    @property
    def scale(self) -> Float[Array, "B T E"]:
        """Times the weights."""
        return self.stacks["scale"][self.index]

    def token(self, number: Int[Array, ""]) -> "LayerIntervention":
        """What it says of one token [1, 1], by its number among the B T."""

        def one(array: Array) -> Array:
            return array.reshape(-1, *array.shape[2:])[number][None, None]

        stacks = {name: one(each[self.index])[None] for name, each in self.stacks.items()}
        own = (one(each) for each in (self.limit, self.temperature, self.shared_logit))
        return LayerIntervention(stacks, *own, index=0, slots=self.slots)

    def scores(self, logits: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """Logits with bias and temperature; -infinity where banned."""
        scores = (logits + self.bias) / self.temperature[..., None]
        return jnp.where(self.banned, -jnp.inf, scores)

    def options_of_router(self, own: int, *, scaled: bool) -> dict[str, Any]:
        """For `pallas_kernels.router.router` over the flat tokens, of a router that takes `own`.

        Experts' fields go there whole, and the launch finds the layer's rows: a slice of them would
        be a launch of its own.

        Args:
            own: experts a token.
            scaled: whether weights are scaled there.
        """
        stacks = self.stacks
        names = {"bias": stacks["bias"], "forced": stacks["forced"], "mask": ~stacks["banned"]}
        names |= {"scale": stacks["scale"]} if scaled else {}
        experts = stacks["bias"].shape[-1]
        return {name: array.reshape(-1, experts) for name, array in names.items()} | {
            "slots": max(own, self.slots),
            "limit": self.most(own).reshape(-1),
            "temperature": self.temperature.reshape(-1),
            "part": jnp.full((1,), self.index, jnp.int32),
        }

    def most(self, own: int) -> Int[Array, "B T"]:
        """How many experts a token takes where a router by itself takes `own`."""
        return jnp.where(self.limit == 0, own, self.limit)

    def within(self, routing: "Routing") -> "Routing":
        """The routing, with NaN as weights of tokens that are to have more experts than slots."""
        if (slots := routing.ids.shape[-1]) >= self.slots:
            return routing
        beyond = (self.limit > slots)[..., None]
        return dataclasses.replace(routing, weights=jnp.where(beyond, jnp.nan, routing.weights))

    def scaled(self, routing: "Routing") -> "Routing":
        """The routing with scaled weights."""
        return dataclasses.replace(
            routing, weights=routing.weights * at_slots(self.scale, routing.ids, 1.0)
        )

    def imposed(self, routing: "Routing") -> "Routing":
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

    def _with_forced(self, routing: "Routing", place: Bool[Array, "B T A"]) -> "Routing":
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


def in_order(routing: "Routing", key: Float[Array, "B T A"]) -> "Routing":
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
