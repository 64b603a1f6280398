"""`qwen-jax inspect`: what a model is and costs, from its configuration and file headers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import CheckpointError, RequestError
from ..quant.scheme import Scheme
from .console import accept_any_text, scaled, size, table, write_json
from .loading import choose_dtype
from .options import DType, Kernels, KVCacheDType, Switch, Text, Whole, own_if_auto
from .shape import Shape, find_shape, parse_size

if TYPE_CHECKING:
    from ..config import QwenConfig


def inspect(
    model: str,
    *,
    revision: Text = None,
    memory: str | None = None,
    batch_size: Whole = 1,
    recipe: Text = None,
    dtype: DType | None = None,
    kernels: Switch = False,
    device: Literal["h200"] | None = None,
    implementation: Kernels | None = None,
    kv_cache_dtype: KVCacheDType = "auto",
    json: Switch = False,
) -> None:
    """Say what a model is and what it costs, without loading it.

    Args:
        model: a model folder, demo, the id of a model on the Hub (organisation/name), of which
            no weights are fetched, or the name of a released shape such as qwen3.6-35b-a3b.
        revision: branch, tag or commit of a Hub model; the main branch by default.
        memory: what context fits in this memory: 24GB, 22.5GiB, 800MB, or a number of bytes.
        batch_size: sequences at a time (1 by default), for --memory and --kernels.
        recipe: count the weights of a shape as this recipe puts them into codes: q3, q3-small,
            q4, q8 or experts-only.
        dtype: count weights and cache in this dtype; the model's own by default.
        kernels: say what runs each operation of a prefill and a decode step, and why not others.
        device: for --kernels, the device that they would run on; this machine's by default.
        implementation: for --kernels, the one that every operation is asked for.
        kv_cache_dtype: count keys and values as int8; auto (the default) in the model's dtype.
        json: write one JSON object.
    """
    accept_any_text()
    budget = None if memory is None else parse_size(memory, "--memory")
    if batch_size < 1:
        raise RequestError(f"--batch-size is {batch_size}; accepted is a whole number from 1 on")
    if not kernels and (device or implementation):
        raise RequestError("--device and --implementation are read by --kernels alone; add it")
    shape = find_shape(model, revision, weights=False)
    config, files, scheme = shape.config, None, Scheme()
    if shape.folder is not None:
        files, config, scheme = _holdings(shape.folder, config, fetched=shape.fetched)
    if recipe is not None:
        scheme = _scheme_of(shape, config, recipe)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    kv_dtype = own_if_auto(kv_cache_dtype)
    report = {
        "model": model,
        "config": config.to_hf(),
        "cost": _cost(config, scheme, kv_dtype),
        "fit": None if budget is None else _fit(config, scheme, budget, batch_size, kv_dtype),
        "folder": files,
    }
    if kernels:
        if device is None:
            # As generate and bench would run it here.
            config = dataclasses.replace(
                config, dtype=choose_dtype(config.dtype, dtype, lambda note: None)
            )
        report["kernels"] = _kernels(config, scheme, batch_size, kv_dtype, device, implementation)
    if json:
        write_json(report)
    else:
        print(_as_text(shape, config, report))


def _scheme_of(shape: Shape, config: QwenConfig, recipe: str) -> Scheme:
    from ..model import parameter_shapes
    from ..quant import named_recipe, scheme_of

    if shape.folder is not None:
        raise RequestError(
            "--recipe is for the name of a shape; of a folder, qwen-jax quantize --dry-run says "
            "what a recipe would make"
        )
    return scheme_of(parameter_shapes(config), named_recipe(recipe))


def _kernels(
    config: QwenConfig,
    scheme: Scheme,
    batch_size: int,
    kv_cache_dtype: str | None,
    device: str | None,
    implementation: str | None,
) -> dict[str, Any]:
    from .kernels import kernels

    config = dataclasses.replace(config, implementation=implementation)
    return kernels(config, scheme, batch_size, kv_cache_dtype, device)


def _cost(config: QwenConfig, scheme: Scheme, kv_cache_dtype: str | None) -> dict[str, Any]:
    from .. import accounting

    flops = accounting.flops_per_token(config)
    return {
        "dtype": config.dtype,
        "layer_kinds": accounting.layer_kinds(config),
        "parameters": dataclasses.asdict(accounting.count_parameters(config)),
        "recipe": scheme.recipe or None,
        "bits": scheme.bits,
        "formats": _formats(scheme),
        "weight_bytes": accounting.weight_bytes(config, scheme),
        "flops_per_token": flops,
        "flops_per_token_of_context": accounting.flops_per_token(config, 1) - flops,
        "weight_bytes_per_token": accounting.weight_bytes_per_token(config, scheme),
        "bytes_per_token": accounting.bytes_per_token(config, scheme=scheme),
        "kv_cache_dtype": kv_cache_dtype or config.dtype,
        "kv_bytes_per_token": accounting.kv_bytes_per_token(config, kv_cache_dtype),
        "state_bytes_per_sequence": {
            "delta": accounting.delta_bytes_per_sequence(config),
            "conv": accounting.conv_bytes_per_sequence(config),
        },
    }


def _formats(scheme: Scheme) -> dict[str, int]:
    """Number of matrices of each format."""
    return dict(
        Counter(
            f"{how.format.bits} bits, groups of {how.format.group_size}"
            + ("" if how.format.symmetric else ", zero points")
            + (", input scales" if how.input_scale else "")
            for how in scheme.tensors.values()
        ).most_common()
    )


def _fit(
    config: QwenConfig,
    scheme: Scheme,
    memory: int,
    batch_size: int,
    kv_cache_dtype: str | None,
) -> dict[str, int]:
    from .. import accounting

    return {
        "memory_bytes": memory,
        "batch_size": batch_size,
        "context": accounting.largest_context(config, memory, batch_size, kv_cache_dtype, scheme),
        "max_position_embeddings": config.max_position_embeddings,
    }


def _holdings(
    folder: Path, config: QwenConfig, *, fetched: bool
) -> tuple[dict[str, Any], QwenConfig, Scheme]:
    """What a folder holds, the configuration as its weights want it, and what is in codes.

    Quantised weights, and a folder without weights, are named; damaged or unfit ones raise
    `CheckpointError`. Weights that are on the Hub only are none.
    """
    from .. import hub
    from ..checkpoint.formats import quantisation, read_scheme
    from ..checkpoint.index import INDEX
    from ..checkpoint.plan import plan_load
    from ..checkpoint.safetensors_io import open_folder

    quantised = quantisation(folder, ())
    scheme = Scheme() if quantised else read_scheme(folder, ())
    if fetched and not hub.has_weights(folder):
        not_here = "on the Hub, not fetched: all figures are from the configuration"
        return {"path": str(folder), "weights": not_here, "quantised": quantised}, config, scheme
    if not any(folder.glob("*.safetensors")) and not (folder / INDEX).exists():
        why = _why_unreadable(folder)
        return {"path": str(folder), "weights": why, "quantised": quantised}, config, scheme
    opened = open_folder(folder)
    held = {
        "path": str(folder),
        "files": len(opened.shards),
        "tensors": len(opened.tensors),
        "bytes": opened.nbytes,
        "dtypes": dict(Counter(tensor.dtype for tensor in opened.tensors.values()).most_common()),
        "quantised": quantisation(folder, opened.tensors),
        "notes": list(opened.notes),
    }
    if held["quantised"] is not None:
        return held, config, scheme
    plan = plan_load(opened, config)
    held |= {"skipped": dict(plan.skipped), "notes": list(plan.notes)}
    return held, plan.config, plan.scheme


def _why_unreadable(folder: Path) -> str:
    from ..checkpoint.safetensors_io import open_folder

    try:
        open_folder(folder)
    except CheckpointError as error:
        return str(error)
    return "none"


def _as_text(shape: Shape, config: QwenConfig, report: dict[str, Any]) -> str:
    fields = {k: v for k, v in report["config"].items() if v is not None and k != "architectures"}
    fields.pop("layer_types", None)
    parts = [
        f"{shape.name}: {config.model_type}",
        table({name: str(value) for name, value in fields.items()}),
        table(_cost_rows(report["cost"])),
    ]
    if report["fit"] is not None:
        parts.append(_fit_line(report["fit"], report["cost"]))
    if report["folder"] is not None:
        parts.append(table(_folder_rows(report["folder"])))
    if "kernels" in report:
        from .kernels import as_text

        parts.append(as_text(report["kernels"]))
    return "\n\n".join(parts)


def _cost_rows(cost: dict[str, Any]) -> dict[str, str]:
    count, state = cost["parameters"], cost["state_bytes_per_sequence"]
    recurrent = state["delta"] + state["conv"]
    rows = {
        "layers": ", ".join(f"{number} x {kind}" for kind, number in cost["layer_kinds"].items()),
        "parameters": f"{count['total']:,}",
        "active a token": f"{count['active']:,} "
        f"({count['active_with_embedding']:,} with the whole embedding table)",
        "weights": f"{size(cost['weight_bytes'])} in {_stored(cost)}",
        "compute a token": f"{scaled(cost['flops_per_token'], 'FLOP')}, "
        f"and {scaled(cost['flops_per_token_of_context'], 'FLOP')} for each token before it",
        "bytes a token": f"{size(cost['bytes_per_token'])} at batch 1 "
        f"({size(cost['weight_bytes_per_token'])} of weights), "
        f"and {size(cost['kv_bytes_per_token'])} for each token before it",
        "KV cache": f"{cost['kv_bytes_per_token']:,} B a token in {cost['kv_cache_dtype']}",
        "recurrent state": f"{recurrent:,} B a sequence "
        f"(delta {state['delta']:,}, convolution {state['conv']:,})",
    }
    if cost["formats"]:
        formats = cost["formats"].items()
        rows["codes"] = "; ".join(f"{number} matrices of {name}" for name, number in formats)
    if not recurrent:
        del rows["recurrent state"]
    return rows


def _stored(cost: dict[str, Any]) -> str:
    if cost["recipe"] is None:
        return cost["dtype"]
    return f"codes of {cost['bits']} bits and more (recipe {cost['recipe']}) and {cost['dtype']}"


def _fit_line(fit: dict[str, int], cost: dict[str, Any]) -> str:
    batch, context, made_for = fit["batch_size"], fit["context"], fit["max_position_embeddings"]
    memory = size(fit["memory_bytes"])
    if context == 0:
        weights = size(cost["weight_bytes"])
        return f"{memory} do not hold the weights ({weights}) and a cache of one block each"
    fits = (
        f"{context:,} tokens of context"
        if batch == 1
        else f"{batch} sequences of {context:,} tokens each"
    )
    made = f"the model is made for {made_for:,}"
    return f"{memory} hold the weights and {fits}; {made} (working memory not counted)"


def _folder_rows(held: dict[str, Any]) -> dict[str, str]:
    rows = {"folder": held["path"]}
    if "files" in held:
        rows["files"] = f"{held['files']} with {held['tensors']} tensors, {size(held['bytes'])}"
        rows["dtypes"] = ", ".join(f"{number} x {name}" for name, number in held["dtypes"].items())
    if held["quantised"] is not None:
        rows["quantised"] = f"{held['quantised']}: such weights cannot be run yet"
    if "weights" in held:
        rows["weights"] = held["weights"]
    if held.get("notes"):
        rows["notes"] = "; ".join(held["notes"])
    return rows
