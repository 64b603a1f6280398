"""One model run in three ways, its programs compiled at once: for `benchmarks/accuracy.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import deprecation_expected
from qwen_jax.cache import Cache, init_cache
from qwen_jax.decode import DecodeState, decode_step, prefill, start
from qwen_jax.decode.loop import run_steps
from qwen_jax.decode.prompt import run_prefill
from qwen_jax.model import CausalLM, FlatModel, whole
from qwen_jax.quant import QTensor

PATHS = ("float32", "reference", "kernels")
# No choice among products for the reference: each of them is right, and it compiles faster.
QUICK = {"xla_gpu_autotune_level": 0}
THREADS = min(14, os.cpu_count() or 1)
LOOP = 16
"""New tokens of a loop."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Shapes of a batch.

    Attributes:
        rows: sequences.
        width: tokens that prompts are padded to.
        room: tokens of a row of the cache.
    """

    rows: int
    width: int
    room: int

    def padded(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [rows, width] and lengths [rows], int32; longer prompts are cut."""
        tokens = np.zeros((self.rows, self.width), np.int32)
        lengths = np.zeros(self.rows, np.int32)
        for row, prompt in enumerate(prompts):
            lengths[row] = min(len(prompt), self.width)
            tokens[row, : lengths[row]] = prompt[: self.width]
        return tokens, lengths


Call = tuple[str, str, Batch]
"""Path, what is called ("logits", "prompt", "step", "loop"), and shapes."""


@functools.partial(jax.jit, donate_argnames="cache")
def _logits(
    flat: FlatModel, cache: Cache, tokens: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> tuple[Float[Array, "B T V"], Cache]:
    output, cache = prefill(whole(flat), cache, tokens, lengths, all_logits=True)
    return output.logits, cache


# The cache is not donated: all paths step from the same one.
@jax.jit
def _step(
    flat: FlatModel, cache: Cache, tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], Cache]:
    output, cache = decode_step(whole(flat), cache, tokens)
    return output.logits, cache


def started(logits: Float[Array, "B V"]) -> DecodeState:
    """Greedy generation of `LOOP` tokens a row; the first is chosen here."""
    return start(logits, max_tokens=jnp.asarray(LOOP, jnp.int32), capacity=LOOP)


def widened(tree: Any) -> Any:
    """A tree with its bfloat16 arrays in float32; codes, and scales of codes, stay."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, QTensor) or leaf.dtype != jnp.bfloat16:
            return leaf
        return leaf.astype(jnp.float32)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def _copied(model: CausalLM, change: Callable[[Any], Any], **settings: Any) -> CausalLM:
    copy = CausalLM(dataclasses.replace(model.config, **settings))
    state = [
        (path, variable.replace(change(variable.get_value())))
        for path, variable in nnx.to_flat_state(nnx.state(model))
    ]
    nnx.update(copy, nnx.from_flat_state(state))
    return copy


class Runs:
    """A model by kernels, by the reference, and by the reference in float32.

    Attributes:
        models: by path.
        flat: their arrays, as programs take them.
    """

    def __init__(self, model: CausalLM) -> None:
        self.models = {
            "kernels": model,
            "reference": _copied(model, lambda value: value, implementation="reference"),
            # The same codes too, but everything else that was rounded to bfloat16 is not.
            "float32": _copied(model, widened, implementation="reference", dtype="float32"),
        }
        self.flat = {path: FlatModel.of(each) for path, each in self.models.items()}
        self._programs: dict[Call, Callable[..., Any]] = {}

    def compile(self, calls: Iterable[Call]) -> None:
        """Compiles these calls side by side; what is not compiled cannot be called."""
        calls = [call for call in dict.fromkeys(calls) if call not in self._programs]
        # Filters of warnings are the process's, so they are set around all threads.
        with deprecation_expected(), ThreadPoolExecutor(THREADS) as pool:
            self._programs |= dict(zip(calls, pool.map(self._compiled, calls), strict=True))

    def _compiled(self, call: Call) -> Callable[..., Any]:
        path, what, batch = call
        function, arguments, keywords = self._lowered(what, path, batch)
        # Products of the float32 path are in float32, not in TF32.
        precision = jax.default_matmul_precision("highest")
        with precision if path == "float32" else contextlib.nullcontext():
            lowered = function.lower(self.flat[path], *arguments, **keywords)
            return lowered.compile(compiler_options=None if path == "kernels" else QUICK)

    def _lowered(self, what: str, path: str, batch: Batch) -> tuple[Any, tuple[Any, ...], dict]:
        def ids(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        config = self.models[path].config
        cache = jax.eval_shape(lambda: init_cache(config, batch.rows, batch.room))
        if what == "step":
            return _step, (cache, ids(batch.rows)), {}
        if what == "loop":
            logits = jax.ShapeDtypeStruct((batch.rows, config.vocab_size), jnp.float32)
            state = jax.eval_shape(started, logits)
            return run_steps, (cache, state), {"max_steps": ids()}
        function = {"logits": _logits, "prompt": run_prefill}[what]
        return function, (cache, ids(batch.rows, batch.width), ids(batch.rows)), {}

    def logits(
        self, path: str, batch: Batch, prompts: Sequence[np.ndarray]
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Logits of all tokens, padding included, and the cache behind the prompts."""
        cache = init_cache(self.models[path].config, batch.rows, batch.room)
        program = self._programs[path, "logits", batch]
        return program(self.flat[path], cache, *batch.padded(prompts))

    def prompt(
        self, path: str, batch: Batch, prompts: Sequence[np.ndarray]
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Logits behind each prompt's last token, and the cache."""
        cache = init_cache(self.models[path].config, batch.rows, batch.room)
        program = self._programs[path, "prompt", batch]
        output, cache = program(self.flat[path], cache, *batch.padded(prompts))
        return output.logits, cache

    def step(
        self, path: str, batch: Batch, cache: Cache, tokens: Int[Array, " B"]
    ) -> tuple[Float[Array, "B V"], Cache]:
        """One token of each row."""
        return self._programs[path, "step", batch](self.flat[path], cache, tokens)

    def loop(
        self, path: str, batch: Batch, cache: Cache, state: DecodeState
    ) -> tuple[DecodeState, Cache]:
        """All tokens that `started` left to make, in one call; cache and state are donated."""
        program = self._programs[path, "loop", batch]
        return program(self.flat[path], cache, state, max_steps=jnp.int32(LOOP - 1))
