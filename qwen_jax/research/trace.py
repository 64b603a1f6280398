"""Traces of routing: made of what forward passes return, joined, stored, compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..config import QwenConfig
from ..errors import RequestError
from ..model import Routing, RoutingTrace
from ..model.intervention import sparse_layers
from ..model.trace import stacked

FORMAT = "qwen-jax routing trace"
FORMAT_VERSION = "1"
_ARRAYS = ("ids", "weights", "tokens", "sequences")
_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "layer_types",
    "num_experts",
    "num_experts_per_tok",
)


def fingerprint(config: QwenConfig) -> str:
    """SHA-256 of what gives a model's routing its shape and meaning.

    Models of one architecture have the same, in whatever dtype or codes and however trained, so
    that a trace of a fine-tuned or quantised model can be compared with one of the original.
    """
    fields = {name: getattr(config, name) for name in _SHAPE}
    fields["moe_layers"] = sparse_layers(config)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def trace_of(
    config: QwenConfig,
    routing: Mapping[int, Routing],
    tokens: Int[np.ndarray, "B T"] | Int[Array, "B T"],
    lengths: Int[np.ndarray, " B"] | Int[Array, " B"] | None = None,
    *,
    sequences: Int[np.ndarray, " B"] | None = None,
) -> RoutingTrace:
    """The trace of one forward pass, on the host.

    Args:
        config: the model's.
        routing: what `model(tokens, lengths)` or `prefill` returned, with capture "ids" or "full".
        tokens: what it was given, padded on the right.
        lengths: real tokens of each row; all if None.
        sequences: a number for each row; 0 to B - 1 if None.

    Raises:
        RequestError: a dense model, routing that was not captured, tokens of another shape, or
            lengths that are not of their rows.
    """
    layers = sparse_layers(config)
    whole = jax.device_get(stacked(routing, config.num_experts))
    tokens = np.asarray(tokens)
    if tuple(sorted(routing)) != layers or whole.ids.shape[1:3] != tokens.shape:
        raise RequestError(
            f"routing is of layers {sorted(routing)} and tokens {whole.ids.shape[1:3]}, but the "
            f"model has experts in {list(layers)} and tokens are {tokens.shape}; give what one "
            "forward pass took and returned"
        )
    rows, width = tokens.shape
    lengths = np.full(rows, width) if lengths is None else np.asarray(lengths)
    sequences = np.arange(rows) if sequences is None else np.asarray(sequences)
    if not lengths.shape == sequences.shape == (rows,):
        raise RequestError(
            f"lengths of shape {lengths.shape} and sequences of shape {sequences.shape} for {rows} "
            "rows of tokens; give one number a row"
        )
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > width:
        raise RequestError(
            f"lengths are from {lengths.min()} to {lengths.max()}; accepted are 0 to {width}, the "
            "tokens of a row"
        )
    valid = np.arange(width)[None, :] < lengths[:, None]
    return RoutingTrace(
        whole.ids[:, valid],
        whole.weights[:, valid],
        None if whole.logits is None else whole.logits[:, valid],
        tokens[valid].astype(np.int32),
        np.broadcast_to(sequences[:, None], valid.shape)[valid].astype(np.int32),
        layers,
        config.num_experts,
        fingerprint(config),
    )


def join_traces(traces: Sequence[RoutingTrace]) -> RoutingTrace:
    """Pieces of one model's trace as one. Tokens of a sequence come together, in their order.

    Raises:
        RequestError: there is no piece, or pieces are of different models or captures.
    """
    if not traces:
        raise RequestError("there is no trace to join; give at least one")
    first = traces[0]
    for other in traces[1:]:
        refuse_other_model(first, other)
        if (first.logits is None) != (other.logits is None):
            raise RequestError(
                "some pieces have logits and some have not; capture all of them alike"
            )
    sequences = np.concatenate([piece.sequences for piece in traces])
    order = np.argsort(sequences, kind="stable")
    logits = [piece.logits for piece in traces if piece.logits is not None]
    return RoutingTrace(
        np.concatenate([piece.ids for piece in traces], axis=1)[:, order],
        np.concatenate([piece.weights for piece in traces], axis=1)[:, order],
        np.concatenate(logits, axis=1)[:, order] if logits else None,
        np.concatenate([piece.tokens for piece in traces])[order],
        sequences[order],
        first.layers,
        first.experts,
        first.fingerprint,
    )


def refuse_other_model(one: RoutingTrace, other: RoutingTrace) -> None:
    """Raise `RequestError` unless both traces are of models of one configuration."""
    if one.fingerprint != other.fingerprint:
        raise RequestError(
            f"the traces are of different models: {_described(one)} and {_described(other)}; give "
            "traces of models of one architecture"
        )


def refuse_other_tokens(one: RoutingTrace, other: RoutingTrace) -> None:
    """Raise `RequestError` unless both traces are of one model over the same tokens."""
    refuse_other_model(one, other)
    same = len(one) == len(other) and np.array_equal(one.tokens, other.tokens)
    if not same or not np.array_equal(one.sequences, other.sequences):
        raise RequestError(
            f"the traces are of different texts, of {len(one)} and {len(other)} tokens; give "
            "traces of the same tokens, cut in the same way"
        )


def save_trace(path: str | Path, trace: RoutingTrace, *, model: str = "") -> None:
    """Write a trace as a safetensors file; one that is not complete never has the final name.

    Args:
        path: the file; replaced if it is there.
        trace: what to write.
        model: a name of the model for readers.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in _ARRAYS}
    if trace.logits is not None:
        arrays["logits"] = np.ascontiguousarray(trace.logits)
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": model,
        "fingerprint": trace.fingerprint,
        "layers": json.dumps(trace.layers),
        "experts": str(trace.experts),
        "slots": str(trace.ids.shape[-1]),
    }
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(arrays, partial, metadata)
        partial.chmod(mode)  # the writer's own is for the user alone
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_trace(path: str | Path, config: QwenConfig | None = None) -> RoutingTrace:
    """Read a trace that `save_trace` wrote.

    Args:
        path: the file.
        config: the configuration that the trace must be of; any if None.

    Raises:
        RequestError: no such file, one that is no trace or is damaged, or another model's trace.
    """
    if Path(path).is_dir():
        raise RequestError(f"{path} is a folder; give the file in it that save_trace wrote")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is not a trace: {error}. Give one of save_trace") from error
    kind = (metadata.get("format"), metadata.get("format_version"))
    if kind != (FORMAT, FORMAT_VERSION):
        raise RequestError(
            f"{path} is of format {kind[0]!r}, version {kind[1]!r}; accepted is {FORMAT!r}, "
            f"version {FORMAT_VERSION}"
        )
    found = _read(path, metadata, arrays)
    if config is not None and found.fingerprint != fingerprint(config):
        raise RequestError(
            f"{path} is a trace of another model, {metadata.get('model')!r} ({_described(found)}); "
            f"this one is a {config.model_type} of {config.num_hidden_layers} layers and "
            f"{config.num_experts} experts. Trace it anew"
        )
    return found


