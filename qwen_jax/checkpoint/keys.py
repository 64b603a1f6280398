"""Keys of model folders: prefixes of the text model, and tensors that it does not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

HEAD = "lm_head.weight"
MTP = "mtp."

Prefix = Literal["model.", "model.language_model.", "language_model.model."]
HeadPrefix = Literal["", "language_model."]

PREFIXES: tuple[Prefix, ...] = ("model.", "model.language_model.", "language_model.model.")
HEAD_PREFIXES: tuple[HeadPrefix, ...] = ("", "language_model.")

# First segments of keys: of what holds the text model, and of the vision tower.
CONTAINERS = ("model", "language_model")
VISUAL = ("visual", "vision_tower")


class Key(NamedTuple):
    """One key taken apart.

    Attributes:
        kind: "text" (a tensor of the text model), "mtp" (of its multi-token prediction head),
            "visual" or "rotary" (not used by it), or "unknown".
        path: the tree path if `kind` is "text" or "mtp", else the key itself.
        prefix: what stands before the tree path; empty if `kind` is not "text".
    """

    kind: Literal["text", "mtp", "visual", "rotary", "unknown"]
    path: str
    prefix: str = ""


def parse_key(key: str) -> Key:
    """Takes a key apart by whole segments.

    Args:
        key: a key of a model folder, such as `model.language_model.layers.0.mlp.gate.weight`.

    Returns:
        Its kind and, for a tensor of the text model, its tree path. A key under a prefix that no
        release uses is "unknown".
    """
    segments = key.split(".")
    last = len(segments) - 1
    depth = next((i for i, s in enumerate(segments[:-1]) if s not in CONTAINERS), last)
    prefix, rest = "".join(f"{s}." for s in segments[:depth]), segments[depth:]
    if rest[0] == "mtp":
        return Key("mtp", ".".join(rest))
    if rest[0] in VISUAL:
        return Key("visual", key)
    if rest[-2:] == ["rotary_emb", "inv_freq"]:
        return Key("rotary", key)
    path = ".".join(rest)
    head = path == HEAD or path.startswith(f"{HEAD}.")  # the latter for a part of its codes
    known = prefix in HEAD_PREFIXES if head else prefix in PREFIXES
    return Key("text", path, prefix) if known else Key("unknown", key)


def speller(prefix: str, head_prefix: str = "") -> Callable[[str], str]:
    """Gives the function from tree paths to keys under a prefix: the inverse of `parse_key`."""

    def spell(path: str) -> str:
        if path.startswith(MTP):
            return path
        return (head_prefix if path == HEAD else prefix) + path

    return spell
