"""How fast a model runs: the measurement of `qwen-jax bench` and `benchmarks/bench.py`.

It needs none of the libraries that the command line brings.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..accounting import FLOATS, cache_bytes, tensors, weight_bytes
from ..cache import Cache, init_cache
from ..checkpoint.plan import plan_load
from ..checkpoint.safetensors_io import open_folder
from ..compile_time import compile_seconds
from ..config import QwenConfig
from ..configuration.families import WIDTHS
from ..decode import DecodeState, prefill_prompts, start
from ..decode.loop import raise_on_failure, run_steps
from ..errors import RequestError
from ..loading import load
from ..memory import peak_memory, refuse_unless_fits
from ..model import CausalLM, FlatModel, initialise, parameter_shapes
from ..quant import Scheme, named_recipe, scheme_of
from .bench_request import BenchRequest
from .loading import choose_dtype
from .shape import Shape, find_shape

Note = Callable[[str], None]


@dataclasses.dataclass
class Samples:
    """Seconds of each measured event.

    Attributes:
        prefill: all prompts through the model, until their logits are there.
        first_token: the same, and the first token of each row drawn and read by the host.
        step: one decode step as a call of its own, its token awaited.
        loop: a whole generation but its first token in one call, divided by its steps.
    """

    prefill: list[float] = dataclasses.field(default_factory=list)
    first_token: list[float] = dataclasses.field(default_factory=list)
    step: list[float] = dataclasses.field(default_factory=list)
    loop: list[float] = dataclasses.field(default_factory=list)


def measure(request: BenchRequest, note: Note) -> dict[str, Any]:
    """Measure one model.

    Args:
        request: what to measure.
        note: told what is going on.

    Returns:
        Figures by name, ready for JSON. Times are in seconds.

    Raises:
        RequestError: a preset without `dummy`, or layers that the model does not have.
        CheckpointError: the folder's weights are missing, damaged, of a foreign quantised format,
            or another model's.
        MemoryLimitError: weights and cache cannot fit; nothing was loaded.
    """
    shape = find_shape(request.model, request.revision, weights=not request.dummy)
    config, scheme = _configuration(shape, request, note)
    weights = weight_bytes(config, scheme)
    cache = cache_bytes(config, request.batch_size, request.length, request.kv_cache_dtype)
    needed = weights + max(cache, _working_bytes(config, scheme) if request.dummy else 0)
    stored = scheme.described(config.dtype)
    refuse_unless_fits(needed, f"{request.model} in {stored} with a cache of {cache / 1e9:.2f} GB")
    begin = time.perf_counter()
    model = _model(shape, config, request, note)
    made = time.perf_counter() - begin
    bench = _Bench(model, request)

    note("compiling ...")
    before = compile_seconds()
    bench.trial(Samples())
    compiled = compile_seconds() - before
    note(f"compiled in {compiled:.1f} s")
    samples = Samples()
    for number in range(request.num_trials):
        bench.trial(samples)
        note(f"trial {number + 1} of {request.num_trials}: {samples.loop[-1] * 1e3:.3f} ms a token")
    return {
        "model": {
            "name": request.model,
            "type": config.model_type,
            "num_layers": config.num_hidden_layers,
        }
        | {"dtype": config.dtype, "weights": "random" if request.dummy else "loaded"}
        | {"recipe": scheme.recipe or None, "bits": scheme.bits},
        **_figures(samples, request),
        "weight_bytes": weights,
        "cache_bytes": cache,
        "peak_memory_bytes": peak_memory(),
        "compile_seconds": compiled,
        "weights_ready_seconds": made,
    }


def _configuration(shape: Shape, request: BenchRequest, note: Note) -> tuple[QwenConfig, Scheme]:
    if shape.folder is None and not request.dummy:
        raise RequestError(
            f"{shape.name} names a shape, which has no weights; add --dummy for random ones"
        )
    config, scheme = shape.config, FLOATS
    if shape.folder is not None and not request.dummy:
        plan = plan_load(open_folder(shape.folder), config)
        config, scheme = plan.config, plan.scheme
    if request.num_layers is not None:
        if not request.dummy:
            raise RequestError("num_layers cuts a model of random weights; add --dummy")
        config = first_layers(config, request.num_layers)
    config = dataclasses.replace(
        config,
        dtype=choose_dtype(config.dtype, request.dtype, note),
        implementation=request.implementation,
    )
    if request.recipe is not None:
        scheme = scheme_of(parameter_shapes(config), named_recipe(request.recipe))
    return config, scheme


def first_layers(config: QwenConfig, count: int) -> QwenConfig:
    """The configuration with only its first layers.

    Raises:
        RequestError: more layers than it has.
    """
    if count > config.num_hidden_layers:
        raise RequestError(f"num_layers is {count}; the model has {config.num_hidden_layers}")
    listed = {
        name: getattr(config, name) for name in WIDTHS if isinstance(getattr(config, name), tuple)
    }
    return dataclasses.replace(
        config,
        num_hidden_layers=count,
        layer_types=config.layer_types[:count],
        mlp_only_layers=tuple(layer for layer in config.mlp_only_layers if layer < count),
        **{name: value[:count] for name, value in listed.items()},
    )


def _model(shape: Shape, config: QwenConfig, request: BenchRequest, note: Note) -> CausalLM:
    if request.dummy or shape.folder is None:
        recipe = None if request.recipe is None else named_recipe(request.recipe)
        note("making random weights")
        model = initialise(config, jax.random.key(0), recipe)
    else:
        note(f"loading {request.model}")
        model, _ = load(shape.folder, dtype=config.dtype, implementation=config.implementation)
    return jax.block_until_ready(model)


def _working_bytes(config: QwenConfig, scheme: Scheme) -> int:
    """Memory beside the model while random weights are made.

    Counted on a host only, where running out of memory is no error but the end of the process.
    """
    if jax.default_backend() != "cpu":
        return 0
    return 3 * max(tensor.nbytes for tensor in tensors(config, scheme))


class _Bench:
    """One model and the prompts to run through it."""

    def __init__(self, model: CausalLM, request: BenchRequest) -> None:
        self._model = model
        self._flat = FlatModel.of(model)
        self._request = request
        shape = (request.batch_size, request.prompt_tokens)
        self._prompts = (
            np.random.default_rng(0).integers(0, model.config.vocab_size, shape).tolist()
        )

    def trial(self, samples: Samples) -> None:
        """Generate twice from the prompts: in single steps, and in one call."""
        steps = self._request.generation_tokens - 1
        state, cache = self._begin(samples)
        for _ in range(steps):
            begin = time.perf_counter()
            state, cache = self._steps(state, cache, 1)
            samples.step.append(time.perf_counter() - begin)
        raise_on_failure(state, cache)
        del state, cache

        state, cache = self._begin(samples)
        begin = time.perf_counter()
        state, cache = self._steps(state, cache, steps)
        samples.loop.append((time.perf_counter() - begin) / steps)
        raise_on_failure(state, cache)

    def _begin(self, samples: Samples) -> tuple[DecodeState, Cache]:
        request = self._request
        cache = jax.block_until_ready(
            init_cache(
                self._model.config,
                request.batch_size,
                request.length,
                kv_cache_dtype=request.kv_cache_dtype,
            )
        )
        begin = time.perf_counter()
        logits, cache = prefill_prompts(
            self._model, cache, self._prompts, chunk_size=request.prefill_chunk_size
        )
        jax.block_until_ready((logits, cache))
        samples.prefill.append(time.perf_counter() - begin)
        state = start(
            logits,
            max_tokens=jnp.asarray(request.generation_tokens, jnp.int32),
            capacity=request.generation_tokens,
        )
        jax.device_get(state.last)
        samples.first_token.append(time.perf_counter() - begin)
        return state, cache

    def _steps(self, state: DecodeState, cache: Cache, steps: int) -> tuple[DecodeState, Cache]:
        state, cache = run_steps(self._flat, cache, state, max_steps=jnp.int32(steps))
        jax.device_get(state.last)
        return state, cache


def _figures(samples: Samples, request: BenchRequest) -> dict[str, Any]:
    rows = request.batch_size
    return {
        "prefill_seconds": spread(samples.prefill),
        "prefill_tokens_per_second": rows
        * request.prompt_tokens
        / float(np.median(samples.prefill)),
        "first_token_seconds": spread(samples.first_token),
        "inter_token_seconds": spread(samples.step),
        "loop_seconds_per_token": spread(samples.loop),
        "decode_tokens_per_second": rows / float(np.median(samples.loop)),
    }


def spread(values: list[float]) -> dict[str, float | int]:
    """Median, 99th percentile (interpolated) and number of measurements."""
    if not values:
        return {"median": math.nan, "p99": math.nan, "count": 0}
    return {
        "median": float(np.median(values)),
        "p99": float(np.percentile(values, 99)),
        "count": len(values),
    }
