"""The shared expert of some tokens, on tensor cores: programs beside routed experts'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ..dequant_matmul.config import SomeRows
from ..dequant_matmul.turn import Turn
from . import gates
from .joint import Joint
from .shared import SharedExpert


class Cuts(NamedTuple):
    """How the work is cut: of the gates, and of the down projections."""

    gates: SomeRows
    down: SomeRows


class SharedGates:
    """Silu(gate) * up of all tokens, as the down projections read it, and tokens' strengths.

    Args:
        x: tokens.
        tokens: the same in the order of `wanted`.
        shared: the expert.
        cuts: how the work is cut.
        num_warps: of a program.

    Attributes:
        arrays: what programs read.
        shapes: of what they write: [copies * M, Fs and more], and float32 [M, 1].
        programs: so many.
        num_warps: of each.
    """

    def __init__(
        self,
        x: Float[Array, "M D"],
        tokens: Float[Array, "_CM _D"],
        shared: SharedExpert,
        cuts: Cuts,
        num_warps: int,
    ):
        self._gate, up = (
            _joint(weight, cuts.gates) for weight in (shared.gate_proj, shared.up_proj)
        )
        self._behind = _joint(shared.down_proj, cuts.down)
        self._tokens, self.num_warps = x.shape[0], num_warps
        self._coded = 1 + len(self._gate.arrays) + len(up.arrays)
        given = [] if shared.logit is None else [shared.logit]
        self.arrays = [tokens, *self._gate.arrays, *up.arrays, x, shared.gate, *given]
        strengths = jax.ShapeDtypeStruct((self._tokens, 1), jnp.float32)
        self.shapes = [self._behind.struct_of(self._tokens), strengths]
        self._tiles = pl.cdiv(self._tokens, self._gate.cut.rows) * self._gate.tiles
        self.programs = self._tiles + self._tokens

    def run(self, program: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        """Do what a program must, if it is one of them."""

        @pl.when(program < self._tiles)
        def _() -> None:
            x_ref, *of_both = ins[: self._coded]
            tile, first = self._gate.place(program)
            mine = self._gate.rows_of(tile)
            half = len(of_both) // 2
            matrices = [(of_both[:half], 0), (of_both[half:], 0)]
            made = self._gate.products(matrices, first, self._gate.inputs(x_ref, mine, 1))
            self._behind.store(outs[0], mine, first, silu(made))

        @pl.when((program >= self._tiles) & (program < self.programs))
        def _() -> None:
            token = program - self._tiles
            x_ref, gate_ref, *given = ins[self._coded :]
            given_ref = given[0] if given else None
            outs[1][token, 0] = gates.strength(x_ref, token, gate_ref, given_ref, self.num_warps)


class SharedDown:
    """Down projections of all tokens, times their strengths.

    Args:
        made: by `SharedGates`.
        strength: likewise.
        shared: the expert.
        cut: how the work is cut.

    Attributes:
        arrays: see `SharedGates`.
        shapes: float32 [M, D].
        programs: so many.
    """

    def __init__(
        self,
        made: Float[Array, "_CM _F"],
        strength: Float[Array, "M 1"],
        shared: SharedExpert,
        cut: SomeRows,
    ):
        self._joint, tokens = _joint(shared.down_proj, cut), strength.shape[0]
        self.arrays = [made, *self._joint.arrays, strength]
        self.shapes = [jax.ShapeDtypeStruct((tokens, shared.down_proj.shape[0]), jnp.float32)]
        self.programs = pl.cdiv(tokens, cut.rows) * self._joint.tiles

    def run(self, program: Any, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        """Do what a program must, if it is one of them."""

        @pl.when(program < self.programs)
        def _() -> None:
            made_ref, *of_own, strength_ref = ins
            tile, first = self._joint.place(program)
            mine = self._joint.rows_of(tile)
            inputs = self._joint.inputs(made_ref, mine, 1)
            [y] = self._joint.products([(of_own, 0)], first, inputs)
            y = y * self._joint.of_rows(strength_ref, mine)
            self._joint.store_plainly(outs[0], mine, first, y)


def wanted(shared: SharedExpert, cuts: Cuts) -> tuple[Turn, int]:
    """In which order it reads tokens, and so many columns; see `order.ordered`."""
    gate = _joint(shared.gate_proj, cuts.gates)
    return gate.turn, gate.columns


def silu(products: list[Float[Array, "o m"]]) -> Float[Array, "o m"]:
    """Of gates, times the rows above, in bfloat16."""
    gate, up = products
    return (gate * jax.lax.logistic(gate) * up).astype(jnp.bfloat16)


def _joint(weight: Any, cut: SomeRows) -> Joint:
    return Joint.of(weight, weight.shape[0], cut)
