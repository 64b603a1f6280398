"""Factors of a matrix's inputs, moved into the rows of the matrix that makes these inputs.

A factor stays a vector, and a multiplication at run time, where nothing in front of a matrix can
take it. It can where inputs are, channel by channel, multiples of a row of another matrix in codes:
`_TABLE`. There all factors are powers of two, so that scales of rows, as files keep them in
bfloat16, take them exactly, and what a model computes is the same to the last bit. Rounding a row
commutes with a power of two, so rows may be multiplied after they were put in codes.

Not folded into: tensors that stay as they are, since their bytes do. Among them are norms; where
they store w for 1 + w the product would not be exact, either.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from qwen_jax.config import QwenConfig
from qwen_jax.quant import Rule

from ..calibrate import at
from ..methods import Solved
from ..methods.activation_aware import Ties

Rows = Literal["all", "second half", "heads"]

# End of the path of a matrix, of the one whose rows make its inputs, and which rows these are.
_TABLE: tuple[tuple[str, str, Rows], ...] = (
    # silu(gate) * up: a feed-forward, a shared expert, and the experts of a stack.
    (".down_proj.weight", ".up_proj.weight", "all"),
    (".down_proj", ".gate_up_proj", "second half"),
    # Attention mixes tokens, and a gate multiplies: neither mixes channels. All query heads of a
    # group read the same value head.
    (".self_attn.o_proj.weight", ".self_attn.v_proj.weight", "heads"),
)


@dataclass(frozen=True)
class Fold:
    """Where the factors of a matrix's inputs go.

    Attributes:
        producer: tree path of the matrix whose rows take them.
        rows: which ones; "heads" are those of value heads, which several query heads read.
    """

    producer: str
    rows: Rows

    def within(self, place: str) -> Fold:
        """The same with paths within a part of the model: "layers.3."."""
        return Fold(self.producer.removeprefix(place), self.rows)

    def ties(self, inputs: int, config: QwenConfig) -> Ties:
        """The inputs as [K, R, H]: those that differ in the middle index alone have one factor."""
        if self.rows != "heads":
            return 1, 1, inputs
        heads, width = config.num_key_value_heads, config.head_dim
        return heads, inputs // (heads * width), width

    def of_rows(self, factors: np.ndarray, config: QwenConfig) -> np.ndarray:
        """Factors of the producer's rows, [*, O], from those of the inputs, [*, I]."""
        *stack, inputs = factors.shape
        tied = factors.reshape(*stack, *self.ties(inputs, config))[..., 0, :]
        rows = tied.reshape(*stack, -1)
        return rows if self.rows != "second half" else np.concatenate([rows**0, rows], -1)

    def of_inputs(self, factors: np.ndarray, inputs: int, config: QwenConfig) -> np.ndarray:
        """The reverse: factors of the inputs, [*, I], from those of rows, [*, O]."""
        stack, ties = factors.shape[:-1], self.ties(inputs, config)
        rows = factors[..., -ties[0] * ties[2] :].reshape(*stack, ties[0], 1, ties[2])
        return np.broadcast_to(rows, (*stack, *ties)).reshape(*stack, inputs)


def folds(tree: Container[str], rules: Mapping[str, Rule]) -> dict[str, Fold]:
    """The matrices whose factors are folded, by tree path in the model.

    Args:
        tree: paths of all tensors of the model.
        rules: of those that become codes. Both matrices must.
    """
    found = {}
    for path, rule in rules.items():
        fold = fold_of(path)
        if fold is None or rule.method != "activation-aware" or fold.producer not in rules:
            continue
        # A bias stays as it is.
        if f"{fold.producer.removesuffix('.weight')}.bias" not in tree:
            found[path] = fold
    return found


def fold_of(path: str) -> Fold | None:
    """Where the factors of a matrix's inputs could go, by its tree path."""
    for consumer, producer, rows in _TABLE:
        if path.endswith(consumer):
            return Fold(path.removesuffix(consumer) + producer, rows)
    return None


def fold_solved(
    layer: Any,
    solved: Mapping[str, Solved],
    rules: Mapping[str, Rule],
    folds: Mapping[str, Fold],
    config: QwenConfig,
) -> dict[str, Solved]:
    """A layer in codes with factors folded; what it computes stays the same to the last bit.

    Args:
        layer: stands for its codes before and afterwards.
        solved: codes by tree path; factors of folded matrices are powers of two, tied as
            `Fold.ties` says.
        rules: of these.
        folds: what goes where, by tree path within the layer.
        config: of the model.
    """
    solved = dict(solved)
    for path, fold in folds.items():
        consumer, producer = solved[path], solved[fold.producer]
        assert consumer.input_scale is not None
        rows = fold.of_rows(consumer.input_scale, config)
        scale = producer.codes.scale * rows[..., None]
        solved[path] = consumer._replace(input_scale=None)
        solved[fold.producer] = producer._replace(codes=producer.codes._replace(scale=scale))
        for name in (path, fold.producer):
            format = rules[name].format
            assert format is not None
            parameter = at(layer, name)
            parameter.set_value(solved[name].weight(format).astype(parameter[...].dtype))
    return solved


def fold_weights(
    module: Any, path: str, fold: Fold, factors: np.ndarray, config: QwenConfig
) -> None:
    """The same in floating point, where a model's outputs stay the same to the last bit.

    Args:
        module: a layer or a model, with arrays at both paths.
        path: of the matrix whose factors are folded.
        fold: into what.
        factors: powers of two, [*, I], tied as `Fold.ties` says; what `input_scale` would be.
        config: of the model.
    """
    rows = fold.of_rows(factors, config)
    for name, by in ((path, 1 / factors[..., None, :]), (fold.producer, rows[..., None])):
        parameter = at(module, name)
        value = parameter[...]
        parameter.set_value(value * jnp.asarray(by, value.dtype))


def folded_factors(
    weight: np.ndarray, coded: np.ndarray, fold: Fold, inputs: int, config: QwenConfig
) -> np.ndarray:
    """The factors [*, I] that were folded into a matrix, by what became of the norms of its rows.

    Args:
        weight: the producer before, [*, O, K].
        coded: what its codes stand for, with the factors. Codes change a norm by far less than the
            root of two.
        fold: says which rows.
        inputs: of the matrix whose factors they are.
        config: of the model.
    """
    before, after = (np.linalg.norm(np.asarray(x, np.float64), axis=-1) for x in (weight, coded))
    known = (before > 0) & (after > 0)
    ratio = np.where(known, after, 1) / np.where(known, before, 1)
    rows = np.exp2(np.round(np.log2(ratio))).astype(np.float32)
    return fold.of_inputs(rows, inputs, config)
