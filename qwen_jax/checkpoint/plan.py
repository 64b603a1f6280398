"""A folder matched against a configuration: the source of each tree tensor, or one error."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .formats import refuse_quantised
from .keys import HEAD, parse_key, speller
from .mapping import EMBEDDING, FORMS, Form
from .problems import Problems, show
from .safetensors_io import TensorFolder
from .tensors import Shape, StoredTensor, expand, tree_tensors
from .transforms import Piece

if TYPE_CHECKING:
    from ..config import QwenConfig

WEIGHT_DTYPES = ("BF16", "F16", "F32")

_EXPERT_NUMBER = re.compile(r"(?<=\.mlp\.experts\.)\d+(?=\.)")
_LAYER_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_COMPARED_ROWS = 4096


class Source(NamedTuple):
    """Where one tree tensor comes from.

    Attributes:
        path: tree path.
        shape: its shape.
        float32: whether it stays float32 in every model.
        pieces: rows of tensors in the folder; together they cover each row of the tree tensor once.
    """

    path: str
    shape: Shape
    float32: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class LoadPlan:
    """A folder that fits a configuration.

    Attributes:
        folder: the folder.
        config: the configuration to build the model with: the one that was given, except that
            `tie_word_embeddings` is false where the folder has an output head of its own.
        sources: one for each tree tensor, in the order of `tree_tensors(config)`.
        skipped: how many tensors are not part of the text model, by kind ("mtp", "visual",
            "rotary").
        notes: what a person should be told once.
    """

    folder: TensorFolder
    config: QwenConfig
    sources: tuple[Source, ...]
    skipped: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the folder's tensors that are read."""
        keys = {piece.key for source in self.sources for piece in source.pieces}
        return sum(self.folder.tensors[key].nbytes for key in keys)


def plan_load(folder: TensorFolder, config: QwenConfig) -> LoadPlan:
    """Finds the source of every tree tensor in a folder.

    Prefix and grouping are decided tensor by tensor from the keys. `mtp.*` and vision tensors are
    skipped and counted. An output head in the file wins over `tie_word_embeddings`: where that
    says tied, a head equal to the embedding bit for bit is dropped, and any other is used, with a
    warning.

    Args:
        folder: the opened folder.
        config: the model that it should hold.

    Returns:
        The plan; only an output head that might be a copy of the embedding has been read.

    Raises:
        CheckpointError: quantised weights, or keys that are missing, unknown, misshapen, of
            another dtype, found twice, or found in two layouts; all of them in one error.
    """
    refuse_quantised(folder.path, folder.tensors)
    problems = Problems()
    found, prefix, skipped = _sort_keys(folder, problems)
    config, dropped = _decide_head(folder, config, found)
    forms, contested = _decide_forms(config, found, problems)
    spell = speller(prefix)
    stored = list(
        expand(
            config,
            lambda form, layer: (layer, form) in forms,
            lambda path: found.get(path, spell(path)),
        )
    )
    _compare(folder, stored, problems)
    used = {tensor.key for tensor in stored} | dropped | contested
    unused = [key for key in found.values() if key not in used]
    problems.add("unused", *map(show, unused))
    problems.add("numbers beyond the configuration", *_numbers_beyond(unused, config))
    problems.raise_if_any(
        f"{folder.path} does not fit its configuration "
        f"({config.model_type}, {config.num_hidden_layers} layers)",
        "Every tensor of the text model must be there once, in one layout, and nothing else. "
        "Check that config.json and the weights are of one release.",
    )
    notes = [f"skipped {count} {kind} tensors" for kind, count in skipped.items()]
    return LoadPlan(
        folder, config, _sources(folder, config, stored), skipped, (*folder.notes, *notes)
    )


def _sort_keys(
    folder: TensorFolder, problems: Problems
) -> tuple[dict[str, str], str, dict[str, int]]:
    """Returns key by tree path, the commonest prefix, and counts of skipped tensors."""
    found: dict[str, str] = {}
    prefixes, skipped = Counter[str](), Counter[str]()
    for key in folder.tensors:
        kind, path, prefix = parse_key(key)
        if kind == "unknown":
            problems.add("under an unknown prefix", show(key))
        elif kind != "text":
            skipped[kind] += 1
        elif path in found:
            problems.add("duplicate", f"{show(found[path])} and {show(key)} are one tensor")
        else:
            found[path] = key
            prefixes[prefix] += path != HEAD
    prefix = prefixes.most_common(1)[0][0] if prefixes.total() else "model."
    return found, prefix, dict(skipped)


