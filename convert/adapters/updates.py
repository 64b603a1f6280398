"""The LoRA updates of an adapter file: pairs of factors, plain or of fused experts.

PEFT wraps a module once for each of its fused parameters, and names neither the parameter nor how
the factors lie. Up to release 0.19.0 it took the middle axis of [E, O, I] as the input, from 0.19.1
on the last one. The shapes tell both, unless O equals I; then other updates of the file, or else
the release that wrote it, decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from qwen_jax.checkpoint.mapping import EMBEDDING
from qwen_jax.checkpoint.problems import show
from qwen_jax.checkpoint.transforms import Piece

from .changes import Change, LowRank
from .inputs import CANNOT, LACKING, MISSHAPEN, NO_TENSOR, Inputs
from .keys import AdapterKey

# Tree path, expert (None where the tensor has no expert axis), change.
Placed = tuple[str, int | None, Change]
Modules = dict[tuple[str, int], dict[str, AdapterKey]]
Orientation = Literal["[in, out]", "[out, in]"]

EMBEDDING_MODULE = EMBEDDING.removesuffix(".weight")
_PARAMETERS = ("gate_up_proj", "down_proj")
_SWAPPED_SINCE = (0, 19, 1)


class _Fused(NamedTuple):
    """A pair of factors of fused experts, and what it can be an update of."""

    a: AdapterKey
    b: AdapterKey
    readings: tuple[tuple[str, Orientation], ...]


def updates(inputs: Inputs, modules: Modules) -> Iterator[Placed]:
    """Finds the update of each pair of factors.

    Args:
        inputs: the adapter file and the model.
        modules: the keys of the file by module and depth, then by role.

    Yields:
        Where each update goes, and the update. Pairs that do not fit are reported.
    """
    fused: list[_Fused] = []
    for (module, depth), roles in modules.items():
        for kind in ("", "embedding "):
            a, b = roles.get(f"{kind}A"), roles.get(f"{kind}B")
            if a is None or b is None:
                present = a or b
                if present is not None:
                    other = f"lora_{kind.replace(' ', '_')}{'B' if a else 'A'}"
                    inputs.problems.add(LACKING, f"{show(present.key)} has no {other} beside it")
            elif f"{module}.{_PARAMETERS[0]}" in inputs.known and not kind:
                fused.append(_Fused(a, b, _readings(inputs, a, b)))
            elif depth:
                inputs.problems.add(NO_TENSOR, show(a.key), show(b.key))
            elif kind:
                yield from _embedding(inputs, a, b)
            else:
                yield from _matrix(inputs, a, b)
    yield from _fused_updates(inputs, fused)


def _matrix(inputs: Inputs, a: AdapterKey, b: AdapterKey) -> Iterator[Placed]:
    """An update B A of a matrix [O, I]: A is [r, I], B is [O, r]."""
    tensor = inputs.known.get(f"{a.module}.weight")
    if tensor is None:
        inputs.problems.add(NO_TENSOR, show(a.key), show(b.key))
        return
    if len(tensor.shape) != 2:
        why = "PEFT does not merge updates of such a layer either"
        inputs.problems.add(CANNOT, f"{show(a.key)}: {why}")
        return
    rank = inputs.settings.rank(a.name)
    rows, columns = tensor.shape
    note = f" (rank {rank})"
    if all([inputs.fits(a, (rank, columns), note), inputs.fits(b, (rows, rank), note)]):
        left, right = inputs.read(b), inputs.read(a)
        for piece in tensor.pieces:
            update = LowRank(piece, left, right, inputs.settings.scale(a.name))
            yield piece.path, piece.expert, update


def _embedding(inputs: Inputs, a: AdapterKey, b: AdapterKey) -> Iterator[Placed]:
    """An update (B A)^T of the embedding [V, D]: A is [r, V], B is [D, r]."""
    if a.module != EMBEDDING_MODULE:
        inputs.problems.add(NO_TENSOR, show(a.key), show(b.key))
        return
    rows, columns = inputs.known[EMBEDDING].shape
    rank = inputs.settings.rank(a.name)
    note = f" (rank {rank})"
    if all([inputs.fits(a, (rank, rows), note), inputs.fits(b, (columns, rank), note)]):
        piece = Piece(EMBEDDING, EMBEDDING, 1, 0, rows, 0)
        scale = inputs.settings.scale(a.name)
        yield EMBEDDING, None, LowRank(piece, inputs.read(a).T, inputs.read(b).T, scale)


def _readings(inputs: Inputs, a: AdapterKey, b: AdapterKey) -> tuple[tuple[str, Orientation], ...]:
    """What a pair can be by its shapes: A is [E r, in], B is [out, E r]."""
    shapes = inputs.shape(a), inputs.shape(b)
    found: list[tuple[str, Orientation]] = []
    for parameter in _PARAMETERS:
        experts, rows, columns = inputs.known[f"{a.module}.{parameter}"].shape
        size = experts * inputs.settings.rank(a.name, parameter)
        if shapes == ((size, columns), (rows, size)):
            found.append((parameter, "[out, in]"))
        if shapes == ((size, rows), (columns, size)):
            found.append((parameter, "[in, out]"))
    return tuple(found)


def _fused_updates(inputs: Inputs, pairs: list[_Fused]) -> Iterator[Placed]:
    orientation = _orientation(inputs, pairs)
    taken: dict[str, AdapterKey] = {}
    for a, b, readings in pairs:
        if not readings:
            shapes = f"shapes {list(inputs.shape(a))} and {list(inputs.shape(b))}"
            expected = " or ".join(_expected(inputs, a, parameter) for parameter in _PARAMETERS)
            text = f"{show(a.key)} and its lora_B have {shapes}, expected {expected}"
            inputs.problems.add(MISSHAPEN, text)
            continue
        fitting = [
            reading for reading in readings if len(readings) == 1 or reading[1] == orientation
        ]
        if not fitting:
            text = (
                f"{show(a.key)}: the matrices are square, and peft_version does not say which way"
            )
            inputs.problems.add("ambiguous", f"{text} round they are")
            continue
        parameter, lie = fitting[0]
        path = f"{a.module}.{parameter}"
        if taken.setdefault(path, a) is not a:
            text = f"{show(taken[path].key)} and {show(a.key)} both update {path}"
            inputs.problems.add("ambiguous", text)
            continue
        yield from _of_experts(inputs, a, b, parameter, lie)


def _of_experts(
    inputs: Inputs, a: AdapterKey, b: AdapterKey, parameter: str, lie: Orientation
) -> Iterator[Placed]:
    """Updates of [E, O, I]: rows of A come expert by expert, columns of B rank by rank."""
    path = f"{a.module}.{parameter}"
    experts, rows, _ = inputs.known[path].shape
    first, second = inputs.read(a), inputs.read(b)
    first = first.reshape(experts, -1, first.shape[1])
    second = second.reshape(len(second), -1, experts)
    scale = inputs.settings.scale(a.name, parameter)
    for expert in range(experts):
        left, right = second[:, :, expert], first[expert]
        if lie == "[in, out]":
            left, right = right.T, left.T
        yield path, expert, LowRank(Piece(path, path, 1, 0, rows, 0, expert), left, right, scale)


def _expected(inputs: Inputs, a: AdapterKey, parameter: str) -> str:
    experts, rows, columns = inputs.known[f"{a.module}.{parameter}"].shape
    rank = inputs.settings.rank(a.name, parameter)
    size = experts * rank
    return f"{[size, columns]} and {[rows, size]} for {parameter} (rank {rank})"


def _orientation(inputs: Inputs, pairs: list[_Fused]) -> Orientation | None:
    """How factors lie that could lie both ways; None if nothing tells."""
    told: set[Orientation] = {pair.readings[0][1] for pair in pairs if len(pair.readings) == 1}
    if told:
        return told.pop() if len(told) == 1 else None
    version = re.fullmatch(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", inputs.settings.version)
    if version is None:
        return None
    return "[out, in]" if tuple(map(int, version.groups())) >= _SWAPPED_SINCE else "[in, out]"