def _read(
    path: str | Path, metadata: Mapping[str, str], arrays: Mapping[str, np.ndarray]
) -> RoutingTrace:
    try:
        layers = tuple(json.loads(metadata["layers"]))
        experts, slots = int(metadata["experts"]), int(metadata["slots"])
        logits = arrays.get("logits")
        found = RoutingTrace(
            arrays["ids"],
            arrays["weights"],
            logits,
            arrays["tokens"],
            arrays["sequences"],
            layers,
            experts,
            metadata["fingerprint"],
        )
    except (KeyError, ValueError, TypeError) as error:
        raise RequestError(f"{path} is damaged: {error!r}; trace the model anew") from error
    tokens = len(found)
    shape = (len(layers), tokens, slots)
    shapes = [found.ids.shape, found.weights.shape, found.sequences.shape]
    fits = shapes == [shape, shape, (tokens,)] and (
        logits is None or logits.shape == (len(layers), tokens, experts)
    )
    in_range = fits and (tokens == 0 or (found.ids.min() >= 0 and found.ids.max() <= experts))
    if not in_range:
        raise RequestError(
            f"{path} is damaged: its arrays are not of {len(layers)} layers, {tokens} tokens, "
            f"{slots} slots and {experts} experts; trace the model anew"
        )
    return found


def _described(trace: RoutingTrace) -> str:
    return (
        f"{len(trace.layers)} MoE layers of {trace.experts} experts, {trace.ids.shape[-1]} a "
        f"token, configuration {trace.fingerprint[:12]}"
    )
