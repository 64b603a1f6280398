"""What calibration tokens say about each matrix of a layer, and the layer solved with it.

One layer is in memory. A caller does, for each layer in turn:

    result = quantise_layer(layer, config, hidden, rules)
    ... write result.solved ...
    hidden = result.hidden           # may be saved, so that a later run goes on from here
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from qwen_jax.config import QwenConfig
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.quant import Rule

from .methods import Solved


class HiddenStates(NamedTuple):
    """The residual stream in front of a layer, on the host.

    Attributes:
        quantised: float32 [N, T, D], as the layers in codes make it.
        reference: float32 [N, T, D], as the float layers make it.
    """

    quantised: np.ndarray
    reference: np.ndarray


class Statistics(NamedTuple):
    """Of the inputs x of one matrix, or of each expert's in a stack.

    Attributes:
        hessian: mean of x x^T, weighted.
        shift: mean of (x' - x) x^T, where x' is the input in the float model.
        mean_abs: mean of |x|.
        rows: inputs counted.
    """

    hessian: Float[Array, "*S I I"]
    shift: Float[Array, "*S I I"]
    mean_abs: Float[Array, "*S I"]
    rows: Int[Array, "*S"]


class LayerResult(NamedTuple):
    """A layer in codes.

    Attributes:
        solved: codes and report of each tensor, by tree path within the layer:
            "linear_attn.in_proj_qkv.weight", "mlp.experts.gate_up_proj".
        hidden: the residual stream behind the layer.
    """

    solved: dict[str, Solved]
    hidden: HiddenStates


def quantise_layer(
    layer: DecoderLayer,
    config: QwenConfig,
    hidden: HiddenStates,
    rules: Mapping[str, Rule],
    *,
    windows_at_once: int = 8,
) -> LayerResult:
    """Put the matrices of a layer in codes, in the order in which data flows through them.

    Each one's inputs come from the matrices before it in codes, in this layer and in earlier ones.

    Args:
        layer: with all its weights, float32 or bfloat16. Not changed.
        config: of the model.
        hidden: the residual stream in front of the layer.
        rules: of the tensors that become codes, by tree path within the layer.
        windows_at_once: windows of calibration tokens in one forward pass; bounds device memory.

    Raises:
        RequestError: a rule for a tensor that is no matrix of the layer.
    """
    raise NotImplementedError


def quantise_head(
    normal: Float[np.ndarray, "N T D"], weight: Float[Array, "V D"], rule: Rule
) -> Solved:
    """The head in codes, from the final norm's outputs in the quantised model."""
    raise NotImplementedError
