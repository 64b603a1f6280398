"""A folder matched against a configuration: the source of each tree tensor, or one error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from ..quant.scheme import Scheme, TensorScheme
from .counts import EXPERT_NUMBER, numbers_beyond, refuse_sizes
from .formats import read_scheme
from .head import decide_head
from .keys import HEAD, MTP, HeadPrefix, Prefix, parse_key, speller
from .mapping import FORMS, Form, Layout
from .problems import Problems, show
from .safetensors_io import TensorFolder
from .tensors import Shape, StoredTensor, TreeTensor, expand, tree_tensors
from .transforms import Piece

if TYPE_CHECKING:
    from ..config import QwenConfig

WEIGHT_DTYPES = ("BF16", "F16", "F32")


class Source(NamedTuple):
    """Where one tree tensor comes from.

    Attributes:
        path: tree path.
        shape: its shape.
        float32: whether it stays float32 in every model.
        pieces: rows of tensors in the folder; together they cover each row of the tree tensor once.
        scheme: how it is in codes; None where it is not. The folder then has the parts of
            `scheme` in place of the tensor that the one piece names.
    """

    path: str
    shape: Shape
    float32: bool
    pieces: tuple[Piece, ...]
    scheme: TensorScheme | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The folder's tensors that it is made of."""
        if self.scheme is None:
            return tuple(dict.fromkeys(piece.key for piece in self.pieces))
        return tuple(f"{self.pieces[0].key}.{part}" for part in self.scheme.parts)


@dataclass(frozen=True)
class LoadPlan:
    """A folder that fits a configuration.

    Attributes:
        folder: the folder.
        config: the configuration to build the model with: the one that was given, except that
            `tie_word_embeddings` is false where the folder has an output head of its own.
        sources: one for each tree tensor, in the order of `tree_tensors(config)`.
        mtp_layers: layers of the multi-token prediction head among the sources; 0 for no head.
        layout: how the folder groups its tensors; where layers differ, any departure from the
            tree's form counts.
        skipped: how many tensors are not part of the text model, by kind ("mtp", "visual",
            "rotary"), or are its embedding once more ("tied head").
        scheme: which of the sources are in codes; empty for a folder of floating point.
        notes: what a person should be told once.
    """

    folder: TensorFolder
    config: QwenConfig
    sources: tuple[Source, ...]
    mtp_layers: int
    layout: Layout
    skipped: Mapping[str, int]
    scheme: Scheme
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the folder's tensors that are read."""
        keys = {key for source in self.sources for key in source.keys}
        return sum(self.folder.tensors[key].nbytes for key in keys)


def plan_load(folder: TensorFolder, config: QwenConfig, *, mtp: bool = False) -> LoadPlan:
    """Finds the source of every tree tensor in a folder.

    Prefix and grouping are decided tensor by tensor from the keys. Vision tensors are skipped and
    counted. An output head in the file wins over `tie_word_embeddings`: where that says tied, a
    head equal to the embedding bit for bit is dropped, and any other is used, with a warning.

    Args:
        folder: the opened folder.
        config: the model that it should hold.
        mtp: whether the multi-token prediction head belongs to the tree if the folder has one;
            else its tensors are skipped and counted.

    Returns:
        The plan; only an output head that might be a copy of the embedding has been read.

    Raises:
        CheckpointError: weights of another quantised format, or keys that are missing, unknown,
            misshapen, of another dtype, found twice, or found in two layouts; all of them in one
            error.
    """
    scheme = Scheme() if folder.dequantises else read_scheme(folder.path, folder.tensors)
    problems = Problems()
    found, prefixes, skipped = _sort_keys(folder, mtp, problems)
    refuse_sizes(folder, config)
    config, dropped = decide_head(folder, config, found)
    if dropped:
        skipped["tied head"] = len(dropped)
    mtp_layers = max(config.mtp_num_hidden_layers, 1) if _any_mtp(found) else 0
    forms, contested = _decide_forms(config, mtp_layers, found, problems)
    spell = speller(prefixes.prefix, prefixes.head_prefix)
    stored = list(
        expand(
            config,
            lambda form, place: (place, form) in forms,
            lambda path: found.get(path, spell(path)),
            mtp_layers,
        )
    )
    tree = tree_tensors(config, mtp_layers)
    plain = [t for t in stored if not any(p.path in scheme.tensors for p in t.pieces)]
    _compare(folder, plain, problems)
    used = {tensor.key for tensor in plain} | dropped | contested
    if scheme.tensors:
        from .codes import compare_codes

        scheme, coded = compare_codes(folder, stored, scheme, tree, problems)
        used |= coded
    unused = [key for key in found.values() if key not in used]
    problems.add("unused", *map(show, unused))
    problems.add("numbers beyond the configuration", *numbers_beyond(unused, config))
    problems.raise_if_any(
        f"{folder.path} does not fit its configuration "
        f"({config.model_type}, {config.num_hidden_layers} layers)",
        "Every tensor of the text model must be there once, in one layout, and nothing else. "
        "Check that config.json and the weights are of one release.",
    )
    notes = [f"skipped {count} {kind} tensors" for kind, count in skipped.items()]
    return LoadPlan(
        folder,
        config,
        _sources(folder, tree, stored, scheme),
        mtp_layers,
        _layout(prefixes, forms),
        skipped,
        scheme,
        (*folder.notes, *notes),
    )


