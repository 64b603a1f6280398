"""The Triton implementation: what it takes, and which of its kernels runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._compat import Target, current_target, triton_refusals
from ..tuning import decide
from . import few_rows, many_rows, reference, some_rows, unpacked
from .config import (
    KINDS,
    Config,
    FewRows,
    ManyRows,
    SomeRows,
    Unpacked,
    heuristic,
    others,
    without_codes,
)
from .layout import UNIT
from .pieces import Piece
from .qtensor import QTensor
from .specs import NUMBERS, RESULTS
from .tile import turn


def refusals(target: Target, x: Any, weights: Any, *, dtype: Any) -> list[str]:
    """Why the kernels do not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target) + reference.refusals(target, x, weights, dtype=dtype)
    if str(x.dtype) != "bfloat16":
        reasons.append(f"x is {x.dtype}, not bfloat16")
    if str(dtype) not in RESULTS:
        reasons.append(f"the result is {dtype}, not {' or '.join(RESULTS)}")
    rows, sizes = x.size // x.shape[-1], {"x": x.size}
    for index, weight in enumerate(weights):
        name, parts = f"weights[{index}]", {"": weight}
        if isinstance(weight, QTensor):
            parts = {"scale of ": weight.scale, "zero of ": weight.zero}
        for part, array in parts.items():
            if array is not None and str(array.dtype) not in NUMBERS:
                reasons.append(f"{part}{name} is {array.dtype}, not {' or '.join(NUMBERS)}")
        words = weight.codes if isinstance(weight, QTensor) else weight
        sizes |= {name: words.size, f"the result of {name}": rows * weight.shape[0]}
    for name, size in sizes.items():
        if size >= 2**31:
            reasons.append(f"{name} has {size} elements, 2^31 or more")
    return reasons


def dequant_matmul(
    x: Float[Array, "... I"],
    weights: tuple[Float[Array, "_O I"] | QTensor, ...],
    *,
    dtype: Any,
    config: Config | None = None,
) -> tuple[Float[Array, "... _O"], ...]:
    """See `api.dequant_matmul`; `config` is the heuristic's if None, and its kind is the kernel.

    Of arrays, it is made to fit.
    """
    inputs = x.shape[-1]
    rows = x.size // inputs
    pieces = [Piece.of(weight, rows, dtype) for weight in weights]
    configs = _configs(pieces) if config is None else [config] * len(pieces)
    configs = [
        cut if piece.coded else without_codes(cut, rows)
        for piece, cut in zip(pieces, configs, strict=True)
    ]
    flat, results = x.reshape(rows, inputs), {}
    for together in _launches(pieces, configs):
        chosen = [(pieces[index], configs[index]) for index in together]
        results |= dict(zip(together, _products(flat, *zip(*chosen, strict=True)), strict=True))
    return tuple(
        results[index].reshape(*x.shape[:-1], piece.shape.outputs)
        for index, piece in enumerate(pieces)
    )


def _configs(pieces: Sequence[Piece]) -> list[Config]:
    """What suits each piece; of arrays what suits the codes beside them.

    What was measured is one configuration for all of them.
    """
    target, outputs = current_target(), sum(piece.shape.outputs for piece in pieces)
    beside = any(not piece.coded for piece in pieces)
    found = [heuristic(target.cores, piece.shape, outputs, beside=beside) for piece in pieces]
    coded = [config for piece, config in zip(pieces, found, strict=True) if piece.coded]
    first = (coded or found)[0]
    best = decide("dequant_matmul", target, _key(pieces), first, lambda: others(first), kinds=KINDS)
    if best != first:
        return [best] * len(pieces)
    return [config if piece.coded else first for piece, config in zip(pieces, found, strict=True)]


def _key(pieces: Sequence[Piece]) -> str:
    """What entries of `tuning_data` are found by: outputs, bits and group of each matrix."""
    shape = pieces[0].shape
    matrices = "+".join(
        f"{p.shape.outputs}x{p.shape.bits}"
        + (f"/{UNIT * p.shape.group_units}" if p.coded else "")
        + ("z" if len(p.arrays) > 2 else "")
        for p in pieces
    )
    return f"rows={shape.rows} inputs={shape.inputs} matrices={matrices} {jnp.dtype(shape.dtype)}"


def _launches(pieces: Sequence[Piece], configs: Sequence[Config]) -> list[list[int]]:
    """Which pieces are one launch: of few and of some rows, those whose programs are alike."""
    found: dict[Any, list[int]] = {}
    turns = [turn(piece.shape) for piece in pieces if piece.coded]
    for index, (piece, config) in enumerate(zip(pieces, configs, strict=True)):
        alike: Any = None, index
        if isinstance(config, FewRows):
            alike = config.num_warps, config.abreast and config.units
        elif isinstance(config, SomeRows):
            mine = turn(piece.shape) if piece.coded or not turns else turns[0]
            alike = dataclasses.replace(config, outputs=0), mine
        found.setdefault(alike, []).append(index)
    return list(found.values())


def _products(
    x: Float[Array, "M I"], pieces: Sequence[Piece], configs: Sequence[Any]
) -> Sequence[Float[Array, "M _O"]]:
    """Products of one launch."""
    if isinstance(configs[0], FewRows):
        return few_rows.products(x, pieces, configs)
    if isinstance(configs[0], SomeRows):
        return some_rows.products(x, pieces, configs)
    [piece], [config] = pieces, configs
    if not piece.coded:
        y = jnp.einsum(
            "mi,oi->mo",
            x.astype(piece.arrays[0].dtype),
            *piece.arrays,
            preferred_element_type=jnp.float32,
        )
        return [y.astype(piece.shape.dtype)]
    product = {ManyRows: many_rows.product, Unpacked: unpacked.product}[type(config)]
    return [product(x, piece, config)]
