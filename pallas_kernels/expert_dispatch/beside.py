"""The shared expert's programs in a launch whose others are of routed experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from . import gates
from .config import FewTokens
from .gates import store
from .matrix import Coded, arrays_of, matrix_of
from .shared import SharedExpert


class GateUp:
    """In the first launch: silu(gate) * up of each token, and its strength: sigmoid(logit).

    Attributes:
        arrays: what they read beside the tokens.
        count: of arrays.
        shapes: of what they make, [M, Fs] and float32 [M, 1].
        programs: number of them.
    """

    def __init__(self, tokens: int, shared: SharedExpert | None, dtype: Any, config: FewTokens):
        self.arrays: list[Array] = []
        self.shapes: list[jax.ShapeDtypeStruct] = []
        self.programs = self.count = 0
        if shared is None:
            return
        self._matrix, self._tokens = matrix_of(shared.gate_proj), tokens
        self._abreast = config.abreast and isinstance(self._matrix, Coded)
        self._hidden = shared.gate_proj.shape[0]
        self._cut = dataclasses.replace(config.gate_up, outputs=config.shared_outputs)
        self._tiles = pl.cdiv(self._hidden, self._cut.outputs)
        self.arrays = [*arrays_of(shared.gate_proj), *arrays_of(shared.up_proj), shared.gate]
        self._has_logit = shared.logit is not None
        if shared.logit is not None:
            self.arrays.append(shared.logit)
        self.shapes = [
            jax.ShapeDtypeStruct((tokens, self._hidden), dtype),
            jax.ShapeDtypeStruct((tokens, 1), jnp.float32),
        ]
        self.programs, self.count = tokens * (self._tiles + 1), len(self.arrays)

    def run(self, program: Any, x_ref: Any, tokens_ref: Any, refs: Any) -> None:
        """Do what a program must, if it is one of them.

        Args:
            program: its number.
            x_ref: tokens, as codes read them.
            tokens_ref: tokens.
            refs: arrays, and then the launch's results, of which these are the last two.
        """
        if not self.programs:
            return
        count, cut = self._matrix.count, self._cut
        of_gate, of_up = refs[:count], refs[count : 2 * count]

        @pl.when(program < self._tokens * self._tiles)
        def _() -> None:
            token, first = program // self._tiles, program % self._tiles * cut.outputs
            parts = (of_gate, 0), (of_up, 0)
            x = x_ref if self._abreast else tokens_ref, token
            made = gates.made(self._matrix, parts, x, first, self._hidden, cut, self._abreast)
            store(refs[-2], token, first, self._hidden, made)

        @pl.when((program >= self._tokens * self._tiles) & (program < self.programs))
        def _() -> None:
            token = program - self._tokens * self._tiles
            given_ref = refs[2 * count + 1] if self._has_logit else None
            refs[-1][token, 0] = gates.strength(
                tokens_ref, token, refs[2 * count], given_ref, cut.num_warps
            )
