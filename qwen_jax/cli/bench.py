"""`qwen-jax bench`: how fast a model runs here."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from .bench_request import BenchRequest
from .console import Notes, accept_any_text, write_json
from .options import DType, Kernels, KVCacheDType, MaybeWhole, Switch, Text, Whole, own_if_auto


def bench(
    model: str,
    *,
    revision: Text = None,
    dummy: Switch = False,
    prompt_tokens: Whole = 512,
    generation_tokens: Whole = 128,
    batch_size: Whole = 1,
    num_trials: Whole = 5,
    recipe: Text = None,
    num_layers: MaybeWhole = None,
    max_model_len: MaybeWhole = None,
    prefill_chunk_size: MaybeWhole = None,
    dtype: DType | None = None,
    implementation: Kernels | None = None,
    kv_cache_dtype: KVCacheDType = "auto",
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> None:
    """Measure prefill, first-token and inter-token times: greedy, compilation apart.

    Besides: the bytes that a step must move and their share of what a plain copy moves here; on a
    GPU where the time goes, from a profile taken behind the measured trials; and what a start
    takes. Compiled programs are kept in ~/.cache/qwen-jax/xla, so that a second run is a warm
    start; JAX_ENABLE_COMPILATION_CACHE=false keeps none and finds none.

    Args:
        model: a model folder, demo, the id of a model on the Hub (organisation/name), or the
            name of a released shape with --dummy.
        revision: branch, tag or commit of a Hub model; the main branch by default.
        dummy: random weights, made on the device.
        prompt_tokens: tokens of each prompt (512 by default).
        generation_tokens: new tokens of each row (128 by default).
        batch_size: rows (1 by default).
        num_trials: repetitions (5 by default).
        recipe: put the random weights of --dummy into codes, as this recipe has it: q3, q3-small,
            q4, q8 or experts-only.
        num_layers: only so many layers of the model, from the first on; needs --dummy.
        max_model_len: tokens a row that the cache has room for; prompt and new tokens by default.
        prefill_chunk_size: most prompt tokens a row in one forward pass (by default 512, and on a
            GPU up to 8192, as its memory and the batch allow).
        dtype: of weights and activations; the model's own by default, float32 on a CPU.
        implementation: run every operation so, or fail: reference (plain JAX) or triton (GPU
            kernels); by default each call runs on the first that takes it.
        kv_cache_dtype: int8 keeps keys and values as int8 codes; auto (the default) in the model's
            dtype.
        json: write one JSON object, fit to be kept.
        quiet: write nothing to standard error but errors and warnings.
    """
    accept_any_text()
    request = BenchRequest(
        model=model,
        revision=revision,
        dummy=dummy,
        prompt_tokens=prompt_tokens,
        generation_tokens=generation_tokens,
        batch_size=batch_size,
        num_trials=num_trials,
        recipe=recipe,
        num_layers=num_layers,
        max_model_len=max_model_len,
        prefill_chunk_size=prefill_chunk_size,
        dtype=dtype,
        implementation=implementation,
        kv_cache_dtype=own_if_auto(kv_cache_dtype),
    )
    from .report import as_text, run_bench

    result = run_bench(request, Notes(quiet=quiet), ["qwen-jax", "bench"])
    if json:
        write_json(result)
    else:
        print(as_text(result))
