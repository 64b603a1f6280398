"""Another router in the MoE layers of a model, checked before it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...config import QwenConfig
from ...errors import RequestError
from ...model import CausalLM, Router, RouterContext, Routing, check_model
from ...model.intervention import sparse_layers
from ...model.moe import SparseMoE
from ...model.routing import TopKRouter, check_shapes, name_of
from .capacity import CapacityRouter
from .choice import checked_k
from .expert_choice import ExpertChoiceRouter
from .hashed import HashRouter
from .mass import MassRouter
from .random import RandomRouter
from .sigmoid import SigmoidRouter
from .two_stage import TwoStageRouter

Make = Callable[[int, Router], Router]
"""From a layer's number and its router to the router that takes its place."""


def replace_routers(model: CausalLM, make: Make, layers: tuple[int, ...] | None = None) -> CausalLM:
    """A model of the same arrays with other routers; each is tried first.

        replace_routers(model, lambda layer, gate: MassRouter(gate, 0.8))

    Args:
        model: it is not changed.
        make: gives the router of a layer. A function of your own is a router too: (x, context) ->
            Routing, pure and jittable; see `qwen_jax.model.Router`.
        layers: numbers of MoE layers; all if None.

    Raises:
        RequestError: a model without MoE layers, another layer, or a router that `check_router`
            refuses.
    """
    check_model(model)
    every = sparse_layers(model.config)
    layers = every if layers is None else layers
    copy = nnx.clone(model)
    for layer in layers:
        if layer not in every:
            raise RequestError(f"layer {layer!r} is no MoE layer; accepted are {list(every)}")
        mlp = copy.layers[layer].mlp
        assert isinstance(mlp, SparseMoE)
        mlp.gate = check_router(make(layer, mlp.gate), model.config, layer)
    return copy


def with_router(model: CausalLM, name: str, **settings: Any) -> CausalLM:
    """`replace_routers` by name and settings, as a configuration of an experiment gives them.

        with_router(model, "capacity", capacity=64, overflow="next")

    Args:
        model: it is not changed; its routers are the released ones.
        name: of `ROUTERS`.
        settings: of the router's constructor, but for what follows from the model.

    Raises:
        RequestError: an unknown name or setting, values that the router does not take, or a model
            whose routers are others already.
    """
    if name not in ROUTERS:
        raise RequestError(f"router is {name!r}; accepted are {', '.join(ROUTERS)}")

    def make(layer: int, gate: Router) -> Router:
        if not isinstance(gate, TopKRouter):
            raise RequestError(
                f"layer {layer} has {name_of(gate)} already; start from the loaded model"
            )
        try:
            return ROUTERS[name](gate, model.config, layer, settings)
        except TypeError as error:
            raise RequestError(f"router {name!r}: {error}") from None

    return replace_routers(model, make)


def _widened(gate: TopKRouter, k: int | None) -> TopKRouter:
    """The released rule with another number of experts."""
    gate = nnx.clone(gate)
    gate.chosen = gate.chosen if k is None else checked_k(k, gate.weight.shape[0])
    return gate


def _two_stage(gate: TopKRouter, config: QwenConfig, layer: int, settings: Any) -> Router:
    key = jax.random.fold_in(jax.random.key(settings.pop("seed", 0)), layer)
    return TwoStageRouter(key, config.hidden_size, config.num_experts, **settings)


def _of_gate(kind: Callable[..., Router]) -> Callable[..., Router]:
    return lambda gate, config, layer, settings: kind(
        gate.weight[...], **{"k": config.num_experts_per_tok} | settings
    )


def _of_numbers(kind: Callable[..., Router]) -> Callable[..., Router]:
    return lambda gate, config, layer, settings: kind(
        config.num_experts, **{"k": config.num_experts_per_tok} | settings
    )


def _around(kind: Callable[..., Router]) -> Callable[..., Router]:
    def make(gate: TopKRouter, config: QwenConfig, layer: int, settings: dict[str, Any]) -> Router:
        settings = dict(settings)
        return kind(_widened(gate, settings.pop("k", None)), **settings)

    return make


ROUTERS: Mapping[str, Callable[..., Router]] = {
    "softmax": lambda gate, config, layer, settings: _widened(gate, **{"k": None} | settings),
    "sigmoid": _of_gate(SigmoidRouter),
    "capacity": _around(CapacityRouter),
    "expert_choice": _of_gate(ExpertChoiceRouter),
    "hash": _of_numbers(HashRouter),
    "random": _of_numbers(RandomRouter),
    "mass": _around(MassRouter),
    "two_stage": lambda gate, config, layer, settings: _two_stage(
        gate, config, layer, dict(settings)
    ),
}
"""By name: (released router, configuration, layer, settings) to a router."""


def check_router(router: Router, config: QwenConfig, layer: int) -> Router:
    """The router, if what it gives for a few random tokens is a routing.

    Raises:
        RequestError: wrong shapes or dtypes, an expert twice in a token, an id below 0, or weights
            that are not finite.
    """
    if not callable(router):
        raise RequestError(
            f"the router of layer {layer} is {router!r}; accepted is a function (x, context) -> "
            "Routing"
        )
    random = np.random.default_rng(0)
    batch, tokens = 2, 7
    positions = np.tile(np.arange(tokens, dtype=np.int32), (batch, 1))
    positions[1, 5:] = -1
    ids = random.integers(0, config.vocab_size, positions.shape, np.int32)
    x, mixed = random.standard_normal((2, batch, tokens, config.hidden_size), np.float32)
    context = RouterContext(
        valid=jnp.asarray(positions >= 0),
        mixed=jnp.asarray(mixed, config.dtype),
        tokens=jnp.asarray(np.where(positions >= 0, ids, 0)),
        positions=jnp.asarray(positions),
        layer=layer,
    )
    routing = jax.jit(lambda x, context: router(x, context))(jnp.asarray(x), context)
    check_shapes(router, routing, positions.shape, config.num_experts)
    check_routing(routing, config.num_experts, router, valid=positions >= 0)
    return router


def check_routing(
    routing: Routing, experts: int, router: Any = None, *, valid: np.ndarray | None = None
) -> None:
    """Refuse a routing, of concrete values, that chooses an expert twice or weighs with NaN.

    Args:
        routing: one layer's.
        experts: E; this and larger ids are empty slots.
        router: named in the error.
        valid: bool [B, T], tokens that count; all if None.

    Raises:
        RequestError: names the token and the expert.
    """
    name = "the router" if router is None else f"router {name_of(router)}"
    ids, weights = np.asarray(routing.ids), np.asarray(routing.weights)
    for row, token in np.ndindex(*ids.shape[:2]):
        if valid is not None and not valid[row, token]:
            continue
        own = ids[row, token]
        used = own[own < experts]
        if (used < 0).any():
            raise RequestError(
                f"{name} gave id {int(used.min())} to token {token} of sequence {row}; accepted "
                f"are 0 to {experts - 1}, and {experts} for an empty slot"
            )
        numbers, counts = np.unique(used, return_counts=True)
        if (counts > 1).any():
            raise RequestError(
                f"{name} chose expert {int(numbers[counts > 1][0])} {int(counts.max())} times for "
                f"token {token} of sequence {row}; each of a token's experts must be another one"
            )
        if not np.isfinite(weights[row, token][own < experts]).all():
            raise RequestError(
                f"{name} gave weights {weights[row, token].tolist()} to token {token} of sequence "
                f"{row}; accepted are finite numbers"
            )
