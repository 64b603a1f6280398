"""Experts for the backward pass: every expert on every token, without sorting or loops.

The reference of `expert_dispatch` works through tiles of one expert in a scan, so that memory stays
small. Its gradient adds a whole stack of zeros and one matrix for each tile, step after step. Where
a token uses a good part of the experts, two dense products over all of them cost no more than that,
spare a GPU many small steps, and split over a mesh of devices as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ..config import QwenConfig
from ..errors import RequestError
from ..model import CausalLM, Routing
from ..model.decoder import DecoderLayer
from ..model.moe import Experts, SparseMoE
from ..quant import QTensor

# Dense products do E / A times the work of the chosen experts.
MOST_EXPERTS_A_SLOT = 8


class DenseExperts(nnx.Module):
    """The experts of a layer, all computed, those not chosen with weight 0."""

    def __init__(self, experts: Experts):
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj
        self.dtype = experts.dtype

    @classmethod
    def instead_of(cls, experts: object) -> DenseExperts:
        """Those of a layer, computed so.

        Raises:
            RequestError: they are in codes, or not the model's own kind.
        """
        if isinstance(experts, DenseExperts):
            return experts
        if type(experts) is not Experts or _in_codes(experts):
            kind = "in codes" if type(experts) is Experts else f"a {type(experts).__name__}"
            raise RequestError(f"the experts are {kind}; accepted are float experts of one width")
        return cls(experts)

    def __call__(self, x: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
        hidden = self.hidden(x)
        return self.mixed(hidden, slot_weights(routing.ids, routing.weights, hidden.shape[2]))

    def hidden(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E F"]:
        """What each expert's gate and up projections make of each token."""
        x = x.astype(self.dtype)
        both = jnp.einsum("btd,efd->btef", x, self.gate_up_proj[...].astype(self.dtype))
        gate, up = jnp.split(both, 2, axis=-1)
        return jax.nn.silu(gate) * up

    def mixed(
        self, hidden: Float[Array, "B T E F"], weights: Float[Array, "B T E"]
    ) -> Float[Array, "B T D"]:
        """Float32: the sum of the experts' outputs times their weights."""
        scaled = hidden * weights[..., None].astype(hidden.dtype)
        down = self.down_proj[...].astype(hidden.dtype)
        return jnp.einsum("btef,edf->btd", scaled, down, preferred_element_type=jnp.float32)


def slot_weights(
    ids: Int[Array, "B T A"], weights: Float[Array, "B T A"], experts: int
) -> Float[Array, "B T E"]:
    """The weight of each expert at each token, 0 for those not chosen."""
    codes = jax.nn.one_hot(ids, experts, dtype=weights.dtype)
    return jnp.einsum("bta,btae->bte", weights, codes, precision=jax.lax.Precision.HIGHEST)


def sparse_feeds(model: CausalLM, wanted: str) -> list[Any]:
    """The sparse feed-forwards of a model; their parts may be replaced.

    Raises:
        RequestError: there are none; `wanted` says what needs them.
    """
    if not (found := _sparse(model.layers)):
        raise RequestError(f"no MoE layers: {wanted} is for models with experts")
    return found


def make_dense(layers: Iterable[DecoderLayer], config: QwenConfig) -> None:
    """Puts `DenseExperts` where a layer's experts are arrays, and `pays_dense`."""
    for moe in _sparse(layers):
        if type(moe.experts) is Experts and not _in_codes(moe.experts) and pays_dense(config):
            moe.experts = DenseExperts(moe.experts)


def pays_dense(config: QwenConfig) -> bool:
    """Whether a token uses so many of the experts that all of them may as well be computed."""
    return 0 < config.num_experts <= MOST_EXPERTS_A_SLOT * config.num_experts_per_tok


def _sparse(layers: Iterable[DecoderLayer]) -> list[Any]:
    return [layer.mlp for layer in layers if isinstance(layer.mlp, SparseMoE)]


def _in_codes(experts: Experts) -> bool:
    stacks = experts.gate_up_proj[...], experts.down_proj[...]
    return any(isinstance(stack, QTensor) for stack in stacks)
