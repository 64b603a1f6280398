"""The Triton implementation: what it takes, and its kernels.

Two launches, and not one whose last program chooses: that program would have to be found by a
counter that is zero whenever the kernel starts, and a pure function has none unless another launch
makes it.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Bool, Float, Int

from .._compat import Target, current_target, triton_refusals
from . import few_rows, reference, some_rows
from .config import SOME_ROWS, Config, SomeRows, config_for, splits
from .reference import RouterOutput
from .specs import DTYPES, MOST_EXPERTS
from .top_k import top_k


def refusals(target: Target, *arrays: Any, **settings: Any) -> list[str]:
    """Why the kernels do not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target) + reference.refusals(target, *arrays, **settings)
    x, weight = arrays[:2]
    for name, array in (("x", x), ("weight", weight)):
        if str(array.dtype) not in DTYPES:
            reasons.append(f"{name} is {array.dtype}, not {' or '.join(DTYPES)}")
    experts = weight.shape[0]
    if experts > MOST_EXPERTS:
        reasons.append(f"weight has {experts} experts, more than {MOST_EXPERTS}")
    sizes = {"x": x.size, "weight": weight.size, "the logits": x.shape[0] * experts}
    # With a part, options of all layers are one array.
    options = [option for option in arrays[2:] if option is not None]
    sizes |= {f"an option {list(option.shape)}": option.size for option in options}
    for name, size in sizes.items():
        if size >= 2**31:
            reasons.append(f"{name} has {size} numbers, 2^31 or more")
    return reasons


def router(
    x: Float[Array, "M D"],
    weight: Float[Array, "E D"],
    bias: Float[Array, "R E"] | None,
    mask: Bool[Array, "Q E"] | None,
    valid: Bool[Array, " M"] | None,
    limit: Int[Array, " M"] | None,
    temperature: Float[Array, " M"] | None,
    forced: Bool[Array, "F E"] | None = None,
    scale: Float[Array, "S E"] | None = None,
    part: Int[Array, "1"] | None = None,
    *,
    slots: int,
    renormalise: bool,
    config: Config | None = None,
) -> RouterOutput:
    """See `api.router`; `config` is chosen by shape if None."""
    options = bias, mask, valid, limit, temperature, forced, scale, part
    parts = logits_in_parts(x, weight, config)
    return RouterOutput(*top_k(parts, *options, slots=slots, renormalise=renormalise))


def logits_in_parts(
    x: Float[Array, "M D"], weight: Float[Array, "E D"], config: Config | None = None
) -> Float[Array, "P M E"]:
    """The first launch: logits, or what adds up to them; `config` as for `router`."""
    if x.shape[0] > SOME_ROWS and not splits(weight):
        return reference.product(x, weight)[None]
    if config is None:
        config = config_for(current_target(), x, weight)
    if isinstance(config, SomeRows):
        return some_rows.product(x, weight, config)
    return few_rows.product(x, weight, config)[None]
