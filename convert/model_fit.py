"""All codes and scales of a model fitted together, so that it predicts what the float model does.

What a recipe leaves as it is stays: norms, router, convolutions, biases. So do zero points and
factors of inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from qwen_jax.accounting import count_parameters, tensors
from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.model import CausalLM, FlatModel
from qwen_jax.quant import QTensor, Scheme, WeightFormat
from qwen_jax.train.experts import make_dense, pays_dense

from .calibrate import at
from .methods import Codes
from .methods.codes import dequantise, of_inputs
from .quantization.packed import unpacked
from .tuning import Fit, Start, fit_codes

# Measured on the demo model at 3 bits in groups of 32; twice the rate of codes did worse.
CODE_RATE, SCALE_RATE = 2e-3, 3e-3
STEPS, WINDOWS_OF_STEP = 600, 16
HELD_OUT = 32
# Positions, two means, a gradient, the weight in float32, and what the optimiser makes of them.
BYTES_A_CODE = 24
_TOLD = 10


def fit_model(
    model: CausalLM,
    teacher: CausalLM,
    tokens: Int[np.ndarray, "N T"],
    *,
    steps: int = STEPS,
    windows_of_step: int = WINDOWS_OF_STEP,
    tell: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Codes and scales with which a model comes closer to a float one.

    Args:
        model: float32, with tensors in codes.
        teacher: float32, the one that the codes were made from.
        tokens: windows of calibration text in the order of the text. Some, spread evenly, are held
            out; steps take the others in an order drawn once, over and over.
        steps: of the descent.
        windows_of_step: windows in one step.
        tell: told of progress, a line at a time.

    Returns:
        Codes of all tensors by tree path: the old ones where the mean KL(teacher || model) over the
        windows held out did not fall.

    Raises:
        RequestError: a number below 1, or too few windows.
    """
    seen, held_out = divided(tokens, steps, windows_of_step)
    coded = tensors_in_codes(model)
    told, base = _Progress(steps, tell), FlatModel.of(teacher)
    return fit_codes(
        model,
        {path: at(teacher, path)[...] for path in coded},
        {path: start(tensor) for path, tensor in coded.items()},
        {path: format_of(tensor) for path, tensor in coded.items()},
        divergence,
        [(base, batch) for batch in batches(seen, steps, windows_of_step)],
        [(base, window[None]) for window in held_out],
        code_rate=CODE_RATE,
        scale_rate=SCALE_RATE,
        tell=told.step,
    )