def _decide_head(
    folder: TensorFolder, config: QwenConfig, found: Mapping[str, str]
) -> tuple[QwenConfig, set[str]]:
    """Returns the configuration as the file's head wants it, and the key of a needless head."""
    if not config.tie_word_embeddings or HEAD not in found:
        return config, set()
    if EMBEDDING in found and _same(folder, found[HEAD], found[EMBEDDING]):
        return config, {found[HEAD]}
    warnings.warn(
        f"{folder.path}: the configuration says tie_word_embeddings true, but "
        f"{show(found[HEAD])} differs from the embedding; the head in the file is used",
        stacklevel=3,
    )
    return replace(config, tie_word_embeddings=False), set()


def _same(folder: TensorFolder, first: str, second: str) -> bool:
    """Compares two tensors bit for bit, a few rows at a time."""
    a, b = folder.tensors[first], folder.tensors[second]
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in WEIGHT_DTYPES or not a.shape:
        return False
    left, right = (folder.read(key).view(np.uint8) for key in (first, second))
    starts = range(0, len(left), _COMPARED_ROWS)
    return all(
        np.array_equal(left[s : s + _COMPARED_ROWS], right[s : s + _COMPARED_ROWS]) for s in starts
    )


def _decide_forms(
    config: QwenConfig, found: Mapping[str, str], problems: Problems
) -> tuple[set[tuple[int, Form]], set[str]]:
    """Returns the forms used in each layer, and keys of tensors that are there in two forms."""
    stems = {_EXPERT_NUMBER.sub("{e}", path): key for path, key in found.items()}
    forms, contested = set(), set()
    for layer in range(config.num_hidden_layers):
        place = f"layers.{layer}."
        for form in FORMS:
            others = [stems[place + p.key] for p in form.parts if place + p.key in stems]
            plain = [found[place + path] for path in form.paths if place + path in found]
            if others:
                forms.add((layer, form))
            if others and plain:
                contested.update(plain)
                both = f"{show(plain[0])} and {show(others[0])}"
                problems.add("ambiguous", f"{both} hold one tensor in two layouts")
    return forms, contested


def _compare(folder: TensorFolder, stored: list[StoredTensor], problems: Problems) -> None:
    """Reports tensors that the folder lacks, or has in another shape or dtype."""
    for tensor in stored:
        info = folder.tensors.get(tensor.key)
        if info is None:
            problems.add("missing", show(tensor.key) + _remark(tensor))
        elif info.shape != tensor.shape:
            shapes = f"{list(info.shape)}, expected {list(tensor.shape)}"
            problems.add("misshapen", f"{show(tensor.key)} has shape {shapes}")
        elif info.dtype not in WEIGHT_DTYPES:
            accepted = ", ".join(WEIGHT_DTYPES)
            problems.add("dtype", f"{show(tensor.key)} is {info.dtype}; accepted: {accepted}")


def _remark(tensor: StoredTensor) -> str:
    """Says what else would do in place of a missing tensor."""
    path = tensor.pieces[0].path
    if path == HEAD:
        return " (the configuration says tie_word_embeddings false)"
    within = path.partition(".")[2].partition(".")[2]
    other = [part.key for form in FORMS if within in form.paths for part in form.parts]
    names_itself = tensor.key.endswith(path)
    return f" (or {' and '.join(other)})" if other and names_itself else ""


def _numbers_beyond(unused: list[str], config: QwenConfig) -> list[str]:
    """Says where unused keys count more layers or experts than the configuration."""
    limits = (
        ("layers", _LAYER_NUMBER, config.num_hidden_layers),
        ("experts", _EXPERT_NUMBER, config.num_experts),
    )
    remarks = []
    for what, pattern, limit in limits:
        numbers = [int(match[0][:9]) for key in unused if (match := pattern.search(key))]
        if numbers and max(numbers) >= limit:
            remarks.append(f"{what} up to number {max(numbers)}; the configuration has {limit}")
    return remarks


def _sources(
    folder: TensorFolder, config: QwenConfig, stored: list[StoredTensor]
) -> tuple[Source, ...]:
    """Groups pieces by tree tensor, in the order in which they lie in the files."""

    def position(piece: Piece) -> tuple[str, int]:
        info = folder.tensors[piece.key]
        return info.shard, info.start

    pieces: dict[str, list[Piece]] = {}
    for piece in (piece for tensor in stored for piece in tensor.pieces):
        pieces.setdefault(piece.path, []).append(piece)
    return tuple(
        Source(path, tensor.shape, tensor.float32, tuple(sorted(pieces[path], key=position)))
        for path, tensor in tree_tensors(config).items()
    )
