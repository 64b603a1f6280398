"""The Triton implementation: what it takes, and which of its kernels runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, UInt

from .._compat import Target, current_target, triton_refusals
from . import few_rows, many_rows, reference, some_rows, unpacked
from .config import Config, FewRows, ManyRows, SomeRows, Unpacked, heuristic
from .layout import UNIT
from .operands import Shape
from .specs import RESULTS, SCALES

PRODUCTS: dict[type[Config], Callable[..., Any]] = {
    FewRows: few_rows.product,
    SomeRows: some_rows.product,
    ManyRows: many_rows.product,
    Unpacked: unpacked.product,
}


def refusals(target: Target, *arrays: Any, **settings: Any) -> list[str]:
    """Why the kernels do not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target) + reference.refusals(target, *arrays, **settings)
    x, codes, scale, *rest = arrays
    zero = rest[0] if rest else None
    if str(x.dtype) != "bfloat16":
        reasons.append(f"x is {x.dtype}, not bfloat16")
    for name, array in {"scale": scale, "zero": zero}.items():
        if array is not None and str(array.dtype) not in SCALES:
            reasons.append(f"{name} is {array.dtype}, not {' or '.join(SCALES)}")
    if str(settings["dtype"]) not in RESULTS:
        reasons.append(f"the result is {settings['dtype']}, not {' or '.join(RESULTS)}")
    outputs, bits, units = codes.shape
    rows = x.size // x.shape[-1]
    sizes = {"x": x.size, "codes": outputs * bits * units, "the result": rows * outputs}
    for name, size in sizes.items():
        if size >= 2**31:
            reasons.append(f"{name} has {size} elements, 2^31 or more")
    return reasons


def dequant_matmul(
    x: Float[Array, "... I"],
    codes: UInt[Array, "O Q U"],
    scale: Float[Array, "O J"],
    zero: Float[Array, "O J"] | None = None,
    *,
    group_size: int,
    dtype: Any,
    config: Config | None = None,
) -> Float[Array, "... O"]:
    """See `api.dequant_matmul`; `config` is the heuristic's if None, and its kind is the kernel."""
    inputs, (outputs, bits, units) = x.shape[-1], codes.shape
    rows = x.size // inputs
    shape = Shape(rows, inputs, outputs, bits, units, group_size // UNIT, dtype)
    if config is None:
        cores = current_target().cores
        config = heuristic(cores, rows, outputs, units, shape.group_units)
    product = PRODUCTS[type(config)]
    flat = x.reshape(rows, inputs)
    y = product(shape, flat, codes.reshape(outputs, -1), scale, zero, config)
    return y.reshape(*x.shape[:-1], outputs)