def divided(
    tokens: Int[np.ndarray, "N T"], steps: int, windows_of_step: int
) -> tuple[Int[np.ndarray, "K T"], Int[np.ndarray, "H T"]]:
    """Windows to fit to, and windows to judge by: an eighth of all, `HELD_OUT` at most.

    Raises:
        RequestError: a number below 1, or fewer windows than one step and one to judge by.
    """
    windows_wanted(steps, windows_of_step)
    count, length = tokens.shape
    if count <= windows_of_step:
        raise RequestError(
            f"the calibration text has {count} windows of {length} tokens; a step takes "
            f"{windows_of_step}, and one at least is held out: give more text, or fewer windows a "
            "step (--batch-windows)"
        )
    held = max(1, min(HELD_OUT, count // 8, count - windows_of_step))
    chosen = np.linspace(0, count - 1, held + 2)[1:-1].astype(int)
    return np.delete(tokens, chosen, axis=0), tokens[chosen]


def windows_wanted(steps: int, windows_of_step: int) -> int:
    """Most windows of calibration text that a fit makes use of.

    Raises:
        RequestError: a number below 1.
    """
    if steps < 1 or windows_of_step < 1:
        raise RequestError(
            f"{steps} steps of {windows_of_step} windows; accepted is 1 and more of both"
        )
    return steps * windows_of_step + HELD_OUT


def batches(tokens: Int[np.ndarray, "N T"], steps: int, size: int) -> list[Int[np.ndarray, "B T"]]:
    """Of each step `size` windows: all in an order drawn once, then all again."""
    order = np.random.default_rng(0).permutation(len(tokens))
    places = np.arange(steps * size).reshape(steps, size) % len(tokens)
    return [tokens[order[row]] for row in places]


def divergence(model: CausalLM, base: FlatModel, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean KL(teacher || model) in nats; logits are there for one window at a time.

    Args:
        model: its experts are replaced where that is faster.
        base: the teacher.
        tokens: whole windows.
    """
    teacher = base.module()
    for each in (model, teacher):
        make_dense(each.layers, each.config)
    lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    hidden = tuple(
        m.forward(tokens, None, jnp.zeros_like(lengths), lengths).hidden_states[-1]
        for m in (teacher, model)
    )

    @jax.checkpoint
    def of_window(hidden: tuple[Float[Array, "T D"], Float[Array, "T D"]]) -> Array:
        wanted, found = (
            jax.nn.log_softmax(m.logits(h), axis=-1)
            for m, h in zip((teacher, model), hidden, strict=True)
        )
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))

    return jnp.mean(jax.lax.map(of_window, hidden))


def tensors_in_codes(model: CausalLM) -> dict[str, QTensor]:
    """Those of a model by tree path."""
    flat = nnx.to_flat_state(nnx.state(model))
    values = {".".join(map(str, path)): variable.get_value() for path, variable in flat}
    return {path: value for path, value in values.items() if isinstance(value, QTensor)}


def format_of(tensor: QTensor) -> WeightFormat:
    """How a tensor is in codes."""
    return WeightFormat(tensor.bits, tensor.group_size, tensor.zero is None)


def start(tensor: QTensor) -> Start:
    """A tensor's codes, unpacked."""

    def wide(array: Any) -> Any:
        return None if array is None else array.astype(jnp.float32)

    values = jnp.asarray(unpacked(np.asarray(tensor.codes), tensor.inputs))
    return Start(Codes(values, wide(tensor.scale), wide(tensor.zero)), wide(tensor.input_scale))


@functools.partial(jax.jit, static_argnames=("format",))
def judged(
    weight: Float[Array, "*S O I"], start: Start, format: WeightFormat
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """||W - Q|| / ||W|| of codes Q, and the share of weights beyond the outermost levels.

    Weights are beyond them by more than half a step.
    """
    wide = weight.astype(jnp.float32)
    if start.input_scale is not None:
        wide = wide / start.input_scale[..., None, :]
    scale, zero = of_inputs(start.codes, format)
    place = wide / scale + zero
    outside = (place < -0.5) | (place > 2**format.bits - 0.5)
    missed = wide - dequantise(start.codes, format)
    if start.input_scale is not None:
        missed = missed * start.input_scale[..., None, :]
    norms = jnp.sqrt(jnp.sum(jnp.square(missed))), jnp.sqrt(jnp.sum(jnp.square(weight)))
    share = norms[0] / jnp.maximum(norms[1], 1e-30)
    return share, jnp.mean(outside.astype(jnp.float32))


def device_memory(config: QwenConfig, scheme: Scheme, windows: int, window: int) -> int:
    """Estimate of the bytes of device memory that a fit takes, activations included, roughly.

    Args:
        config: of the model.
        scheme: what is in codes.
        windows: of a step.
        window: tokens of one.
    """
    config = dataclasses.replace(config, dtype="float32")
    codes = sum(t.size for t in tensors(config) if t.path in scheme.tensors)
    both = sum(t.nbytes for t in (*tensors(config), *tensors(config, scheme)))
    return BYTES_A_CODE * codes + both + _activations(config, windows * window, window)


def active_weights(config: QwenConfig) -> int:
    """Weights that a token is multiplied with, the head's included."""
    return count_parameters(config).active


def _activations(config: QwenConfig, tokens: int, window: int) -> int:
    """Bytes of what a step keeps for its way back, and of the logits of one window."""
    active = active_weights(config) - config.vocab_size * config.hidden_size
    # Of a layer the residual stream, widths of products, which go as the root of its weights, and
    # those of all experts where they are computed. How many of each there are, XLA says of the demo
    # model compiled for an H200, and for a CPU.
    layers, dense = range(config.num_hidden_layers), pays_dense(config)
    roots = (3 if dense else 8) * math.sqrt(active / len(layers))
    widths = len(layers) * (24 * config.hidden_size + roots)
    for layer in filter(config.is_sparse, layers if dense else ()):
        widths += 4 * config.num_experts * config.width("moe_intermediate_size", layer)
    size = 8 if jax.default_backend() == "cpu" else 4
    return int(size * tokens * widths + 32 * window * config.vocab_size)


class _Progress:
    """Tells now and then how far a fit has come."""

    def __init__(self, steps: int, tell: Callable[[str], None]) -> None:
        self._steps, self._tell = steps, tell
        self._begin = time.monotonic()

    def step(self, number: int, loss: Array) -> None:
        """See `fit_codes`; waits for the loss where it is told."""
        if number == 1:
            jax.block_until_ready(loss)  # compiled only now
            self._begin = time.monotonic()
            return
        if number % max(1, self._steps // _TOLD) and number != self._steps:
            return
        value = float(loss)
        left = (time.monotonic() - self._begin) / (number - 1) * (self._steps - number)
        self._tell(f"step {number} of {self._steps}: KL {value:.4f}, {left:.0f} s to go")
