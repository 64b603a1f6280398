"""The Triton implementation: what it takes, and which of its two forms a call gets."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from .._compat import Target, current_target, triton_refusals
from . import reference
from .chunk_inputs import ROWS
from .chunked import chunked
from .config import decode_config, pass_config
from .decode import decode
from .reference import DeltaRuleOutput
from .specs import DTYPES, WIDTHS

NAMES = (
    "qkv",
    "b",
    "a",
    "conv_weight",
    "a_log",
    "dt_bias",
    "conv_state",
    "delta_state",
)


def refusals(target: Target, *arrays: Any) -> list[str]:
    """Why the kernels do not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target) + reference.refusals(target, *arrays)
    named = dict(zip(NAMES, arrays, strict=False))
    for name, array in named.items():
        accepted = ("float32",) if name in ("a_log", "dt_bias") else DTYPES
        if str(array.dtype) not in accepted:
            reasons.append(f"{name} is {array.dtype}, not {' or '.join(accepted)}")
    widths = ", ".join(map(str, WIDTHS))
    for name, width in zip(("key", "value"), named["delta_state"].shape[2:], strict=True):
        if width not in WIDTHS:
            reasons.append(f"{name} width {width} is not one of {widths}")
    taps = named["conv_weight"].shape[1]
    if taps > ROWS:
        reasons.append(f"the convolution has {taps} taps, more than {ROWS}")
    batch, length, _ = named["qkv"].shape
    if batch * length * named["delta_state"].shape[1] >= 2**31:
        reasons.append(f"{batch} x {length} tokens are too many: read-outs must be below 2^31")
    return reasons


def gated_delta_rule(
    qkv: Float[Array, "B T C"],
    b: Float[Array, "B T M"],
    a: Float[Array, "B T M"],
    conv_weight: Float[Array, "C W"],
    a_log: Float[Array, " M"],
    dt_bias: Float[Array, " M"],
    conv_state: Float[Array, "P C W"],
    delta_state: Float[Array, "P M Q R"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    slots: Int[Array, " B"] | None = None,
) -> DeltaRuleOutput:
    """See `api.gated_delta_rule`."""
    arrays = (
        qkv,
        b,
        a,
        conv_weight,
        a_log,
        dt_bias,
        conv_state,
        delta_state,
        start,
        lengths,
        slots,
    )
    target = current_target()
    if qkv.shape[1] == 1:
        return decode(*arrays, config=decode_config(target, qkv.shape[0], delta_state))
    return chunked(*arrays, config=pass_config(target, qkv, delta_state))
