"""What calibration tokens say about the inputs of each matrix of a layer.

The layer runs as it is, on the tokens' residual stream; its linears and experts are replaced,
inside a traced function, by ones that also remember what came in.

Letters: N windows, M = N T tokens, R rows of an expert, C experts at a time, I inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from qwen_jax.config import QwenConfig
from qwen_jax.model.chunk import Chunk
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.model.layers import Linear
from qwen_jax.model.moe import Experts
from qwen_jax.model.rope import rotary

# Weight of a row that the router did not send to an expert, beside one that it sent.
NOT_SENT = 0.1


class _Recorder:
    """Stands in a module's place, remembers its arguments, and runs it."""

    def __init__(self, module: Any, calls: dict[str, tuple[Any, ...]], path: str):
        self._module, self._calls, self._path = module, calls, path

    def __call__(self, *arguments: Any) -> Any:
        self._calls[self._path] = arguments
        return self._module(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def stages(layer: DecoderLayer, config: QwenConfig) -> list[tuple[str, ...]]:
    """Paths of the linears and the experts that read the same array, in the order of data flow.

    Found by tracing the layer, so that no kind of layer has a list of its own.
    """
    groups: dict[int, list[str]] = {}

    def trace(layer: DecoderLayer, x: Array) -> Array:
        # All arrays live until here, so that no two of them share an id.
        calls, y = _recorded(layer, config, x)
        for path, arguments in calls.items():
            groups.setdefault(id(arguments[0]), []).append(path)
        return y

    shape = jax.ShapeDtypeStruct((1, 2, config.hidden_size), jnp.float32)
    jax.eval_shape(trace, layer, shape)
    return [tuple(paths) for paths in groups.values()]


def advance(
    layer: DecoderLayer,
    config: QwenConfig,
    hidden: Float[np.ndarray, "N T D"],
    *,
    windows_at_once: int = 8,
) -> Float[np.ndarray, "N T D"]:
    """The residual stream behind the layer, float32 on the host.

    Args:
        layer: as it is to be run: matrices in codes, or the numbers that they stand for.
        config: of the model.
        hidden: the residual stream in front of it.
        windows_at_once: in one forward pass; bounds device memory.
    """
    after, start = np.empty(hidden.shape, np.float32), 0
    for x in _batches(hidden, windows_at_once):
        after[start : start + len(x)] = _forward(layer, config, x)
        start += len(x)
    return after


def hessian_of_inputs(
    layer: DecoderLayer,
    config: QwenConfig,
    hidden: Float[np.ndarray, "N T D"],
    path: str,
    *,
    windows_at_once: int = 8,
) -> Float[Array, "I I"]:
    """Mean of x x^T over the inputs x of the linear at `path`, e.g. "self_attn.q_proj"."""
    inputs = at(layer, path).weight.shape[1]
    total = jnp.zeros((inputs, inputs), jnp.float32)
    for x in _batches(hidden, windows_at_once):
        total = _add_batch(layer, config, path, total, x)
    return total / float(hidden.shape[0] * hidden.shape[1])


class ExpertInputs(NamedTuple):
    """What the experts of a layer read, on the device.

    Attributes:
        inputs: float32 [M, D].
        weights: float32 [M, E], what the router weighs an expert's output with; for experts that it
            does not choose, as if they were added to those that it chooses.
        sent: [M, E], whether the router chooses the expert.
    """

    inputs: Float[Array, "M D"]
    weights: Float[Array, "M E"]
    sent: Bool[Array, "M E"]


class ExpertRows(NamedTuple):
    """The rows that some experts are calibrated with.

    Attributes:
        inputs: float32 [C, R, I].
        weights: float32 [C, R], of the rows.
        sent: int32 [C], how many of the rows the router sent.
    """

    inputs: Float[Array, "C R I"]
    weights: Float[Array, "C R"]
    sent: Int[Array, " C"]


def expert_inputs(
    layer: DecoderLayer,
    config: QwenConfig,
    hidden: Float[np.ndarray, "N T D"],
    path: str,
    *,
    windows_at_once: int = 8,
) -> ExpertInputs:
    """Of the experts at `path`, over all tokens; 4 M (D + 1.25 E) bytes."""
    batches = _batches(hidden, windows_at_once)
    parts = [_expert_batch(layer, config, path, x) for x in batches]
    return ExpertInputs(*(jnp.concatenate(part) for part in zip(*parts, strict=True)))


@functools.partial(jax.jit, static_argnames=("rows",))
def rows_of_experts(data: ExpertInputs, experts: Int[Array, " C"], rows: int) -> ExpertRows:
    """Each expert's rows with the largest weights, those that the router sent before all others.

    So an expert that the router hardly chooses has as many rows as any other: those that come
    closest to being sent to it.

    Args:
        data: of all tokens.
        experts: numbers of the experts.
        rows: R; at most M.
    """
    weights, sent = data.weights[:, experts].T, data.sent[:, experts].T
    _, index = jax.lax.top_k(jnp.where(sent, 1e6, 0.0) + weights, rows)
    mine = jnp.take_along_axis(sent, index, axis=1)
    strength = jnp.take_along_axis(weights, index, axis=1)
    strength = jnp.where(mine, strength, NOT_SENT * strength)
    return ExpertRows(data.inputs[index], strength, jnp.sum(mine.astype(jnp.int32), axis=1))


@jax.jit
def hessian_of_rows(rows: ExpertRows) -> Float[Array, "C I I"]:
    """Weighted mean of x x^T of each expert's rows; zero where all weights are."""
    total = jnp.maximum(jnp.sum(rows.weights, axis=1), 1e-30)
    heavy = rows.inputs * (rows.weights / total[:, None])[..., None]
    return jnp.einsum("cri,crj->cij", rows.inputs, heavy, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def rows_between(rows: ExpertRows, gate_up_proj: Float[Array, "C F2 D"]) -> ExpertRows:
    """The same rows as the experts' second product reads them."""
    exact = jax.lax.Precision.HIGHEST
    both = jnp.einsum("crd,cfd->crf", rows.inputs, gate_up_proj, precision=exact)
    gate, up = jnp.split(both, 2, axis=-1)
    return rows._replace(inputs=jax.nn.silu(gate) * up)


def at(module: Any, path: str | Sequence[str]) -> Any:
    """What is at a tree path: a module or a parameter."""
    parts = path.split(".") if isinstance(path, str) else path

    def child(parent: Any, part: str) -> Any:
        return parent[int(part)] if part.isdigit() else getattr(parent, part)

    return functools.reduce(child, parts, module)


def _recorded(
    layer: DecoderLayer, config: QwenConfig, x: Float[Array, "B T D"]
) -> tuple[dict[str, tuple[Any, ...]], Array]:
    """The arguments of each linear and of the experts, by path in order of calls, and the output.

    For traced functions: what is not used of it costs nothing there.
    """
    calls: dict[str, tuple[Any, ...]] = {}
    layer = nnx.clone(layer)
    for path, module in [*nnx.iter_modules(layer)]:
        if isinstance(module, Linear | Experts):
            parts = [str(part) for part in path]
            recorder = _Recorder(module, calls, ".".join(parts))
            setattr(at(layer, parts[:-1]), parts[-1], recorder)
    return calls, run(layer, config, x)


def run(layer: DecoderLayer, config: QwenConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The layer over whole windows, for traced functions; products are exact on a GPU too."""
    batch, length, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    start, lengths = (jnp.full((batch,), n, jnp.int32) for n in (0, length))
    chunk = Chunk(start, lengths, positions, rotary(config, positions))
    with jax.default_matmul_precision("highest"):
        return layer(x, None, chunk)[0]


def _batches(hidden: np.ndarray, size: int) -> Iterator[Array]:
    for start in range(0, len(hidden), size):
        yield jnp.asarray(hidden[start : start + size], jnp.float32)


@functools.partial(jax.jit, static_argnames=("config",))
def _forward(layer: DecoderLayer, config: QwenConfig, x: Float[Array, "B T D"]) -> Array:
    return run(layer, config, x)


@functools.partial(jax.jit, static_argnames=("config", "path"))
def _add_batch(
    layer: DecoderLayer, config: QwenConfig, path: str, total: Array, x: Float[Array, "B T D"]
) -> Array:
    inputs = _recorded(layer, config, x)[0][path][0]
    inputs = inputs.reshape(-1, inputs.shape[-1]).astype(jnp.float32)
    return total + jnp.matmul(inputs.T, inputs, precision=jax.lax.Precision.HIGHEST)


@functools.partial(jax.jit, static_argnames=("config", "path"))
def _expert_batch(
    layer: DecoderLayer, config: QwenConfig, path: str, x: Float[Array, "B T D"]
) -> ExpertInputs:
    inputs, routing = _recorded(layer, config, x)[0][path]
    probabilities = jax.nn.softmax(routing.logits, axis=-1)
    experts = jnp.arange(probabilities.shape[-1], dtype=jnp.int32)
    sent = jnp.any(routing.ids[..., None] == experts[None, None, None], axis=-2)
    total = jnp.sum(jnp.where(sent, probabilities, 0.0), axis=-1, keepdims=True)
    arrays = (inputs.astype(jnp.float32), probabilities / total, sent)
    return ExpertInputs(*(array.reshape(-1, array.shape[-1]) for array in arrays))
