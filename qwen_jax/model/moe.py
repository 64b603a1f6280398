"""The sparse feed-forward: a router, its experts, and a shared expert where the family has one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.expert_dispatch import SharedExpert, expert_dispatch

from ..config import QwenConfig
from .layers import MLP, Linear, parameter
from .routing import Router, RouterContext, Routing, TopKRouter, check_shapes, without_padding


class Experts(nnx.Module):
    """The weights of all experts of a layer, stacked; arrays, or in codes."""

    def __init__(
        self, experts: int, width: int, hidden: int, dtype: str, *, implementation: str | None
    ):
        self.dtype = dtype
        self.implementation = implementation
        self.gate_up_proj = parameter((experts, 2 * hidden, width), dtype)
        self.down_proj = parameter((experts, width, hidden), dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        routing: Routing,
        shared: SharedExpert | None = None,
        residual: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Float32: the weighted sum, what the shared expert adds if one is given, and residual."""
        tokens, slots = x.shape[0] * x.shape[1], routing.ids.shape[-1]
        mixed = expert_dispatch(
            x.reshape(tokens, -1),
            routing.ids.reshape(tokens, slots),
            routing.weights.reshape(tokens, slots),
            self.gate_up_proj[...],
            self.down_proj[...],
            shared,
            None if residual is None else residual.reshape(tokens, -1),
            inner_dtype=self.dtype,
            dtype="float32",
            implementation=self.implementation,
        )
        return mixed.reshape(x.shape)


class ExpertGroups(nnx.Module):
    """Experts of unequal width: groups of as many experts each, by id, each group of one width.

    A dispatch a group, which sees the ids of its own experts; the sums are added up.
    """

    def __init__(
        self,
        experts: int,
        width: int,
        widths: tuple[int, ...],
        dtype: str,
        *,
        implementation: str | None,
    ):
        self.each = experts // len(widths)
        run = implementation
        self.groups = nnx.List(
            [Experts(self.each, width, hidden, dtype, implementation=run) for hidden in widths]
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        routing: Routing,
        shared: SharedExpert | None = None,
        residual: Float[Array, "B T D"] | None = None,
    ) -> Float[Array, "B T D"]:
        """See `Experts`."""
        y = residual
        for number, group in enumerate(self.groups):
            ids = routing.ids - number * self.each
            ids = jnp.where((ids >= 0) & (ids < self.each), ids, self.each)
            part = dataclasses.replace(routing, ids=ids)
            if type(group) is Experts:
                y = group(x, part, shared if number == 0 else None, y)
            else:
                y = group(x, part) if y is None else y + group(x, part)
        assert y is not None
        return y


class SparseMoE(nnx.Module):
    """Route, run the chosen experts, add the shared expert under its own gate.

    Returns residual plus the result in float32, and the routing.
    """

    def __init__(self, config: QwenConfig, layer: int):
        width, dtype, run = config.hidden_size, config.dtype, config.implementation
        shared = config.width("shared_expert_intermediate_size", layer)
        self.gate: Router = TopKRouter(
            width,
            config.num_experts,
            config.num_experts_per_tok,
            dtype,
            renormalise=config.norm_topk_prob,
            implementation=run,
        )
        self.num_experts = config.num_experts
        if widths := config.expert_group_widths:
            sizes = config.num_experts, width, widths
            self.experts = ExpertGroups(*sizes, dtype, implementation=run)
        else:
            sizes = config.num_experts, width, config.width("moe_intermediate_size", layer)
            self.experts = Experts(*sizes, dtype, implementation=run)
        self.shared_expert = MLP(width, shared, dtype, implementation=run) if shared else None
        self.shared_expert_gate = Linear(width, 1, dtype, implementation=run) if shared else None

    def __call__(
        self, x: Float[Array, "B T D"], context: RouterContext, residual: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Routing]:
        routing, change = self._route(x, context), context.intervention
        logit = None if change is None else change.shared_logit[..., None]
        shared = self._as_one_operation(logit)
        joined = shared is not None or self.shared_expert is None
        if self._all_ours() and joined:
            return self.experts(x, routing, shared, residual), routing
        y = self.experts(x, routing)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            parts, gate = self.shared_expert, self.shared_expert_gate
            own, strength = parts.beside(x, gate) if type(parts) is MLP else (parts(x), gate(x))
            strength = strength.astype(jnp.float32)
            if logit is not None:
                strength = jnp.where(jnp.isnan(logit), strength, logit)
            strength = jax.nn.sigmoid(strength)
            y = y + jnp.broadcast_to(strength, own.shape) * own.astype(jnp.float32)
        return residual + y, routing

    def __setattr__(self, name: str, value: Any) -> None:
        """As ever; but a router that holds no arrays, a function say, is part of the structure."""
        if name == "gate":
            value = nnx.data(value) if nnx.is_data(value) else nnx.static(value)
        super().__setattr__(name, value)

    def _route(self, x: Float[Array, "B T D"], context: RouterContext) -> Routing:
        """The router's choice, and what an intervention makes of it."""
        if type(self.gate) is TopKRouter:
            # All in the launch that chooses.
            return self.gate.route(x, context, scaled=True)
        experts = self.num_experts
        routing, change = self.gate(x, context), context.intervention
        check_shapes(self.gate, routing, x.shape[:2], experts)
        routing = without_padding(routing, context.valid, experts)
        if change is None:
            return routing
        if not getattr(self.gate, "intervenes", False):
            routing = without_padding(change.imposed(routing), context.valid, experts)
        return change.scaled(change.within(routing))

    def _all_ours(self) -> bool:
        """Whether nothing stands in the place of experts."""
        experts = self.experts
        groups = experts.groups if type(experts) is ExpertGroups else [experts]
        return all(type(group) is Experts for group in groups)

    def _as_one_operation(self, logit: Float[Array, "B T 1"] | None) -> SharedExpert | None:
        """The shared expert's weights, to be one more slot of the others.

        None where there is none, where its weights are stored in a way that is not for one launch,
        or where something stands in a module's place: it must see what the module would.
        """
        parts, gate = self.shared_expert, self.shared_expert_gate
        if type(parts) is not MLP or not self._all_ours():
            return None
        linears = [parts.gate_proj, parts.up_proj, parts.down_proj, gate]
        if any(type(each) is not Linear for each in linears):
            return None
        gate_proj, up_proj, down_proj, weight = (linear.weight[...] for linear in linears)
        logit = None if logit is None else logit.reshape(-1, 1)
        shared = SharedExpert(gate_proj, up_proj, down_proj, weight, logit)
        return None if shared.oddities() else shared
