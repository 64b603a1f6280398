"""Which mixer each layer has: the list a `config.json` gives, or the rule of its model type."""

from __future__ import annotations

from .families import FULL, LINEAR, SLIDING, Family
from .field_reader import FieldReader, is_sequence

# Defaults of transformers for fields that only matter under `use_sliding_window`.
_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28
_FULL_ATTENTION_INTERVAL = 4


def read_layer_types(
    reader: FieldReader, family: Family, num_layers: int
) -> tuple[tuple[str, ...], int | None]:
    """Return the kind of each layer, and the window of those that slide.

    Args:
        reader: Reader of the text-level object.
        family: The model type's traits.
        num_layers: Number of decoder layers.

    Returns:
        One of `full_attention`, `sliding_attention` and `linear_attention` a layer, and the window
        in tokens (None where no layer slides).
    """
    window = _window(reader) if family.sliding is not None else None
    given = reader.values.get("layer_types")
    if given is None:
        kinds = _default_kinds(reader, family, num_layers, window)
    elif is_sequence(given) and all(isinstance(kind, str) for kind in given):
        kinds = tuple(str(kind) for kind in given)
    else:
        reader.refuse("layer_types", f"a list of {num_layers} layer kinds")
        return (FULL,) * num_layers, None
    if family.sliding == "all" and window is not None and set(kinds) != {SLIDING}:
        reader.refuse("layer_types", "only sliding_attention, as use_sliding_window is true")
    return kinds, window if SLIDING in kinds else None


def _window(reader: FieldReader) -> int | None:
    if not reader.flag("use_sliding_window", False):
        return None
    if "sliding_window" not in reader.values:
        return _WINDOW
    return reader.optional_integer("sliding_window")


def _default_kinds(
    reader: FieldReader, family: Family, num_layers: int, window: int | None
) -> tuple[str, ...]:
    if LINEAR in family.layer_kinds:
        interval = reader.optional_integer("full_attention_interval") or _FULL_ATTENTION_INTERVAL
        return tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    if window is None:
        return (FULL,) * num_layers
    border = reader.integer("max_window_layers", _MAX_WINDOW_LAYERS, 0)
    slides = {
        "from_max_window_layers": lambda i: i >= border,
        "even_below_max_window_layers": lambda i: i < border and i % 2 == 0,
        "all": lambda i: True,
    }[family.sliding or "all"]
    return tuple(SLIDING if slides(i) else FULL for i in range(num_layers))
