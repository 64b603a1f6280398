"""Rotary position parameters, and how the two spellings of a `config.json` become one.

The old spelling has `rope_theta`, `rope_scaling` and `partial_rotary_factor` beside the other
fields; the new one puts everything in the object `rope_parameters`. The order of precedence is that
of transformers: a `rope_scaling` that is not empty replaces `rope_parameters`, and a value inside
the object wins over one beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .field_reader import Findings, is_integer, is_number, is_sequence, show

_DEFAULT_THETA = 10000.0
_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
    ),
}
_SHARED_KEYS = (
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
)


@dataclass(frozen=True)
class RopeParameters:
    """Rotary position parameters, as in the `rope_parameters` of transformers.

    Attributes:
        rope_theta: Base of the geometric series of wavelengths.
        rope_type: `default`, `linear` or `yarn`.
        partial_rotary_factor: Fraction of each head's dimensions that rotates.
        factor: Context extension factor of `linear` and `yarn`.
        original_max_position_embeddings: Context length before extension, in tokens (`yarn`).
        attention_factor: Multiplier of cos and sin (`yarn`); None derives it from `factor`.
        beta_fast: Rotations over the original context above which a frequency is kept (`yarn`).
        beta_slow: Rotations over the original context below which a frequency is interpolated
            (`yarn`).
        truncate: Whether the borders of the `yarn` ramp are rounded to whole frequencies.
        mscale: Numerator's weight in a derived attention factor (`yarn`).
        mscale_all_dim: Denominator's weight in a derived attention factor (`yarn`).
        mrope_section: Frequencies that follow the time, height and width position; no effect on
            text.

    Raises:
        ConfigError: A value is out of range, or set for a `rope_type` that does not use it.
    """

    rope_theta: float = _DEFAULT_THETA
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    mrope_section: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse values that are out of range or have no effect."""
        findings = Findings()
        _check(vars(self), findings)
        findings.raise_problems("RopeParameters", "Correct these values.")

    def to_hf(self) -> dict[str, object]:
        """Return the `rope_parameters` object of a `config.json`."""
        block: dict[str, object] = {
            "rope_type": self.rope_type,
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        for item in fields(self):
            value: object = getattr(self, item.name)
            if item.name in _SCALING_KEYS[self.rope_type]:
                if value != item.default or item.name == "factor":
                    block[item.name] = value
        if self.mrope_section is not None:
            block |= {"mrope_section": list(self.mrope_section), "mrope_interleaved": True}
        return block


def read_rope_parameters(
    text: Mapping[str, object],
    findings: Findings,
    *,
    default_partial_rotary_factor: float,
    max_position_embeddings: int,
) -> RopeParameters:
    """Resolve both spellings of rotary parameters.

    Args:
        text: The text-level object of a `config.json`.
        findings: Where problems and notes are recorded.
        default_partial_rotary_factor: The family's fraction, for a file that gives none.
        max_position_embeddings: The file's context length, in tokens.

    Returns:
        The parameters; the defaults where a problem was recorded.
    """
    known = len(findings.problems)
    block = _chosen_block(text, findings)
    values = {key: value for key, value in block.items() if key in RopeParameters.__annotations__}
    values["rope_type"] = _rope_type(block, findings)
    _drop_unused(values, block, findings)
    _fill_from_beside(values, text, default_partial_rotary_factor, findings)
    if values["rope_type"] == "yarn":
        _fill_yarn(values, text, max_position_embeddings, findings)
    elif values["rope_type"] == "linear" and "factor" not in values:
        findings.refuse("rope_parameters.factor", None, "the context extension factor of linear")
    _check(values, findings, "rope_parameters.")
    if len(findings.problems) > known:
        return RopeParameters()
    return _build(values)


def _chosen_block(text: Mapping[str, object], findings: Findings) -> dict[str, object]:
    """Return the object that holds rotary parameters, without its null entries."""
    scaling, parameters = text.get("rope_scaling"), text.get("rope_parameters")
    for name, block in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if block is not None and not isinstance(block, Mapping):
            findings.refuse(name, block, "an object or null")
            return {}
    if scaling and parameters and scaling != parameters:
        findings.notes.append("rope_scaling replaces the whole of rope_parameters; both are given")
    chosen: Mapping[str, object] = {}
    for block in (parameters, scaling):
        if isinstance(block, Mapping) and block:
            chosen = block
    nested = [str(key) for key, value in chosen.items() if isinstance(value, Mapping)]
    if nested:
        findings.refuse(
            "rope_parameters", chosen, f"one flat object for all layers, not one for {nested}"
        )
        return {}
    return {str(key): value for key, value in chosen.items() if value is not None}


def _rope_type(block: Mapping[str, object], findings: Findings) -> object:
    """Return the type under its present key, `rope_type`, or its legacy key, `type`."""
    chosen = block.get("rope_type", block.get("type", "default"))
    if block.get("type", chosen) != chosen:
        findings.notes.append(
            f"rope_type {show(chosen)} is used; the legacy key type says {show(block['type'])}"
        )
    return chosen


def _drop_unused(
    values: dict[str, object], block: Mapping[str, object], findings: Findings
) -> None:
    """Leave out what the rope type does not use, as transformers does, but say so."""
    rope_type = str(values["rope_type"])
    if rope_type not in _SCALING_KEYS:
        return
    unused = [key for key in block if key not in _SHARED_KEYS + _SCALING_KEYS[rope_type]]
    for key in unused:
        values.pop(key, None)
    if unused:
        findings.notes.append(
            f"rope parameters {unused} have no effect with rope_type {rope_type!r}"
        )


def _fill_from_beside(
    values: dict[str, object],
    text: Mapping[str, object],
    default_partial_rotary_factor: float,
    findings: Findings,
) -> None:
    """Fill the two parameters that the old spelling has beside the other fields."""
    for name in ("rope_theta", "partial_rotary_factor"):
        beside = text.get(name)
        if beside is not None and values.setdefault(name, beside) != beside:
            findings.notes.append(
                f"{name} {show(values[name])} of the rope parameters is used; "
                f"the one beside them is {show(beside)}"
            )
    values.setdefault("partial_rotary_factor", default_partial_rotary_factor)
    if "rope_theta" not in values:
        values["rope_theta"] = _DEFAULT_THETA
        findings.notes.append("no rope_theta is given: 10000 is used, as transformers does")


def _fill_yarn(
    values: dict[str, object],
    text: Mapping[str, object],
    max_position_embeddings: int,
    findings: Findings,
) -> None:
    """Fill the two numbers yarn cannot do without, and compare them with the context length."""
    beside = text.get("original_max_position_embeddings")
    if beside is not None:
        values["original_max_position_embeddings"] = beside
    original = values.setdefault("original_max_position_embeddings", max_position_embeddings)
    if not is_integer(original, 1):
        return
    ratio = max_position_embeddings / original
    if "factor" in values:
        if ratio not in (1.0, values["factor"]):
            findings.notes.append(
                f"yarn factor {show(values['factor'])} is used, but max_position_embeddings / "
                f"original is {max_position_embeddings} / {original} = {ratio:g}"
            )
    elif ratio > 1.0:
        values["factor"] = ratio
        findings.notes.append(
            f"yarn without factor: {max_position_embeddings} / {original} = {ratio:g} is used"
        )
    else:
        findings.refuse("rope_parameters.factor", None, "the context extension factor of yarn")


def _within(low: float, high: float = float("inf")) -> Callable[[object], bool]:
    return lambda value: is_number(value) and low < value <= high


def _is_section(value: object) -> bool:
    return is_sequence(value) and len(value) == 3 and all(is_integer(item, 0) for item in value)


_POSITIVE = (_within(0.0), "a number above 0")
_FINITE = (is_number, "a finite number")
_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "rope_theta": (_within(1.0), "a number above 1"),
    "rope_type": (
        lambda value: isinstance(value, str) and value in _SCALING_KEYS,
        "default, linear, yarn",
    ),
    "partial_rotary_factor": (_within(0.0, 1.0), "a number above 0, at most 1"),
    "factor": _POSITIVE,
    "original_max_position_embeddings": (lambda value: is_integer(value, 1), "an integer above 0"),
    "attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "truncate": (lambda value: isinstance(value, bool), "true or false"),
    "mscale": _FINITE,
    "mscale_all_dim": _FINITE,
    "mrope_section": (_is_section, "three integers of at least 0"),
}


