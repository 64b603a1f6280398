"""The Triton implementation: what it takes, and which of its kernels runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._compat import Target, current_target, triton_refusals
from ..dequant_matmul import tile
from ..dequant_matmul.qtensor import QTensor
from ..tuning import decide
from . import down, gate_up, many_tokens_config, reference
from .config import (
    FEW_TOKENS,
    SHARING_TOKENS,
    Config,
    FewTokens,
    SomeTokens,
    heuristic,
    joint,
    others,
)
from .many_tokens import many_tokens
from .many_tokens_config import ManyTokens
from .matrix import Coded, matrix_of
from .shared import SharedExpert
from .some_tokens import some_tokens

DTYPES = ("bfloat16", "float32")


def few_tokens(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    down_proj: Float[Array, "E D F"] | QTensor,
    shared: SharedExpert | None,
    residual: Float[Array, "M D"] | None,
    inner_dtype: Any,
    dtype: Any,
    config: FewTokens,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`."""
    below = matrix_of(down_proj)
    made = gate_up.gated(x, ids, gate_up_proj, shared, inner_dtype, config, below)
    return down.summed(made, ids, weights, down_proj, shared, residual, dtype, config.down)


def chosen(
    x: Any,
    ids: Any,
    gate_up_proj: Any,
    down_proj: Any,
    shared: SharedExpert | None,
    inner_dtype: Any,
) -> Config:
    """The configuration of a call that brings none."""
    target, (tokens, slots) = current_target(), ids.shape
    experts, width, hidden = down_proj.shape
    codes = _stored(gate_up_proj, down_proj)
    key = f"tokens={tokens} slots={slots} experts={experts}x{width}x{hidden} {codes} {x.dtype}"
    if tokens > FEW_TOKENS:
        config = many_tokens_config.heuristic(target, tokens, slots, experts)
        candidates = functools.partial(many_tokens_config.others, config)
        return decide("expert_dispatch", target, key, config, candidates)
    matrices = [matrix_of(weight) for weight in (gate_up_proj, down_proj)]
    fitting: list[FewTokens | SomeTokens]
    units = (matrix.units for matrix in matrices)
    bits = gate_up_proj.bits if isinstance(gate_up_proj, QTensor) else 0
    few = heuristic(target.cores, tokens, slots, width, hidden, *units, bits=bits)
    own = []
    if shared is not None:
        own = [shared.gate_proj, shared.up_proj, shared.down_proj]
        # What suits codes may be for codes alone.
        key += f" shared={own[0].shape[0]} {_stored(own[0], own[2])}"
    codes_beside = all(isinstance(w, QTensor) for w in own)
    if tokens == 1 or not codes_beside or jnp.dtype(inner_dtype) != jnp.bfloat16:
        fitting = [few]
    else:
        fitting = [dataclasses.replace(few, abreast=isinstance(gate_up_proj, QTensor))]
        copies = [tile.copies(m.shape) for m in matrices if isinstance(m, Coded)]
        if len(copies) == 2:
            fitting.insert(0 if tokens >= SHARING_TOKENS else 1, joint(*copies))
    candidates = functools.partial(others, *fitting)
    kinds = [type(each) for each in fitting]
    return decide("expert_dispatch", target, key, fitting[0], candidates, kinds)


def _stored(*weights: Any) -> str:
    """Bits of codes, and their group; else the dtype."""
    return "/".join(
        f"{weight.bits}g{weight.group_size}" if isinstance(weight, QTensor) else weight.dtype.name
        for weight in weights
    )


DISPATCHES: dict[type[Config], Callable[..., Any]] = {
    FewTokens: few_tokens,
    SomeTokens: some_tokens,
    ManyTokens: many_tokens,
}


def refusals(target: Target, *arrays: Any, **settings: Any) -> list[str]:
    """Why the kernels do not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target) + reference.refusals(target, *arrays, **settings)
    x, _, weights, gate_up_proj, down_proj, *rest = arrays
    shared, residual, *_ = *rest, None, None
    if x.shape[0] > FEW_TOKENS:
        inner_dtype = settings["inner_dtype"]
        reasons += _refusals_of_many(x, arrays[1], gate_up_proj, down_proj, inner_dtype)
    named = {"gate_up_proj": gate_up_proj, "down_proj": down_proj}
    dtypes = {"x": x.dtype} | {name: settings[name] for name in ("inner_dtype", "dtype")}
    if residual is not None:
        dtypes["residual"] = residual.dtype
    if shared is not None:
        parts = ("gate_proj", "up_proj", "down_proj")
        named |= {f"shared {name}": getattr(shared, name) for name in parts}
        reasons += shared.oddities()
        if not isinstance(shared.gate, QTensor):
            dtypes["shared gate"] = shared.gate.dtype
    for name, weight in named.items():
        if isinstance(weight, QTensor):
            dtypes[f"{name}.scale"] = weight.scale.dtype
            if weight.zero is not None:
                dtypes[f"{name}.zero"] = weight.zero.dtype
            if weight.input_scale is not None and not name.startswith("shared"):
                reasons.append(f"{name} has an input_scale")
            if str(settings["inner_dtype"]) == "float32":
                reasons.append(f"inner_dtype is float32, and sums of {name}'s codes are less exact")
        else:
            dtypes[name] = weight.dtype
        reasons += [
            f"{name} has an array of {leaf.size} elements, 2^31 or more"
            for leaf in jax.tree.leaves(weight)
            if leaf.size >= 2**31
        ]
    for name, dtype in dtypes.items():
        if str(dtype) not in DTYPES:
            reasons.append(f"{name} is {dtype}, not {' or '.join(DTYPES)}")
    if str(weights.dtype) != "float32":
        reasons.append(f"weights are {weights.dtype}, not float32")
    return reasons


def _refusals_of_many(
    x: Any, ids: Any, gate_up_proj: Any, down_proj: Any, inner_dtype: Any
) -> list[str]:
    """Why the kernels of more than `FEW_TOKENS` tokens do not take a call."""
    which = f"with more than {FEW_TOKENS} tokens"
    reasons = [
        f"{name} is {dtype}, not bfloat16, {which}"
        for name, dtype in (
            ("inner_dtype", inner_dtype),
            *(
                (name, weight.dtype)
                for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj))
                if not isinstance(weight, QTensor)
            ),
        )
        if str(dtype) != "bfloat16"
    ]
    if (size := ids.size * max(x.shape[1], down_proj.shape[2])) >= 2**31:
        reasons.append(f"what all slots make has {size} elements, 2^31 or more")
    return reasons


def expert_dispatch(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    down_proj: Float[Array, "E D F"] | QTensor,
    shared: SharedExpert | None = None,
    residual: Float[Array, "M D"] | None = None,
    *,
    inner_dtype: Any,
    dtype: Any,
    config: Config | None = None,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`; the kind of `config`, the heuristic's if None, is the kernel."""
    if config is None:
        config = chosen(x, ids, gate_up_proj, down_proj, shared, inner_dtype)
    dispatch = DISPATCHES[type(config)]
    arrays = x, ids, weights, gate_up_proj, down_proj, shared, residual
    return dispatch(*arrays, inner_dtype, dtype, config)
