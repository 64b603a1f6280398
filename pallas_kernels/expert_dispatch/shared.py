"""`SharedExpert`: the expert that every token goes to, as one pytree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dequant_matmul.qtensor import QTensor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedExpert:
    """A gated MLP whose output is weighted with a sigmoid of the token's own logit.

    Attributes:
        gate_proj: gate projection [Fs, D], an array or in codes.
        up_proj: up projection [Fs, D], likewise.
        down_proj: down projection [D, Fs], likewise.
        gate: what the logit is made with [1, D].
        logit: in place of the tokens' own logits, where it is not NaN [M, 1]; float32. Minus
            infinity is a strength of 0. None for the tokens' own.
    """

    gate_proj: Float[Array, "Fs D"] | QTensor
    up_proj: Float[Array, "Fs D"] | QTensor
    down_proj: Float[Array, "D Fs"] | QTensor
    gate: Float[Array, "1 D"]
    logit: Float[Array, "M 1"] | None = None

    # JAX also builds trees with leaves that are no arrays.
    __no_type_check__ = True

    def logits(self, own: Float[Array, "M 1"]) -> Float[Array, "M 1"]:
        """The logits that count, where these are the tokens' own."""
        if self.logit is None:
            return own
        return jnp.where(jnp.isnan(self.logit), own, self.logit)

    def oddities(self) -> list[str]:
        """What keeps it from being a part of the experts' kernels; better computed on its own."""
        parts = {name: getattr(self, name) for name in ("gate_proj", "up_proj", "down_proj")}
        reasons = [
            f"shared {name} has an input_scale"
            for name, weight in parts.items()
            if isinstance(weight, QTensor) and weight.input_scale is not None
        ]
        if isinstance(self.gate, QTensor):
            reasons.append("shared gate is in codes")
        if _stored(self.gate_proj) != _stored(self.up_proj):
            reasons.append("shared gate_proj and up_proj are not stored alike")
        return reasons

    def contradictions(self, tokens: int, width: int) -> list[str]:
        """Where its arrays do not fit one another, or so many tokens of so many numbers."""
        hidden = self.gate_proj.shape[0]
        expected = {
            "gate_proj": (hidden, width),
            "up_proj": (hidden, width),
            "down_proj": (width, hidden),
            "gate": (1, width),
        }
        reasons = []
        for name, shape in expected.items():
            weight = getattr(self, name)
            if isinstance(weight, QTensor):
                reasons += [f"shared {name}: {reason}" for reason in weight.contradictions()]
            if tuple(weight.shape) != shape:
                reasons.append(f"shared {name} is {list(weight.shape)}; accepted is {list(shape)}")
        if self.logit is not None and (
            self.logit.shape != (tokens, 1) or self.logit.dtype != jnp.float32
        ):
            reasons.append(
                f"shared logit is {self.logit.dtype}{list(self.logit.shape)}; accepted is float32 "
                f"{[tokens, 1]}"
            )
        return reasons


def _stored(weight: Any) -> tuple[object, ...]:
    if isinstance(weight, QTensor):
        return weight.bits, weight.group_size, weight.zero is None
    return (weight.dtype,)