def _check(values: Mapping[str, Any], findings: Findings, prefix: str = "") -> None:
    """Record every value that is not accepted; a field that is absent has its default."""
    known = len(findings.problems)
    for item in fields(RopeParameters):
        value = values.get(item.name, item.default)
        accepts, accepted = _RULES[item.name]
        if not accepts(value) and not (value is None and item.default is None):
            findings.refuse(prefix + item.name, value, accepted)
    if len(findings.problems) == known:
        defaults = {item.name: item.default for item in fields(RopeParameters)}
        _check_together(defaults | dict(values), findings, prefix)


def _check_together(values: Mapping[str, Any], findings: Findings, prefix: str) -> None:
    """Record what contradicts the rope type, or another value."""
    rope_type = values["rope_type"]
    for item in fields(RopeParameters):
        idle = item.name in _SCALING_KEYS["yarn"] and item.name not in _SCALING_KEYS[rope_type]
        if idle and values[item.name] != item.default:
            accepted = f"{show(item.default)} with rope_type {rope_type!r}, which does not use it"
            findings.refuse(prefix + item.name, values[item.name], accepted)
    if rope_type == "yarn" and values["original_max_position_embeddings"] is None:
        accepted = "an integer above 0 with rope_type 'yarn'"
        findings.refuse(prefix + "original_max_position_embeddings", None, accepted)
    if values["beta_fast"] <= values["beta_slow"]:
        findings.refuse(prefix + "beta_fast", values["beta_fast"], "a number above beta_slow")


def _build(values: Mapping[str, object]) -> RopeParameters:
    """Return parameters from checked values: numbers as floats, lists as tuples."""
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if is_sequence(value):
            value = tuple(value)
        elif is_number(value) and name != "original_max_position_embeddings":
            value = float(value)
        converted[name] = value
    return RopeParameters(**converted)