def _any_mtp(found: Mapping[str, str]) -> bool:
    return any(path.startswith(MTP) for path in found)


def _layout(prefixes: Layout, forms: set[tuple[str, Form]]) -> Layout:
    """The prefixes with every departure from the tree's form that some layer shows."""
    options = {
        "mtp_experts" if place.startswith(MTP) and form.option == "experts" else form.option: (
            form.value
        )
        for place, form in forms
    }
    return replace(prefixes, **options)


def _sort_keys(
    folder: TensorFolder, mtp: bool, problems: Problems
) -> tuple[dict[str, str], Layout, dict[str, int]]:
    """Returns key by tree path, the commonest prefixes, and counts of skipped tensors."""
    found: dict[str, str] = {}
    prefixes, skipped = Counter[str](), Counter[str]()
    head_prefix = ""
    for key in folder.tensors:
        kind, path, prefix = parse_key(key)
        if kind == "unknown":
            problems.add("under an unknown prefix", show(key))
        elif kind != "text" and not (kind == "mtp" and mtp):
            skipped[kind] += 1
        elif path in found:
            problems.add("duplicate", f"{show(found[path])} and {show(key)} are one tensor")
        else:
            found[path] = key
            if path == HEAD or path.startswith(f"{HEAD}."):
                head_prefix = prefix
            elif kind == "text":
                prefixes[prefix] += 1
    commonest = prefixes.most_common(1)[0][0] if prefixes else "model."
    return found, Layout(cast(Prefix, commonest), cast(HeadPrefix, head_prefix)), dict(skipped)


def _decide_forms(
    config: QwenConfig, mtp_layers: int, found: Mapping[str, str], problems: Problems
) -> tuple[set[tuple[str, Form]], set[str]]:
    """Returns the forms used under each place, and keys of tensors that are there in two forms."""
    stems = {EXPERT_NUMBER.sub("{e}", path): key for path, key in found.items()}
    forms, contested = set(), set()
    places = [f"layers.{layer}." for layer in range(config.num_hidden_layers)]
    for place in (*places, *(f"{MTP}layers.{layer}." for layer in range(mtp_layers))):
        for form in FORMS:
            others = [stems[place + p.key] for p in form.parts if place + p.key in stems]
            plain = [found[place + path] for path in form.paths if place + path in found]
            if others:
                forms.add((place, form))
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
    within = path.removeprefix(MTP).partition(".")[2].partition(".")[2]
    other = [part.key for form in FORMS if within in form.paths for part in form.parts]
    names_itself = tensor.key.endswith(path)
    return f" (or {' and '.join(other)})" if other and names_itself else ""


def _sources(
    folder: TensorFolder,
    tree: Mapping[str, TreeTensor],
    stored: list[StoredTensor],
    scheme: Scheme,
) -> tuple[Source, ...]:
    """Groups pieces by tree tensor, in the order in which they lie in the files."""

    def position(piece: Piece) -> tuple[str, int]:
        info = folder.tensors.get(piece.key)  # there is none for one in codes
        return ("", 0) if info is None else (info.shard, info.start)

    pieces: dict[str, list[Piece]] = {}
    for piece in (piece for tensor in stored for piece in tensor.pieces):
        pieces.setdefault(piece.path, []).append(piece)
    return tuple(
        Source(
            path,
            tensor.shape,
            tensor.float32,
            tuple(sorted(pieces[path], key=position)),
            scheme.tensors.get(path),
        )
        for path, tensor in tree.items()
    )
