"""Weights on their way from a folder to the device, one tree tensor at a time."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.dequant_matmul.qtensor import QTensor

from ..errors import CheckpointError
from ..quant.abstract import Abstract, abstract_qtensor, cut_groups
from .assemble import aligned_copy, assemble, release
from .checksums import compared
from .codes import parts_of, read_codes
from .plan import LoadPlan, Source
from .problems import Problems
from .tensors import tree_tensors

if TYPE_CHECKING:
    from ..config import QwenConfig

_UNDER_WAY = 2

MODEL_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


def abstract_parameters(
    config: QwenConfig, dtype: str | None = None, *, mtp_layers: int = 0
) -> dict[str, jax.ShapeDtypeStruct]:
    """Lists the parameter tree without allocating it.

    Args:
        config: the model.
        dtype: "bfloat16" or "float32"; None means the configuration's. A_log, dt_bias and the
            gated norm of linear attention are float32 whatever it is.
        mtp_layers: layers of the multi-token prediction head; 0 leaves the head out.

    Returns:
        Shape and dtype by tree path. `quant.abstract.in_codes` puts codes in their place.

    Raises:
        CheckpointError: another dtype.
    """
    name = config.dtype if dtype is None else dtype
    if name not in MODEL_DTYPES:
        raise CheckpointError(
            f"dtype {name!r} is not supported; accepted: {', '.join(MODEL_DTYPES)} "
            "(weights stored in float16 are cast)"
        )
    return {
        path: jax.ShapeDtypeStruct(
            tensor.shape, np.dtype(np.float32) if tensor.float32 else MODEL_DTYPES[name]
        )
        for path, tensor in tree_tensors(config, mtp_layers).items()
    }


def load_parameters(
    plan: LoadPlan,
    targets: Mapping[str, Abstract],
    *,
    progress: Callable[[str, int], None] | None = None,
) -> dict[str, jax.Array | QTensor]:
    """Reads every tree tensor of a plan onto the device.

    Each is read, regrouped and cast on the host, then copied to the device; codes go as they are.
    Two are under way at a time, so that the host never holds more than two of them beside the
    mapped file. Of a folder with codes, checksums are compared meanwhile.

    Args:
        plan: where each tensor comes from.
        targets: shape, dtype and, optionally, sharding by tree path:
            `in_codes(abstract_parameters(plan.config), plan.scheme)`, or those of a module built
            from `plan.config`.
        progress: called after each tensor with its path and its bytes on the device.

    Returns:
        The arrays by tree path, in the order of the plan.

    Raises:
        CheckpointError: `targets` is not the tree of `plan`, a file changed since it was opened,
            or, of a folder with codes, scales make no sense or checksums differ.
    """
    _check_targets(plan, targets)
    keys = [key for source in plan.sources for key in source.keys]
    with compared(plan.folder, keys) if plan.scheme.tensors else contextlib.nullcontext():
        return _load(plan, targets, progress)


def _load(
    plan: LoadPlan,
    targets: Mapping[str, Abstract],
    progress: Callable[[str, int], None] | None,
) -> dict[str, jax.Array | QTensor]:
    # Set for this thread alone by `jax.default_device`.
    default_device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def load(source: Source) -> jax.Array | QTensor:
        target = targets[source.path]
        with jax.default_device(default_device):
            if isinstance(target, QTensor):
                return _put_codes(plan, source, target)
            host = assemble(plan.folder, source, np.dtype(target.dtype))
            array = _put(host, target.sharding)
        release(plan.folder, source)
        return array

    arrays: dict[str, jax.Array | QTensor] = {}
    with ThreadPoolExecutor(_UNDER_WAY) as pool:
        for source, array in zip(plan.sources, pool.map(load, plan.sources), strict=True):
            arrays[source.path] = array
            if progress is not None:
                progress(source.path, array.nbytes)
    return arrays


def _put_codes(plan: LoadPlan, source: Source, target: QTensor) -> QTensor:
    host, like = read_codes(plan.folder, source), parts_of(target)
    arrays = {part: _put(array, like[part].sharding) for part, array in host.items()}
    for key in source.keys:
        plan.folder.release(key)
    return dataclasses.replace(target, **arrays)


def _put(host: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Copies an array to the device, and waits, since a copy under way keeps `host` alive."""
    if not host.flags.writeable and _on_cpu(sharding):
        # A CPU array shares memory with what it was made from, even with `may_alias=False`; one
        # that shared the mapped file would change with it.
        host = aligned_copy(host, host.dtype)
    return jax.device_put(host, sharding).block_until_ready()


def _on_cpu(sharding: jax.sharding.Sharding | None) -> bool:
    devices = jnp.zeros(()).devices() if sharding is None else sharding.device_set
    return all(device.platform == "cpu" for device in devices)


def _check_targets(plan: LoadPlan, targets: Mapping[str, Abstract]) -> None:
    problems, sources = Problems(), {source.path: source for source in plan.sources}
    problems.add("only in the folder's tree", *(p for p in sources if p not in targets))
    problems.add("only in the targets", *(p for p in targets if p not in sources))
    for path in sources.keys() & targets.keys():
        expected, given = sources[path].shape, targets[path].shape
        if expected != given:
            problems.add("shapes", f"{path} is {list(expected)}, the target {list(given)}")
        problems.add("codes", *_code_faults(sources[path], targets[path]))
    problems.raise_if_any(
        f"{plan.folder.path}: the targets are not the parameter tree of the plan's configuration",
        "Build the model from plan.config; its tie_word_embeddings may differ from the given one. "
        "What plan.scheme names is a QTensor of the shapes of in_codes.",
    )


def _code_faults(source: Source, target: Abstract) -> list[str]:
    """What is wrong with the target of a tensor in codes, or with codes as target of another."""
    if source.scheme is None or not isinstance(target, QTensor):
        if source.scheme is None and not isinstance(target, QTensor):
            return []
        one, other = ("", "not") if source.scheme is not None else ("not ", "is")
        return [f"{source.path} is {one}in codes, the target {other}"]
    expected = parts_of(abstract_qtensor(source.shape, source.scheme))
    given = parts_of(target)
    if {name: (leaf.shape, leaf.dtype) for name, leaf in expected.items()} != {
        name: (leaf.shape, leaf.dtype) for name, leaf in given.items()
    }:
        return [f"{source.path} has parts {expected}, the target {given}"]
    fault = cut_groups(target)
    return [f"{source.path}: {fault}"] if fault else []
