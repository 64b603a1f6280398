"""A layer put in codes, and those fitted to what the float layer puts out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qwen_jax.config import QwenConfig
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.quant import Rule
from qwen_jax.train.experts import make_dense

from .calibrate import advance, at, run
from .layer import quantise_layer
from .methods import Solved
from .quantization.folding import Fold
from .tuning import Start, fit_codes

CODE_RATE, SCALE_RATE = 5e-3, 3e-3
WINDOWS_OF_STEP = 2


@functools.cache
def layer_error(
    config: QwenConfig,
) -> Callable[[DecoderLayer, Float[Array, "B T D"], Float[Array, "B T D"]], Array]:
    """A loss of a layer, its input and what the float layer makes of that: the share missed."""

    def loss(layer: DecoderLayer, x: Array, y: Array) -> Array:
        make_dense([layer], config)
        difference = run(layer, config, x) - y
        return jnp.sum(jnp.square(difference)) / jnp.sum(jnp.square(y - x))

    return loss


def fit_layer(
    layer: DecoderLayer,
    config: QwenConfig,
    hidden: Float[np.ndarray, "N T D"],
    rules: Mapping[str, Rule],
    *,
    steps: int,
    folds: Mapping[str, Fold] | None = None,
) -> dict[str, Solved]:
    """Put a layer in codes as `quantise_layer` does, then fit them to the layer's output.

    Args:
        layer: float32, with all its weights; it stands for the layer in codes afterwards.
        config: of the model.
        hidden: the residual stream in front of the layer; at least two windows. The last eighth
            of the windows is held out.
        rules: as `quantise_layer` takes them.
        folds: as `quantise_layer` takes them.
        steps: of the fit, each on `WINDOWS_OF_STEP` windows.

    Returns:
        Codes by tree path, with reports on them as they are in the end.
    """
    weights = {path: at(layer, path)[...] for path in rules}
    target = advance(layer, config, hidden)
    solved = quantise_layer(layer, config, hidden, rules, folds=folds)
    if not solved:
        return solved
    formats = {path: rule.format for path, rule in rules.items() if rule.format is not None}
    seen = len(hidden) - max(1, len(hidden) // 8)
    seen_batches, held_out = (
        [
            (hidden[i : min(i + WINDOWS_OF_STEP, stop)], target[i : min(i + WINDOWS_OF_STEP, stop)])
            for i in range(start, stop, WINDOWS_OF_STEP)
        ]
        for start, stop in ((0, seen), (seen, len(hidden)))
    )
    fit = fit_codes(
        layer,
        weights,
        {path: Start(tensor.codes, tensor.input_scale) for path, tensor in solved.items()},
        formats,
        layer_error(config),
        [seen_batches[step % len(seen_batches)] for step in range(steps)],
        held_out,
        code_rate=CODE_RATE,
        scale_rate=SCALE_RATE,
    )
    solved = {path: solved[path]._replace(codes=codes) for path, codes in fit.codes.items()}
    for path, weight in weights.items():
        at(layer, path).set_value(weight)
    return quantise_layer(layer, config, hidden, rules, given=solved)
