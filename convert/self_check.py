"""One short forward pass through a folder, a layer in memory at a time, looking for NaN and inf."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qwen_jax.checkpoint.assemble import assemble, runs
from qwen_jax.checkpoint.parameters import abstract_parameters
from qwen_jax.checkpoint.plan import LoadPlan
from qwen_jax.config import QwenConfig
from qwen_jax.model.chunk import Chunk
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.model.layers import RMSNorm
from qwen_jax.model.rope import rotary

from .source import open_source

# Faults of recurrent layers have shown only from some token on.
TOKENS = 12

_RUN_BYTES = 64 << 20


def self_check(
    folder: Path, *, progress: Callable[[int], None] = lambda nbytes: None
) -> str | None:
    """Runs twelve tokens, spread over the vocabulary, through a model.

    Args:
        folder: the model's; codes are read as the numbers that they stand for.
        progress: called after each layer with the bytes of its weights.

    Returns:
        None if every value is finite, else where the first one is that is not: the layer, the
        token, and the layer's tensors that hold such values themselves.

    Raises:
        CheckpointError: the folder is damaged.
        ConfigError: the configuration is malformed or not implemented.
    """
    plan = open_source(folder, mtp=False).load
    config, weights = plan.config, _Weights(plan)
    tokens = np.linspace(0, config.vocab_size - 1, TOKENS).astype(int)
    x = jnp.asarray(np.stack([weights.row("embed_tokens.weight", id) for id in tokens])[None])
    fault = _fault("the embedding", x, weights.suspects("embed_tokens."))
    positions = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    count = jnp.full((1,), TOKENS, jnp.int32)
    chunk = Chunk(jnp.zeros_like(count), count, positions, rotary(config, positions))
    for i in range(config.num_hidden_layers):
        if fault is not None:
            return fault
        place = f"layers.{i}."
        layer = weights.fill(DecoderLayer(plan.config, i), place, progress)
        x = _run(layer, x, chunk)
        fault = _fault(f"layer {i} ({config.layer_types[i]})", x, weights.suspects(place))
    return fault or _check_head(plan.config, weights, x)


@jax.jit
def _run(layer: DecoderLayer, x: jax.Array, chunk: Chunk) -> jax.Array:
    return layer(x, None, chunk)[0]


def _check_head(config: QwenConfig, weights: _Weights, x: jax.Array) -> str | None:
    norm = RMSNorm(
        config.hidden_size,
        config.dtype,
        eps=config.rms_norm_eps,
        zero_centred=config.zero_centred_norm,
        implementation=config.implementation,
    )
    hidden = np.asarray(weights.fill(norm, "norm.", lambda nbytes: None)(x))
    fault = _fault("the final norm", hidden, weights.suspects("norm."))
    if fault is not None:
        return fault
    head = "embed_tokens." if config.tie_word_embeddings else "lm_head."
    for rows in weights.runs(f"{head}weight"):
        logits = hidden.astype(np.float32) @ rows.T
        fault = _fault("the output head", logits, weights.suspects(head))
        if fault is not None:
            return fault
    return None


def _fault(where: str, values: jax.Array | np.ndarray, suspects: Callable[[], list[str]]):
    """Says where values [1, T, ...] are not finite; None if they all are."""
    finite = np.isfinite(np.asarray(values)).reshape(values.shape[1], -1).all(axis=1)
    if finite.all():
        return None
    names = suspects()
    cause = f"; not finite themselves: {', '.join(names)}" if names else ""
    return f"{where}: the output is not finite from token {int(finite.argmin())} on{cause}"


class _Weights:
    """The tensors of a folder, read when they are needed."""

    def __init__(self, plan: LoadPlan) -> None:
        self._folder = plan.folder
        self._sources = {source.path: source for source in plan.sources}
        self._targets = abstract_parameters(plan.config)

    def row(self, path: str, number: int) -> np.ndarray:
        rows = slice(int(number), int(number) + 1)
        return assemble(self._folder, self._sources[path], np.dtype(np.float32), rows)[0]

    def runs(self, path: str):
        for rows in runs(self._folder, self._sources[path], _RUN_BYTES):
            yield assemble(self._folder, self._sources[path], np.dtype(np.float32), rows)

    def fill(self, module: nnx.Module, place: str, progress: Callable[[int], None]) -> nnx.Module:
        """Gives a fresh module its arrays."""
        for path, variable in nnx.to_flat_state(nnx.state(module)):
            name = place + ".".join(map(str, path))
            array = assemble(self._folder, self._sources[name], np.dtype(self._targets[name].dtype))
            variable.set_value(jnp.asarray(array))
            progress(array.nbytes)
            nnx.update(module, nnx.from_flat_state([(path, variable)]))
        return module

    def suspects(self, place: str) -> Callable[[], list[str]]:
        """The tensors under a place that hold values which are not finite."""

        def find() -> list[str]:
            paths = [path for path in self._sources if path.startswith(place)]
            return [
                path for path in paths if not all(np.isfinite(r).all() for r in self.runs(path))
            ]

        return find
