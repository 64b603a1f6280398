"""A model whose linears and experts see inputs in few bits.

The modules of a copy of the model are wrapped; the forward pass is the model's own. Rounded are the
inputs of those matrices of the layers that a recipe puts in codes: so not those of the router, of
the gates in front of the delta rule and of the shared expert, nor of the head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from ..errors import RequestError
from ..model import CausalLM, Routing, check_model
from ..model.layers import Linear
from ..model.moe import Experts
from ..quant import RECIPES, ActivationFormat, QTensor, fake_quantise

Scales = Mapping[str, np.ndarray]
"""Tree path -> scale of each input, float32 [I]; see `activation_scales`.

For experts there are two: PATH.gate_up_proj [D] and PATH.down_proj [E, F].
"""


def with_activations(
    model: CausalLM, format: ActivationFormat, scales: Scales | None = None
) -> CausalLM:
    """A model with the same arrays whose linears and experts round their inputs to few bits.

    Numbers only: each product is computed as before, so nothing gets faster. In a bfloat16 model
    the rounded inputs are rounded once more to bfloat16.

    Args:
        model: a loaded model; it is not changed.
        format: bits and kind.
        scales: from `activation_scales`, for the static kind.

    Raises:
        RequestError: no scales for the static kind, or not those of this model.
    """
    check_model(model)
    if (scales is None) != (format.kind == "dynamic"):
        raise RequestError(
            f"activations of kind {format.kind!r} "
            f"{'need' if scales is None else 'take no'} scales; see activation_scales"
        )

    def scale(path: str, shape: tuple[int, ...]) -> nnx.Variable | None:
        if scales is None:
            return None
        found = scales.get(path)
        if found is None or found.shape != shape:
            raise RequestError(
                f"scales of {path}: {None if found is None else found.shape}, but the model needs "
                f"{shape}; compute them with this model"
            )
        if not (np.isfinite(found) & (found > 0)).all():
            raise RequestError(f"scales of {path} are not all finite and above 0")
        return nnx.Variable(jnp.asarray(found, jnp.float32))

    def wrap(path: str, module: Linear | Experts) -> Any:
        if isinstance(module, Linear):
            return RoundedLinear(module, format, scale(path, module.weight.shape[1:]))
        up, down = f"{path}.gate_up_proj", f"{path}.down_proj"
        experts, _, width = module.gate_up_proj.shape
        return RoundedExperts(
            module,
            format,
            scale(up, (width,)),
            scale(down, (experts, module.down_proj.shape[2])),
        )

    return wrapped(model, wrap)


class RoundedLinear(nnx.Module):
    """A linear behind rounding."""

    def __init__(self, linear: Linear, format: ActivationFormat, scale: nnx.Variable | None):
        self.linear = linear
        self.format = format
        self.scale = scale

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """The linear on rounded inputs."""
        return self.linear(fake_quantise(x, self.format, _value(self.scale)))


class RoundedExperts(nnx.Module):
    """Experts whose projections both stand behind rounding."""

    def __init__(
        self,
        experts: Experts,
        format: ActivationFormat,
        scale: nnx.Variable | None,
        down_scale: nnx.Variable | None,
    ):
        self.experts = experts
        self.format = format
        self.scale = scale
        self.down_scale = down_scale

    @property
    def gate_up_proj(self) -> nnx.Param:
        """Of the experts."""
        return self.experts.gate_up_proj

    def __call__(self, x: Float[Array, "B T D"], routing: Routing) -> Float[Array, "B T D"]:
        """The experts on rounded inputs."""
        rounded = fake_quantise(x, self.format, _value(self.scale)).astype(x.dtype)

        def middle(h: Array, _: Array, scale: Array | None) -> tuple[Array, None]:
            return fake_quantise(h, self.format, scale).astype(h.dtype), None

        return run_experts(self.experts, rounded, routing, middle, _value(self.down_scale))[0]


def _value(variable: nnx.Variable | None) -> Array | None:
    return None if variable is None else variable[...]


def run_experts(
    experts: Experts,
    x: Float[Array, "B T D"],
    routing: Routing,
    middle: Callable[[Array, Array, Array | None], tuple[Array, Any]],
    scales: Float[Array, "E F"] | None,
) -> tuple[Float[Array, "B T D"], Any]:
    """Every expert over every token, weighted: many times the work, and open in the middle.

    Args:
        experts: the weights.
        x: inputs.
        routing: which experts count for a token.
        middle: (inputs of `down_proj` [M, F], whether the token chose the expert [M], scales [F])
            to what takes their place, and anything to be stacked over experts.
        scales: handed to `middle`.
    """
    up, down = experts.gate_up_proj[...], experts.down_proj[...]
    dtype = experts.dtype
    rows = x.reshape(-1, x.shape[-1]).astype(dtype)
    ids = routing.ids.reshape(len(rows), -1)
    token = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    strengths = jnp.zeros((len(rows), up.shape[0]), jnp.float32)
    strengths = strengths.at[token, ids].add(routing.weights.reshape(ids.shape), mode="drop")

    def work(total: Array, parts: tuple) -> tuple[Array, Any]:
        up, down, strength, scale = parts
        gate_up = jnp.einsum("md,fd->mf", rows, _plain(up, dtype))
        gate, linear = jnp.split(gate_up, 2, axis=-1)
        h, seen = middle(jax.nn.silu(gate) * linear, strength > 0, scale)
        y = jnp.einsum("mf,df->md", h, _plain(down, dtype), preferred_element_type=jnp.float32)
        return total + y * strength[:, None], seen

    zeros = jnp.zeros(rows.shape, jnp.float32)
    total, seen = jax.lax.scan(work, zeros, (up, down, strengths.T, scales))
    return total.reshape(x.shape), seen


def _plain(weight: Array | QTensor, dtype: Any) -> Array:
    return weight.dequantise(dtype) if isinstance(weight, QTensor) else weight


def wrapped(model: CausalLM, wrap: Callable[[str, Any], Any]) -> CausalLM:
    """A copy of the module tree, the arrays shared, with modules of the layers wrapped."""
    model = nnx.clone(model)
    # A list first: the tree changes under the iterator.
    for path, module in [*nnx.iter_modules(model)]:
        name = ".".join(map(str, path))
        if path[:1] != ("layers",) or not _has_codes(name, module):
            continue
        parent = functools.reduce(_child, path[:-1], model)
        setattr(parent, str(path[-1]), wrap(name, module))
    return model


def _has_codes(name: str, module: Any) -> bool:
    """Whether a recipe that takes all it can puts the module's matrices in codes."""
    if isinstance(module, Experts):
        return True
    return isinstance(module, Linear) and RECIPES["q8"].rule(f"{name}.weight") is not None


def _child(module: Any, part: Any) -> Any:
    return module[part] if isinstance(part, int) else getattr(module, str(part))
