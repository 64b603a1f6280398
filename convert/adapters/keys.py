"""Keys of an adapter file taken apart.

PEFT writes `base_model.model.`, the module's name in the model that was trained, and what the
tensor is to that module. It leaves out the name of the adapter (`lora_A.weight`); other programs
leave it in (`lora_A.default.weight`).
"""

from __future__ import annotations

from typing import NamedTuple

from qwen_jax.checkpoint.keys import CONTAINERS, VISUAL

_WRAPPERS = ["base_model", "model"]
_LORA = {
    "lora_A": ("A", ["weight"]),
    "lora_B": ("B", ["weight"]),
    "lora_embedding_A": ("embedding A", []),
    "lora_embedding_B": ("embedding B", []),
    "trainable_tokens_delta": ("tokens", []),
}
_NESTED = "base_layer"
_SAVED = "modules_to_save"


class AdapterKey(NamedTuple):
    """One key taken apart.

    Attributes:
        key: the key.
        role: "A", "B", "embedding A", "embedding B" (factors of a LoRA update), "tokens" (rows of
            an embedding), "whole" (a tensor that takes the place of the model's), "visual" (of
            the vision tower) or "unknown".
        name: the module as PEFT calls it, to which its patterns apply.
        module: its tree path; that of the tensor itself if `role` is "whole".
        depth: how many further updates the module was wrapped in, for several fused parameters
            of one module are nested.
    """

    key: str
    role: str
    name: str = ""
    module: str = ""
    depth: int = 0


def parse_adapter_key(key: str) -> AdapterKey:
    """Takes a key apart by whole segments."""
    segments = key.split(".")
    if segments[:2] == _WRAPPERS:
        segments = segments[2:]
    prefix = next((i for i, s in enumerate(segments) if s not in CONTAINERS), len(segments))
    rest = segments[prefix:]
    if rest and rest[0] in VISUAL:
        return AdapterKey(key, "visual")
    start = next((i for i, s in enumerate(rest) if s in _LORA), None)
    if start is not None:
        role, ending = _LORA[rest[start]]
        module, after = rest[:start], rest[start + 1 :]
        # At most the name of the adapter stands between.
        if after[len(after) - len(ending) :] != ending or len(after) > len(ending) + 1:
            return AdapterKey(key, "unknown")
    elif any(s.startswith("lora_") for s in rest):
        return AdapterKey(key, "unknown")
    else:
        role, module = "whole", _without_saved(rest)
    if role == "tokens":
        module = [s for s in module if s != "token_adapter"]
    depth = module.count(_NESTED)
    module = [s for s in module if s != _NESTED]
    if not module:
        return AdapterKey(key, "unknown")
    return AdapterKey(key, role, ".".join(segments[:prefix] + module), ".".join(module), depth)


def _without_saved(segments: list[str]) -> list[str]:
    """Leaves out the segment of the wrapper, and PEFT's usual name of an adapter behind it."""
    if _SAVED not in segments:
        return segments
    place = segments.index(_SAVED)
    after = segments[place + 1 :]
    return segments[:place] + (after[1:] if after[:1] == ["default"] else after)
