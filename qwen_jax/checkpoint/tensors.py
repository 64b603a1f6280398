"""The mapping table expanded for one model: the tensors of its tree, and of a folder with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CheckpointError
from .keys import MTP, speller
from .mapping import FORMS, LAYER_ROWS, MODEL_ROWS, MTP_ROWS, Form, Layout, Row, group_rows
from .transforms import Piece

if TYPE_CHECKING:
    from ..config import QwenConfig

Shape = tuple[int, ...]


class TreeTensor(NamedTuple):
    """A tensor of the parameter tree; `float32` where it keeps that dtype in every model."""

    shape: Shape
    float32: bool


class StoredTensor(NamedTuple):
    """A tensor of a folder, and which of its rows are which rows of which tree tensors."""

    key: str
    shape: Shape
    pieces: tuple[Piece, ...]


def tree_tensors(config: QwenConfig, mtp_layers: int = 0) -> dict[str, TreeTensor]:
    """Lists the parameter tree of a configuration.

    Args:
        config: the model; with `tie_word_embeddings` the tree has no `lm_head.weight`.
        mtp_layers: layers of the multi-token prediction head; 0 leaves the head out.

    Returns:
        Shape and kept dtype by tree path.
    """
    return {
        place.prefix + path: TreeTensor(place.shapes[path], row.float32)
        for place in _places(config, mtp_layers)
        for path, row in place.rows.items()
    }


def stored_tensors(
    config: QwenConfig, layout: Layout, mtp_layers: int = 0
) -> dict[str, StoredTensor]:
    """Lists every tensor of a folder that holds a model in a given layout.

    Args:
        config: the model.
        layout: prefix and grouping.
        mtp_layers: layers of the multi-token prediction head; 0 leaves the head out.

    Returns:
        Shape and pieces by key. Each row of each tree tensor is in exactly one piece.
    """
    spell = speller(layout.prefix, layout.head_prefix)

    def chosen(form: Form, place: str) -> bool:
        return layout.option(form.option, place) == form.value

    stored = expand(config, chosen, spell, mtp_layers)
    return {tensor.key: tensor for tensor in stored}


def expand(
    config: QwenConfig,
    chosen: Callable[[Form, str], bool],
    spell: Callable[[str], str],
    mtp_layers: int = 0,
) -> Iterator[StoredTensor]:
    """Expands the mapping table over the layers and experts of a model.

    Args:
        config: the model.
        chosen: whether a form is used under a place such as `layers.3.`; a tree tensor that no
            chosen form covers is stored as it is.
        spell: the key in the folder of a tree path, or of the key of a `Part` with its layer and
            expert.
        mtp_layers: layers of the multi-token prediction head; 0 leaves the head out.

    Yields:
        The stored tensors of the model, layer by layer.
    """
    for place in _places(config, mtp_layers):
        forms = [f for f in FORMS if f.paths[0] in place.rows and chosen(f, place.prefix)]
        for form in forms:
            yield from _expand_form(form, place, spell)
        grouped = {path for form in forms for path in form.paths}
        for path in (path for path in place.rows if path not in grouped):
            shape, key = place.shapes[path], spell(place.prefix + path)
            whole = Piece(place.prefix + path, key, 1, 0, shape[0], 0)
            yield StoredTensor(key, shape, (whole,))


class _Place(NamedTuple):
    """The model itself, a layer, or a part of the MTP head: prefix, rows that it has, and sizes."""

    prefix: str
    rows: dict[str, Row]
    shapes: dict[str, Shape]
    sizes: dict[str, int]


def _places(config: QwenConfig, mtp_layers: int) -> Iterator[_Place]:
    of_layer = (*LAYER_ROWS, *group_rows(config))
    yield _place("", MODEL_ROWS, config, None)
    for layer in range(config.num_hidden_layers):
        yield _place(f"layers.{layer}.", of_layer, config, layer)
    if mtp_layers:
        yield _place(MTP, MTP_ROWS, config, None)
        for layer in range(mtp_layers):
            yield _place(f"{MTP}layers.{layer}.", of_layer, config, layer_like_mtp(config))


def _place(prefix: str, table: tuple[Row, ...], config: QwenConfig, layer: int | None) -> _Place:
    rows = {row.path: row for row in table if row.when(config, -1 if layer is None else layer)}
    sizes = _model_sizes(config) if layer is None else _sizes(config, layer)
    return _Place(
        prefix, rows, {path: _shape(row.shape, sizes) for path, row in rows.items()}, sizes
    )


def layer_like_mtp(config: QwenConfig) -> int:
    """The last layer with the parts of an MTP layer: attention, and experts if the model has any.

    Raises:
        CheckpointError: the model has no attention layer, so that no MTP head is known for it.
    """
    attention = [i for i, kind in enumerate(config.layer_types) if kind != "linear_attention"]
    sparse = [i for i in attention if config.is_sparse(i)]
    if not attention:
        raise CheckpointError(
            "the folder has mtp.* tensors, but its configuration has no attention layer, which an "
            "MTP layer is; check that config.json and the weights are of one release"
        )
    return (sparse or attention)[-1]


def _expand_form(form: Form, place: _Place, spell: Callable[[str], str]) -> Iterator[StoredTensor]:
    """Yields the stored tensors of one form in one layer, expert by expert where stacked."""
    used = dict.fromkeys(form.paths, 0)
    for part in form.parts:
        blocks, start, runs = _extent(part.blocks, place.sizes), 0, []
        for path, extent in part.segments:
            rows = _extent(extent, place.sizes)
            runs.append((place.prefix + path, start, rows, used[path]))
            used[path] += blocks * rows
            start += rows
        shape = place.shapes[part.segments[0][0]]
        shape = (blocks * start, *shape[2 if form.stacked else 1 :])
        for expert in range(place.sizes["E"]) if form.stacked else (None,):
            key = spell(place.prefix + part.key.replace("{e}", str(expert)))
            pieces = tuple(
                Piece(path, key, blocks, stored_start, rows, tree_start, expert)
                for path, stored_start, rows, tree_start in runs
            )
            yield StoredTensor(key, shape, pieces)


def _model_sizes(config: QwenConfig) -> dict[str, int]:
    return {"V": config.vocab_size, "D": config.hidden_size}


def _sizes(config: QwenConfig, layer: int) -> dict[str, int]:
    """Values of the letters of `mapping` in one layer, without those of parts that it lacks."""
    sizes = _model_sizes(config)
    if config.layer_types[layer] == "linear_attention":
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        sizes |= {"Hk": key_heads, "Hv": value_heads, "R": value_heads // key_heads}
        sizes |= {"Dk": config.linear_key_head_dim, "Dv": config.linear_value_head_dim}
        sizes |= {"C": config.conv_dim, "W": config.linear_conv_kernel_dim}
    else:
        sizes |= {"N": config.num_attention_heads, "K": config.num_key_value_heads}
        sizes |= {"H": config.head_dim, "G": 2 if config.attn_gate else 1}
    if config.is_sparse(layer):
        sizes |= {"E": config.num_experts, "F": config.width("moe_intermediate_size", layer)}
        widths = config.expert_group_widths
        if widths:
            sizes["Eg"] = config.num_experts // len(widths)
        sizes |= {f"F{group}": width for group, width in enumerate(widths)}
        sizes |= {"Fs": config.width("shared_expert_intermediate_size", layer)}
    else:
        sizes |= {"Fd": config.width("intermediate_size", layer)}
    return sizes


def _shape(letters: str, sizes: dict[str, int]) -> Shape:
    return tuple(_extent(product, sizes) for product in letters.split())


def _extent(product: str, sizes: dict[str, int]) -> int:
    """Value of a product of letters and numbers, such as `2*F`."""
    return math.prod(int(f) if f.isdecimal() else sizes[f] for f in product.split("*"))
