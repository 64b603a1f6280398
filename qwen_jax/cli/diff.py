"""`qwen-jax diff`: two model folders compared tensor by tensor."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ..checkpoint.problems import show
from ..errors import CheckpointError, ConfigError, RequestError
from .console import Notes, accept_any_text, write_json
from .conversion import find_source
from .options import Switch

if TYPE_CHECKING:
    from convert.diff import Difference, TensorDifference

_LISTED = 40


def diff(
    first: str,
    second: str,
    *,
    json: Switch = False,
    quiet: Annotated[bool, Parameter(negative="", alias="-q")] = False,
) -> int:
    """Compare two model folders tensor by tensor; layouts may differ.

    Exit code 0 if every tensor is the same bit for bit and the configurations agree, 1 if not, 2
    if they cannot be compared.

    Args:
        first: a model folder in any layout, a hub id, or demo.
        second: another.
        json: write one JSON object to standard output.
        quiet: write nothing to standard error but errors and warnings.
    """
    from convert.diff import diff as compare
    from convert.source import open_source

    accept_any_text()
    notes = Notes(quiet=quiet)
    try:
        a, b = (open_source(find_source(name, None, notes)) for name in (first, second))
        with notes.progress("comparing", a.tree_bytes) as advance:
            result = compare(a, b, progress=advance)
    except (CheckpointError, ConfigError) as error:
        raise RequestError(str(error)) from error
    if json:
        write_json({"equal": result.equal, **dataclasses.asdict(result)})
    else:
        print(_as_text(result))
    return 0 if result.equal else 1


def _as_text(result: Difference) -> str:
    lines = [
        f"config {name}: {first!r} and {second!r}"
        for name, (first, second) in result.config.items()
    ]
    lines += [_line(tensor) for tensor in result.tensors[:_LISTED]]
    if len(result.tensors) > _LISTED:
        lines.append(f"... and {len(result.tensors) - _LISTED} more tensors (--json lists all)")
    for which, kinds in zip(("first", "second"), result.left_out, strict=True):
        lines += [
            f"not compared: {count} {kind} tensors of the {which}" for kind, count in kinds.items()
        ]
    same = result.compared - sum(None not in tensor.shapes for tensor in result.tensors)
    verdict = "equal" if result.equal else "different"
    return "\n".join(
        [*lines, f"{verdict}: {same} of {result.compared} tensors in both are the same bit for bit"]
    )


def _line(tensor: TensorDifference) -> str:
    path = show(tensor.path)
    if None in tensor.shapes:
        return f"{path}: only in the {'second' if tensor.shapes[0] is None else 'first'}"
    if tensor.shapes[0] != tensor.shapes[1]:
        return f"{path}: shape {tensor.shapes[0]} and {tensor.shapes[1]}"
    dtypes = (
        "" if tensor.dtypes[0] == tensor.dtypes[1] else f", {' and '.join(map(str, tensor.dtypes))}"
    )
    return (
        f"{path}: {tensor.count} values differ, by at most {tensor.max_abs:.3g} "
        f"({tensor.max_rel:.3g} relative){dtypes}"
    )
