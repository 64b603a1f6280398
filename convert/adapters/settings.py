"""`adapter_config.json`: how strong each update is, and what this project cannot merge.

Fields as PEFT 0.21 writes them (`peft.LoraConfig`); those of earlier releases are among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.problems import Problems, listed, show
from qwen_jax.errors import CheckpointError

CONFIG = "adapter_config.json"

# Where the adapter comes from, how it was trained, and which modules it has: the file of tensors
# says that itself.
_WITHOUT_EFFECT = {
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "target_modules", "exclude_modules", "lora_dropout"),
    *("layers_to_transform", "layers_pattern", "ensure_weight_tying", "megatron_core"),
    *("qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
_READ = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters"),
    *("modules_to_save", "trainable_token_indices", "peft_version", "bias", "init_lora_weights"),
    "fan_in_fan_out",
}
_REFUSED = {
    "use_dora": "DoRA scales the rows of the weights as well",
    "lora_bias": "the updates have biases",
    "use_qalora": "QALoRA pools the inputs",
    "alora_invocation_tokens": "an activated LoRA is on for some tokens only",
    "layer_replication": "it repeats layers of the model",
    "megatron_config": "its layers are split as Megatron does",
    "velora_config": "VeLoRA is not known here",
    "kasa_config": "KaSA changes the weights of the model",
    "monteclora_config": "its updates are random",
    "use_bdlora": "its factors are block diagonal",
    "arrow_config": "it chooses between adapters token by token",
}
# These begin from the model's own weights; the others that PEFT knows begin from changed ones.
_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
_LARGEST = 2**31


@dataclass(frozen=True)
class AdapterSettings:
    """What of `adapter_config.json` bears on the merged weights.

    Attributes:
        r: rank of an update.
        alpha: numerator of its scale.
        rslora: whether the denominator is the square root of the rank, else the rank.
        ranks: ranks of modules whose names match.
        alphas: the same for `alpha`.
        parameters: names of tensors that were adapted without their modules.
        saved: names of modules whose tensors are in the file as a whole.
        tokens: rows of embeddings that are in the file, by module name.
        version: the PEFT release that wrote the file; empty before 0.18.
        notes: what a person should be told once.
    """

    r: int
    alpha: float
    rslora: bool
    ranks: tuple[tuple[re.Pattern[str], float], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    parameters: tuple[str, ...]
    saved: tuple[str, ...]
    tokens: Mapping[str, tuple[int, ...]]
    version: str
    notes: tuple[str, ...]

    def rank(self, name: str, parameter: str = "weight") -> int:
        """The rank of an update; see `scale` for the arguments."""
        return int(_first_match(self.ranks, self._adapted(name, parameter), self.r))

    def scale(self, name: str, parameter: str = "weight") -> float:
        """The factor of an update.

        Args:
            name: name of the module in the model that was trained.
            parameter: which of its tensors; patterns see it only if the tensor was adapted
                without the module.
        """
        alpha = _first_match(self.alphas, self._adapted(name, parameter), self.alpha)
        rank = self.rank(name, parameter)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def _adapted(self, name: str, parameter: str) -> str:
        full = f"{name}.{parameter}"
        alone = parameter != "weight" or any(is_called(full, p) for p in self.parameters)
        return full if alone else name


def is_called(name: str, ending: str) -> bool:
    """Whether whole segments at the end of a name, or all of it, are the given ones."""
    return name == ending or name.endswith(f".{ending}")


def _first_match(
    patterns: tuple[tuple[re.Pattern[str], float], ...], name: str, otherwise: float
) -> float:
    return next((value for pattern, value in patterns if pattern.match(name)), otherwise)


def read_settings(folder: Path, problems: Problems) -> AdapterSettings:
    """Reads `adapter_config.json`.

    Args:
        folder: the adapter folder.
        problems: receives every setting that cannot be merged or is malformed.

    Returns:
        The settings, with defaults for those that are malformed.

    Raises:
        CheckpointError: there is no such file, it is no JSON object, or not of a LoRA adapter.
    """
    fields = _load(folder)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{folder / CONFIG}: peft_type is {show(kind)}; only LORA can be merged. "
            "Merge the adapter with the program that made it, then convert the result"
        )
    _refuse(fields, problems)
    reader = _Reader(fields, problems)
    inert = ("fan_in_fan_out has no effect on the layers of this model, as in PEFT",)
    return AdapterSettings(
        r=int(reader.number("r", 8, whole=True)),
        alpha=reader.number("lora_alpha", 8),
        rslora=reader.flag("use_rslora"),
        ranks=reader.patterns("rank_pattern", whole=True),
        alphas=reader.patterns("alpha_pattern"),
        parameters=reader.names("target_parameters"),
        saved=reader.names("modules_to_save"),
        tokens=reader.token_rows("trainable_token_indices"),
        version=str(fields.get("peft_version") or ""),
        notes=inert if reader.flag("fan_in_fan_out") else (),
    )


def _load(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} does not exist; give the folder of an adapter (ids on the Hub are not "
            "fetched for adapters: download it first)"
        )
    if not file.is_file():
        below = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
        hint = f" There is one in: {listed(below)}." if below else ""
        raise CheckpointError(
            f"{folder} has no {CONFIG}; give a folder that PEFT's save_pretrained wrote.{hint}"
        )
    return read_object(file)


def _refuse(fields: Mapping[str, Any], problems: Problems) -> None:
    """Reports settings whose meaning is known not to fit, and those with none known."""
    for name, value in fields.items():
        given = f"{show(name)} is {show(value)}"
        if name in _REFUSED and value:
            problems.add("cannot be merged", f"{given}: {_REFUSED[name]}")
        elif name not in _WITHOUT_EFFECT | _READ | _REFUSED.keys() and value:
            problems.add("unknown settings", given)
    if fields.get("bias") not in (None, "none"):
        text = f"bias is {show(fields['bias'])}: the biases of the model were trained as well"
        problems.add("cannot be merged", f"{text}; accepted: none")
    start = fields.get("init_lora_weights", True)
    if start not in _STARTS:
        problems.add(
            "cannot be merged",
            f"init_lora_weights is {show(start)}: the adapter may belong to changed weights; "
            f"accepted: {listed(_STARTS)}. PEFT's save_pretrained makes a plain adapter of it "
            "with path_initial_model_for_weight_conversion",
        )


class _Reader:
    """Reads fields of expected types, and reports others."""

    def __init__(self, fields: Mapping[str, Any], problems: Problems) -> None:
        self._fields = fields
        self._problems = problems

    def _malformed(self, name: str, expected: str) -> None:
        value = show(self._fields[name])
        self._problems.add("malformed settings", f"{name} is {value}; expected {expected}")

    def number(self, name: str, default: float, *, whole: bool = False) -> float:
        value = self._fields.get(name, default)
        if _is_number(value, whole):
            return value
        self._malformed(name, "a whole number above 0" if whole else "a number")
        return default

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if not isinstance(value, bool | None):
            self._malformed(name, "true or false")
        return bool(value)

    def names(self, name: str) -> tuple[str, ...]:
        value = self._fields.get(name) or []
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._malformed(name, "a list of names")
        return ()

    def patterns(
        self, name: str, *, whole: bool = False
    ) -> tuple[tuple[re.Pattern[str], float], ...]:
        """Regular expressions for the end of a module name, as PEFT applies them, and values."""
        value = self._fields.get(name) or {}
        if not isinstance(value, dict) or not all(_is_number(v, whole) for v in value.values()):
            self._malformed(name, "an object of numbers by pattern")
            return ()
        found = []
        for pattern, number in value.items():
            try:
                found.append((re.compile(rf"(.*\.)?({pattern})$"), number))
            except (re.error, RecursionError, OverflowError) as error:
                text = f"{name}: {show(pattern)} is no regular expression ({error})"
                self._problems.add("malformed settings", text)
        return tuple(found)

    def token_rows(self, name: str) -> dict[str, tuple[int, ...]]:
        value = self._fields.get(name) or {}
        value = {"embed_tokens": value} if isinstance(value, list) else value
        if isinstance(value, dict) and all(_are_ids(ids) for ids in value.values()):
            return {module: tuple(ids) for module, ids in value.items()}
        self._malformed(name, "a list of different token ids, or such lists by module")
        return {}


def _is_number(value: Any, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return 0 < value < _LARGEST if whole else abs(value) < _LARGEST


def _are_ids(value: Any) -> bool:
    """Whether a value is a list of different whole numbers from 0."""
    return (
        isinstance(value, list)
        and all(type(number) is int and 0 <= number < _LARGEST for number in value)
        and len(set(value)) == len(value)
    )
