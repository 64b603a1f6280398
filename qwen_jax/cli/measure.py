"""How fast a model runs: the measurement of `qwen-jax bench` and `benchmarks/bench.py`.

It needs none of the libraries that the command line brings.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from ..accounting import (
    FLOATS,
    bytes_per_step,
    cache_bytes,
    distinct_experts,
    tensors,
    weight_bytes,
)
from ..checkpoint.plan import plan_load
from ..checkpoint.safetensors_io import open_folder
from ..compile_time import compile_time
from ..config import QwenConfig
from ..configuration.families import WIDTHS
from ..errors import RequestError
from ..loading import load
from ..memory import peak_memory, refuse_unless_fits
from ..model import CausalLM, initialise, parameter_shapes
from ..quant import Scheme, named_recipe, scheme_of
from .bandwidth import copy_bytes_per_second, copy_size
from .bench_request import BenchRequest
from .flags import about
from .kernel_profile import absence
from .loading import choose_dtype
from .shape import Shape, find_shape
from .start_up import compilation, process_seconds
from .trials import Samples, Trials, figures_of

Note = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model that is there to be measured.

    Attributes:
        model: with its weights on the device.
        config: as it was asked for.
        scheme: how the weights are stored.
        seconds: that making or loading them took.
        began: seconds from the start of the process until then.
    """

    model: CausalLM
    config: QwenConfig
    scheme: Scheme
    seconds: float
    began: float


def prepare(request: BenchRequest, note: Note) -> Prepared:
    """Make or load the model of a request.

    Args:
        request: what to measure.
        note: told what is going on.

    Raises:
        RequestError: a preset without `dummy`, or layers that the model does not have.
        CheckpointError: the folder's weights are missing, damaged, of a foreign quantised format,
            or another model's.
        MemoryLimitError: weights and cache cannot fit; nothing was loaded.
    """
    shape, config, scheme = configuration(request, note)
    cache = cache_bytes(config, request.batch_size, request.length, request.kv_cache_dtype)
    working = _working_bytes(config, scheme) if request.dummy else 0
    stored = scheme.described(config.dtype)
    refuse_unless_fits(
        weight_bytes(config, scheme) + max(cache, working),
        f"{request.model} in {stored} with a cache of {cache / 1e9:.2f} GB",
    )
    began, begin = process_seconds(), time.perf_counter()
    model = _model(shape, config, request, note)
    return Prepared(model, config, scheme, time.perf_counter() - begin, began)


def measure(request: BenchRequest, note: Note, prepared: Prepared | None = None) -> dict[str, Any]:
    """Measure one model.

    Args:
        request: what to measure.
        note: told what is going on.
        prepared: its model, where that is there from another request; see `prepare`, which makes
            it if None. `start_seconds` then means nothing.

    Returns:
        Figures by name, ready for JSON. Times are in seconds.

    Raises:
        RequestError, CheckpointError: see `prepare`.
        MemoryLimitError: weights or cache cannot fit.
    """
    there = prepare(request, note) if prepared is None else prepared
    config, scheme = there.config, there.scheme
    cache = cache_bytes(config, request.batch_size, request.length, request.kv_cache_dtype)
    refuse_unless_fits(cache, f"the cache of {request.model}")
    trials = Trials(there.model, request)

    note("compiling ...")
    before, first = compile_time(), Samples()
    trials.trial(first)
    compiled = compilation(before, compile_time())
    note(f"compiled in {compiled['seconds']:.1f} s, from a {compiled['start']} start")
    samples = Samples()
    for number in range(request.num_trials):
        trials.trial(samples)
        note(f"trial {number + 1} of {request.num_trials}: {samples.loop[-1] * 1e3:.3f} ms a token")
    peak, figures = peak_memory(), figures_of(samples, request)
    return {
        "model": {
            "name": request.model,
            "type": config.model_type,
            "num_layers": config.num_hidden_layers,
        }
        | {"dtype": config.dtype, "weights": "random" if request.dummy else "loaded"}
        | {"recipe": scheme.recipe or None, "bits": scheme.bits},
        **figures,
        "weight_bytes": weight_bytes(config, scheme),
        "cache_bytes": cache,
        "peak_memory_bytes": peak,
        "compile_seconds": compiled["seconds"],
        "compilation": compiled,
        "weights_ready_seconds": there.seconds,
        "start_seconds": there.began + first.from_prompt[0],
        "experts": _experts(config, request),
        "limit": _limit(config, scheme, request, figures),
        "profile": _profile(trials, samples, note),
    }


def _limit(
    config: QwenConfig,
    scheme: Scheme,
    request: BenchRequest,
    figures: dict[str, Any],
) -> dict[str, Any]:
    """Bytes that a step must move, halfway through the generation, and their share of the copy."""
    context = request.prompt_tokens + request.generation_tokens // 2
    parts = bytes_per_step(config, request.batch_size, context, scheme, request.kv_cache_dtype)
    rate = sum(parts.values()) / figures["loop_seconds_per_token"]["median"]
    copied = copy_size()
    bandwidth = copy_bytes_per_second(copied)
    return {
        "bytes_per_step": sum(parts.values()),
        "parts": parts,
        "context": context,
        "copied_bytes": copied,
        "copy_bytes_per_second": bandwidth,
        "share": rate / bandwidth,
    }


def _experts(config: QwenConfig, request: BenchRequest) -> dict[str, Any] | None:
    """How many experts a step is counted with; None without any."""
    if not any(map(config.is_sparse, range(config.num_hidden_layers))):
        return None
    return {
        "experts": config.num_experts,
        "per_token": config.num_experts_per_tok,
        "expected_distinct": distinct_experts(config, request.batch_size),
    }


def _profile(trials: Trials, samples: Samples, note: Note) -> dict[str, Any]:
    if (reason := absence()) is not None:
        return {"absent": reason}
    note("profiling ...")
    try:
        return trials.profile(samples)
    except RuntimeError as error:
        # What was measured before is not lost for it.
        return {"absent": f"the profiler failed: {error}"}


def configuration(request: BenchRequest, note: Note) -> tuple[Shape, QwenConfig, Scheme]:
    """The shape that a request names, its configuration as it is to run, and its weights' form.

    Args:
        request: what to measure.
        note: told where the dtype is not the model's.

    Raises:
        RequestError, CheckpointError: see `prepare`.
    """
    shape = find_shape(request.model, request.revision, weights=not request.dummy)
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
            raise RequestError("--num-layers cuts a model of random weights; add --dummy")
        with about("--num-layers"):
            config = first_layers(config, request.num_layers)
    if request.max_model_len is None and request.length > config.max_position_embeddings:
        raise RequestError(
            f"--prompt-tokens {request.prompt_tokens} and --generation-tokens "
            f"{request.generation_tokens} need {request.length}, but the context of {shape.name} "
            f"is {config.max_position_embeddings} tokens; lower them, or go beyond it with "
            "--max-model-len"
        )
    config = dataclasses.replace(
        config,
        dtype=choose_dtype(config.dtype, request.dtype, note),
        implementation=request.implementation,
    )
    if request.recipe is not None:
        scheme = scheme_of(parameter_shapes(config), named_recipe(request.recipe))
    return shape, config, scheme


def first_layers(config: QwenConfig, count: int) -> QwenConfig:
    """The configuration with only its first layers.

    Raises:
        RequestError: more layers than it has.
    """
    if count > config.num_hidden_layers:
        has = config.num_hidden_layers
        raise RequestError(f"{count} layers of a model that has {has}; accepted are 1 to {has}")
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
