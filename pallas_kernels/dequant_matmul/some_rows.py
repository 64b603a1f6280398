"""Up to 64 rows: integer codes on tensor cores, the scale on each group's sum.

Threads multiply what they decoded themselves, and codes never go through shared memory in bfloat16:
see `turn`. The order that takes is x's beforehand. Put right while it is read, x would be read from
shared memory with conflicts that cost several times the product.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from . import tile, uncoded
from .config import SomeRows
from .layout import UNIT
from .operands import Shape, iota, load
from .pieces import Piece, Share, launch


def products(
    x: Float[Array, "M I"], pieces: Sequence[Piece], configs: Sequence[SomeRows]
) -> tuple[Float[Array, "M _O"], ...]:
    """See `api.dequant_matmul`; all is the same in all configurations but `outputs`."""
    splits, rows = configs[0].splits, configs[0].rows
    shapes = [piece.shape for piece in pieces]
    dtypes = [shape.dtype if splits == 1 else jnp.float32 for shape in shapes]
    # Arrays are multiplied by rows as they are.
    turned = x
    if turns := {tile.turn(piece.shape) for piece in pieces if piece.coded}:
        [turn] = turns
        turned = turn.turned(x, configs[0].units)

    def body(shares: Sequence[Share], index: int, ids: Any, x_ref: Any, turned_ref: Any) -> None:
        [share] = shares
        shape, first, config, (row_tile, split) = share.shape, share.first, configs[index], ids
        first_row = row_tile * rows
        count = pl.cdiv(pl.cdiv(shape.units, config.units), splits)
        steps = split * count, jnp.minimum((split + 1) * count, pl.cdiv(shape.units, config.units))
        if pieces[index].coded:
            inputs = functools.partial(_inputs, shape, rows, turned_ref, first_row)
            [total] = tile.products(shape, config, [(share.refs, 0)], first, steps, inputs)
        else:
            total = uncoded.some_rows(shape, config, first, first_row, steps, x_ref, *share.refs)
        size = config.outputs, rows
        output, row = first + iota(size, 0), first_row + iota(size, 1)
        plt.store(
            share.out_ref.at[jnp.full(row.shape, split, jnp.int32), row, output],
            total.astype(dtypes[index]),
            mask=(row < shape.rows) & (output < shape.outputs),
        )

    results = launch(
        body,
        (x, turned),
        pieces,
        [config.outputs for config in configs],
        [
            jax.ShapeDtypeStruct((splits, shape.rows, shape.outputs), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        alike=range(len(pieces)),
        grid=(pl.cdiv(x.shape[0], rows), splits),
        num_warps=configs[0].num_warps,
        num_stages=configs[0].num_stages,
        name="dequant_matmul_some_rows",
    )
    if splits == 1:
        return tuple(result[0] for result in results)
    return tuple(
        jnp.sum(result, axis=0).astype(shape.dtype)
        for result, shape in zip(results, shapes, strict=True)
    )


def _inputs(
    shape: Shape, rows: int, x_ref: Any, first_row: Any, unit: Any, width: int
) -> Float[Array, "gm i"]:
    """See `tile.Inputs`."""
    size = tile.copies(shape) * rows, width
    # Not `//`, from which the compiler does not see that neighbours are read together.
    copy, row = jax.lax.div(iota(size, 0), rows), first_row + jax.lax.rem(iota(size, 0), rows)
    mask = row < shape.rows if shape.rows % rows else None
    return load(x_ref, copy * shape.rows + row, unit * UNIT + iota(size, 1), mask=mask)
