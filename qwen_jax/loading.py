"""`load`: a model folder to a model on the device and its tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.resources
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from pallas_kernels.dequant_matmul.layout import BITS

from . import hub
from .checkpoint.formats import quantisation
from .checkpoint.parameters import abstract_parameters, load_parameters
from .checkpoint.plan import LoadPlan, plan_load
from .checkpoint.safetensors_io import open_folder
from .config import QwenConfig
from .decode.sampling import read_generation_config
from .errors import CheckpointError, RequestError
from .memory import refuse_unless_fits
from .model import CausalLM
from .quant.abstract import in_codes, nbytes
from .text import Tokenizer

DEMO = "demo"

_log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: DTypeLike | None = None,
    bits: int | None = None,
    implementation: str | None = None,
    progress: Callable[[str, int], None] | None = None,
    on_plan: Callable[[LoadPlan], None] | None = None,
) -> tuple[CausalLM, Tokenizer | None]:
    """Load a model of bf16, f16 or f32 weights, or of our own codes, from a folder or the Hub.

    Codes are never made numbers: matrices of the model are then `QTensor`s, and the checksums of
    the folder are compared before the model is returned. Tensors go to the device two at a time:
    peak host memory is that of the two largest, peak device memory the model and those. The
    model's `config.eos_token_id` holds the end tokens of config, generation config and tokenizer
    together.

    Args:
        path: a folder, "demo" for the bundled model, or the id of a model on the Hugging Face
            Hub ("Qwen/Qwen3-30B-A3B"), whose files are fetched where they are not cached.
        revision: branch, tag or commit of the Hub model; its main branch if None.
        dtype: "float32" or "bfloat16" for activations, and for weights that are not in codes; the
            configuration's own if None.
        bits: what the folder must hold: 3, 4 or 8, the fewest bits of a matrix in codes, or 16 for
            no codes at all. Any if None.
        implementation: "reference" or "triton" to run every operation of the model so, or fail;
            the first that takes each call if None.
        progress: called after each tensor with its path and bytes.
        on_plan: called before loading with what was found, skipped tensors included.

    Returns:
        The model, and the tokenizer or None where the folder has none.

    Raises:
        ConfigError: the configuration is malformed or not implemented.
        CheckpointError: files are missing, damaged, unsafe, of a foreign quantised format, or do
            not fit the configuration, or the Hub model cannot be fetched.
        RequestError: a revision of something that is not on the Hub, or a folder of other bits.
        MemoryLimitError: the device is too small; nothing was loaded.
    """
    folder = find_runnable(path, revision)
    config = QwenConfig.from_hf(folder)
    dtype = config.dtype if dtype is None else dtype
    dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    tokenizer = Tokenizer.from_folder(folder)
    plan = plan_load(open_folder(folder), config)
    _refuse_bits(plan, bits)
    config = dataclasses.replace(
        plan.config,
        dtype=dtype,
        implementation=implementation,
        eos_token_id=_end_tokens(folder, config, tokenizer),
    )
    targets = in_codes(abstract_parameters(config), plan.scheme)
    needed = sum(map(nbytes, targets.values()))
    refuse_unless_fits(needed, f"{folder.name} in {plan.scheme.described(config.dtype)}")
    for note in plan.notes:
        _log.info("%s: %s", folder, note)
    if on_plan is not None:
        on_plan(plan)
    arrays = load_parameters(plan, targets, progress=progress)
    model = CausalLM(config)
    nnx.update(model, nnx.from_flat_state(_flat(model, arrays)))
    return model, tokenizer


def find_folder(
    path: str | os.PathLike[str],
    revision: str | None = None,
    *,
    weights: bool = True,
    quiet: bool = False,
) -> Path:
    """The folder that a model argument means; a model of the Hub is fetched where it is not cached.

    Args:
        path: a folder, "demo", or `organisation/name` on the Hub. A folder goes before a Hub id.
        revision: branch, tag or commit, for the Hub alone.
        weights: whether a Hub model's weights are needed, and not its small files alone.
        quiet: show no progress bars.

    Raises:
        CheckpointError: no such folder, or the Hub model cannot be fetched.
        ConfigError: the Hub model's configuration is not implemented; no weights were fetched.
        RequestError: a path or revision that is empty, or a revision of something that is not on
            the Hub.
    """
    if not os.fspath(path):
        raise RequestError("the model is empty; give a model folder, demo, or organisation/name")
    if revision is not None and not revision.strip():
        raise RequestError(
            "the revision is empty; give a branch, a tag or a commit, or leave it out"
        )
    if isinstance(path, str) and hub.is_hub_id(path):
        folder = hub.fetch(path, revision, weights=False, quiet=quiet)
        if weights:
            QwenConfig.from_hf(folder)  # refused before gigabytes are fetched
            hub.fetch_weights(path, folder, quiet=quiet)
        return folder
    if revision is not None:
        raise RequestError(
            f"revision {revision!r} is given for {os.fspath(path)!r}, which is not on the Hub; "
            "give organisation/name, or leave the revision out"
        )
    if os.fspath(path) == DEMO and not Path(path).is_dir():
        return Path(str(importlib.resources.files("qwen_jax") / "demo"))
    folder = Path(path)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"{folder} {kind}; accepted are a model folder with config.json and safetensors, "
            '"demo", and organisation/name for a model on the Hugging Face Hub'
        )
    return folder


def find_runnable(
    path: str | os.PathLike[str], revision: str | None = None, *, quiet: bool = False
) -> Path:
    """`find_folder` for weights to run: foreign quantised ones are refused before a download."""
    if isinstance(path, str) and hub.is_hub_id(path):
        folder = find_folder(path, revision, weights=False, quiet=quiet)
        name = quantisation(folder, ())
        if name is not None:
            raise CheckpointError(
                f"{path} on the Hub holds quantised weights ({name}), which are not run: convert "
                f"them first (qwen-jax convert {path} DESTINATION), or use the unquantised release"
            )
    return find_folder(path, revision, quiet=quiet)


def _refuse_bits(plan: LoadPlan, bits: int | None) -> None:
    own = plan.scheme.bits
    if bits is None or bits == own:
        return
    if bits not in (*BITS, 16):
        raise RequestError(f"bits is {bits!r}; accepted are 3, 4, 8, 16 (no codes) and None")
    path = str(plan.folder.path)
    holds = f"holds {own}-bit codes" if own < 16 else "holds no codes (16 bits)"
    make = "load the unquantised release"
    if bits < 16:
        make = f"make {bits}-bit ones of the unquantised release with qwen-jax quantize"
    raise RequestError(
        f"bits is {bits}, but {path} {holds}: call load({path!r}, bits={own}), or {make}"
    )


def _flat(model: CausalLM, arrays: dict) -> Iterable[tuple[tuple, nnx.Variable]]:
    """The model's own variables, filled."""
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        variable.set_value(arrays[".".join(map(str, path))])
        yield path, variable


def _end_tokens(folder: Path, config: QwenConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End tokens of configuration, generation configuration and tokenizer, each once."""
    values = read_generation_config(folder).get("eos_token_id")
    listed = values if isinstance(values, list) else [] if values is None else [values]
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in listed):
        raise CheckpointError(
            f"{folder / 'generation_config.json'}: eos_token_id is {values!r}; accepted is an "
            f"id, a list of ids, or null"
        )
    known = () if tokenizer is None else tokenizer.eos_token_ids
    return tuple(dict.fromkeys((*config.eos_token_id, *listed, *known)))
