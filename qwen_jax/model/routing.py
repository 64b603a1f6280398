"""What a router is, what it sees and what it answers.

Statistics and further routers live in `qwen_jax.research`.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.router import router

from ..errors import RequestError
from ..pytree import pytree
from .layers import parameter

if TYPE_CHECKING:
    from .intervention import LayerIntervention

Capture = Literal["none", "ids", "full"]
"""What a forward pass returns of the routing: nothing, ids and weights, or the logits too."""


@pytree
class Routing:
    """The choice of one MoE layer.

    Attributes:
        ids: int32 [B, T, A], experts in order of falling weight. At padding, and in slots that a
            router leaves empty, the id is E (one past the last expert), so that scatters with
            `mode="drop"` and one-hot codes skip it.
        weights: float32 [B, T, A], weight of each expert's output; 0 in empty slots.
        logits: float32 [B, T, E] before any softmax, or None where not captured.
    """

    ids: Array
    weights: Array
    logits: Array | None = None

    def captured(self, capture: Capture) -> "Routing":
        """This routing with no more than `capture` asks for."""
        return self if capture == "full" else dataclasses.replace(self, logits=None)


@pytree
class RouterContext:
    """What a router may look at beside the tokens themselves.

    Attributes:
        valid: bool [B, T], False at padding. Padding takes no expert, whatever the router says.
        mixed: [B, T, D], this layer's mixer output, before the residual add.
        tokens: int32 [B, T], ids; 0 at padding. None where a layer runs alone.
        positions: int32 [B, T], from 0 at the sequence's first token; -1 at padding.
        layer: static, number of the layer.
        intervention: what an experiment changes here, or None. See `Router.intervenes`.
    """

    valid: Array
    mixed: Array
    tokens: Array | None
    positions: Array
    layer: int = dataclasses.field(metadata={"static": True})
    intervention: "LayerIntervention | None" = None


@runtime_checkable
class Router(Protocol):
    """Anything that chooses experts: `router(x, context) -> Routing`, pure and jittable.

    x is the float32 [B, T, D] input of the MoE block, after its norm. A of the result may be any
    number, the ids of a token's filled slots differ, and weights are float32.

    A router that applies `context.intervention` itself has the attribute `intervenes = True`: it
    must heed what is banned and forced, the bias, the temperature and the number of experts. On the
    choice of another one, bans, forced experts and the number are imposed afterwards, and bias and
    temperature are refused. Scaled weights and the shared expert are no router's affair.
    """

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing: ...


class TopKRouter(nnx.Module):
    """Softmax over all experts in float32, the k largest, renormalised if the model does so.

    Equal scores go to the lower id. Slots of padding are empty.
    """

    intervenes = True

    def __init__(
        self,
        width: int,
        experts: int,
        chosen: int,
        dtype: str,
        *,
        renormalise: bool,
        implementation: str | None,
    ):
        self.weight = parameter((experts, width), dtype)
        self.chosen = chosen
        self.renormalise = renormalise
        self.implementation = implementation

    def __call__(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        return self.route(x, context, scaled=False)

    def route(self, x: Float[Array, "B T D"], context: RouterContext, *, scaled: bool) -> Routing:
        """The routing; with an intervention's factors in the weights if `scaled`."""
        batch, tokens, width = x.shape
        change = context.intervention
        options: dict[str, Any] = {"slots": self.chosen}
        if change is not None:
            options = change.options_of_router(self.chosen, scaled=scaled)
        flat = router(
            x.reshape(-1, width),
            self.weight[...],
            valid=context.valid.reshape(-1),
            renormalise=self.renormalise,
            implementation=self.implementation,
            **options,
        )
        return Routing(*(array.reshape(batch, tokens, -1) for array in flat))


def without_padding(routing: Routing, valid: Bool[Array, "B T"], experts: int) -> Routing:
    """The routing with id E and weight 0 in empty slots, those of padding included."""
    used = valid[..., None] & (routing.ids >= 0) & (routing.ids < experts)
    ids: Int[Array, "B T A"] = jnp.where(used, routing.ids, experts)
    weights = jnp.where(used, routing.weights, 0.0)
    return dataclasses.replace(routing, ids=ids, weights=weights)


def own_number(default: int, routers: Mapping[int, Any]) -> int:
    """Most experts that a token takes by itself, in any layer.

    Args:
        default: of a router that does not say, and of a model without any.
        routers: by layer. One says its number with an attribute `chosen` or `k`, or has one that
            says it as `inner`.
    """
    numbers = [] if routers else [default]
    for each in routers.values():
        inner = getattr(each, "inner", each)
        number = getattr(inner, "chosen", getattr(inner, "k", None))
        numbers.append(number if isinstance(number, int) else default)
    return max(numbers)


def name_of(router: Any) -> str:
    """A function's own name, else that of its class; for errors."""
    return getattr(router, "__name__", type(router).__name__)


def check_shapes(router: Any, routing: Any, tokens: tuple[int, ...], experts: int) -> None:
    """Refuse what a router gave if it is no routing of these tokens [B, T]; shapes and dtypes.

    Raises:
        RequestError: names the router and what it gave.
    """
    name = name_of(router)
    if not isinstance(routing, Routing):
        raise RequestError(
            f"router {name} gave a {type(routing).__name__}; accepted is a Routing(ids, weights)"
        )
    ids, weights = routing.ids, routing.weights
    if ids.ndim != 3 or ids.shape[:2] != tokens or not ids.shape[2] or ids.dtype != jnp.int32:
        raise RequestError(
            f"router {name} gave ids {ids.dtype}{list(ids.shape)}; accepted is int32 [B, T, A], "
            f"where B, T = {list(tokens)} and A is 1 or more"
        )
    logits, wide = routing.logits, (*tokens, experts)
    if logits is not None and (logits.shape != wide or logits.dtype != jnp.float32):
        raise RequestError(
            f"router {name} gave logits {logits.dtype}{list(logits.shape)}; accepted is float32 "
            f"{list(wide)}, one for each expert, or None"
        )
    if weights.shape != ids.shape or weights.dtype != jnp.float32:
        raise RequestError(
            f"router {name} gave weights {weights.dtype}{list(weights.shape)}; accepted is float32 "
            f"{list(ids.shape)}, one for each id"
        )
