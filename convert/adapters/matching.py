"""Which rows of which tree tensors the tensors of an adapter file change.

A module of the trained model is one stored tensor of some layout, so the mapping table of
`qwen_jax.checkpoint` says where its rows go: an update of `in_proj_qkvz`, say, comes apart as that
matrix does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from qwen_jax.checkpoint.keys import HEAD
from qwen_jax.checkpoint.mapping import EMBEDDING
from qwen_jax.checkpoint.problems import Problems, show
from qwen_jax.checkpoint.tensors import StoredTensor, expand
from qwen_jax.checkpoint.transforms import Piece

from .changes import Change, LowRank, Replacement, TokenRows
from .inputs import CANNOT, LACKING, MISSHAPEN, NO_TENSOR, Inputs
from .keys import AdapterKey
from .settings import is_called
from .updates import Modules, Placed, updates

if TYPE_CHECKING:
    from qwen_jax.config import QwenConfig

# By tree path, then by expert; None where the tensor has no expert axis.
Changes = dict[str, dict[int | None, list[Change]]]


def known_tensors(config: QwenConfig) -> dict[str, StoredTensor]:
    """Every tensor of a model in every layout, an output head of its own among them.

    Args:
        config: the model.

    Returns:
        The tensors by key without a prefix.
    """
    untied = replace(config, tie_word_embeddings=False)
    ways = (expand(untied, lambda *_, grouped=way: grouped, str) for way in (False, True))
    return {tensor.key: tensor for tensor in chain.from_iterable(ways)}


def match(inputs: Inputs, keys: list[AdapterKey], *, tied: bool) -> Changes:
    """Finds what becomes of each tree tensor.

    Args:
        inputs: the adapter file and the model.
        keys: the keys of the file that are of the text model.
        tied: whether the output head of the model is its embedding.

    Returns:
        The changes, to be applied in their order. What does not fit is reported.
    """
    modules = _by_module(inputs, keys)
    changes: Changes = defaultdict(lambda: defaultdict(list))
    found = chain(_whole(inputs, modules), _token_rows(inputs, modules), updates(inputs, modules))
    for path, expert, change in found:
        changes[path][expert].append(change)
    _check_saved(inputs, keys)
    _check_overlaps(inputs.problems, changes)
    if tied:
        _settle_tied(inputs.problems, changes)
    return changes


def _by_module(inputs: Inputs, keys: list[AdapterKey]) -> Modules:
    """Groups keys by module and depth, then by role."""
    modules: Modules = defaultdict(dict)
    for key in keys:
        # A whole tensor is the same one however its module was wrapped.
        place = (key.module, 0 if key.role == "whole" else key.depth)
        other = modules[place].setdefault(key.role, key)
        if other is not key:
            text = f"{show(other.key)} and {show(key.key)} are one tensor"
            inputs.problems.add("duplicate", text)
    return modules


def _whole(inputs: Inputs, modules: Modules) -> Iterator[Placed]:
    """Tensors that take the place of the model's."""
    for key in (roles["whole"] for roles in modules.values() if "whole" in roles):
        tensor = inputs.known.get(key.module)
        if tensor is None:
            inputs.problems.add(NO_TENSOR, show(key.key))
        elif inputs.fits(key, tensor.shape):
            stored = inputs.read(key)
            for piece in tensor.pieces:
                if piece.expert is None and ".experts." in piece.path:
                    yield from _expert_by_expert(piece, stored)
                else:
                    yield piece.path, piece.expert, Replacement(piece, stored)


def _expert_by_expert(piece: Piece, stored: np.ndarray) -> Iterator[Placed]:
    for expert, matrix in enumerate(stored):
        part = Piece(piece.path, piece.key, 1, 0, len(matrix), 0, expert)
        yield piece.path, expert, Replacement(part, matrix)


def _token_rows(inputs: Inputs, modules: Modules) -> Iterator[Placed]:
    """Single rows of an embedding that take the place of the model's."""
    for key in (roles["tokens"] for roles in modules.values() if "tokens" in roles):
        given = inputs.settings.tokens.items()
        ids = next((ids for name, ids in given if is_called(key.name, name)), None)
        path = f"{key.module}.weight"
        if path not in (EMBEDDING, HEAD):
            inputs.problems.add(NO_TENSOR, show(key.key))
        elif ids is None:
            text = f"{show(key.key)}: trainable_token_indices says nothing of its rows"
            inputs.problems.add(LACKING, text)
        else:
            rows, columns = inputs.known[path].shape
            if max(ids, default=0) >= rows:
                text = f"trainable_token_indices has {max(ids)}, {path} has {rows} rows"
                inputs.problems.add(MISSHAPEN, text)
            elif inputs.fits(key, (len(ids), columns)):
                yield path, None, TokenRows(np.array(ids, np.int64), inputs.read(key))


def _check_saved(inputs: Inputs, keys: list[AdapterKey]) -> None:
    """Reports modules of the model that should be in the file as a whole, and are not."""
    whole = [key.name.rpartition(".")[0] for key in keys if key.role == "whole"]
    modules = {key.rpartition(".")[0] for key in inputs.known}
    for saved in inputs.settings.saved:
        inside = any(f".{saved}." in f".{module}." for module in whole)
        if not inside and any(is_called(module, saved) for module in modules):
            text = f"modules_to_save names {show(saved)}, of which the file has no tensor"
            inputs.problems.add(LACKING, text)


def _check_overlaps(problems: Problems, changes: Changes) -> None:
    """Reports rows that are changed twice where the order would matter or nobody means it."""
    for path, by_expert in changes.items():
        for found in by_expert.values():
            of_kind = defaultdict(set)
            for change in found:
                pieced = isinstance(change, LowRank | Replacement)
                of_kind[type(change)].add(change.piece.key if pieced else path)
            twice = any(len(keys) > 1 and path in keys for keys in of_kind.values())
            if twice or (TokenRows in of_kind and len(of_kind) > 1):
                problems.add("ambiguous", f"{path} is changed in two ways")
                break


def _settle_tied(problems: Problems, changes: Changes) -> None:
    """Keeps one of the changes of embedding and head if they are the same, else reports them.

    PEFT's own merging adds both to the shared matrix, although each was trained for one side.
    """
    head = changes.pop(HEAD, {}).get(None, [])
    embedding = changes.get(EMBEDDING, {}).get(None, [])
    # These are trained on both sides at once, and stored once.
    if embedding and not head and all(isinstance(c, TokenRows) for c in embedding):
        return
    pairs = zip(head, embedding, strict=False)
    if len(head) != len(embedding) or not all(a.same(b) for a, b in pairs):
        changed = " and ".join(
            name for name, found in ((EMBEDDING, embedding), (HEAD, head)) if found
        )
        problems.add(
            CANNOT,
            f"{changed}: the model's output head is its embedding, and the adapter changes "
            f"{'them differently' if head and embedding else 'one of the two only'}. "
            "Convert a copy of the model that has tie_word_embeddings false and an lm_head.weight "
            "of its own, equal to the embedding",
        )
