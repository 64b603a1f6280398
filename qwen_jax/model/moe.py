"""The sparse feed-forward: a router, its experts, and a shared expert where the family has one."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_kernels.expert_dispatch import expert_dispatch

from ..config import QwenConfig
from .layers import MLP, Linear, parameter
from .routing import RouterContext, Routing, TopKRouter, without_padding


class Experts(nnx.Module):
    """The weights of all experts of a layer, stacked; arrays, or in codes."""

    def __init__(
        self, experts: int, width: int, hidden: int, dtype: str, *, implementation: str | None
    ):
        self.dtype = dtype
        self.implementation = implementation
        self.gate_up_proj = parameter((experts, 2 * hidden, width), dtype)
        self.down_proj = parameter((experts, width, hidden), dtype)

    def __call__(self, x: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
        tokens, slots = x.shape[0] * x.shape[1], routing.ids.shape[-1]
        mixed = expert_dispatch(
            x.reshape(tokens, -1).astype(self.dtype),
            routing.ids.reshape(tokens, slots),
            routing.weights.reshape(tokens, slots),
            self.gate_up_proj[...],
            self.down_proj[...],
            implementation=self.implementation,
        )
        return mixed.reshape(x.shape)


class SparseMoE(nnx.Module):
    """Route, run the chosen experts, add the shared expert under its own gate.

    Returns the routing beside the result.
    """

    def __init__(self, config: QwenConfig, layer: int):
        width, dtype, run = config.hidden_size, config.dtype, config.implementation
        shared = config.width("shared_expert_intermediate_size", layer)
        self.gate = TopKRouter(
            width,
            config.num_experts,
            config.num_experts_per_tok,
            dtype,
            renormalise=config.norm_topk_prob,
        )
        hidden = config.width("moe_intermediate_size", layer)
        self.experts = Experts(config.num_experts, width, hidden, dtype, implementation=run)
        self.shared_expert = MLP(width, shared, dtype, implementation=run) if shared else None
        self.shared_expert_gate = Linear(width, 1, dtype, implementation=run) if shared else None

    def __call__(
        self, x: Float[Array, "B T D"], context: RouterContext
    ) -> tuple[Float[Array, "B T D"], Routing]:
        experts = self.experts.gate_up_proj.shape[0]
        routing = without_padding(self.gate(x, context), context.valid, experts)
        y = self.experts(x, routing)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            shared, strength = self.shared_expert.beside(x, self.shared_expert_gate)
            y = y + jnp.broadcast_to(jax.nn.sigmoid(strength), x.shape) * shared
        return y, routing
