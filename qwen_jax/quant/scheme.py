"""Which tensors of a folder are in codes: `quantization_config` of its config.json.

JAX is loaded, with the codes' format, for folders that hold codes only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError

if TYPE_CHECKING:
    from .recipe import WeightFormat

METHOD = "qwen_jax"

_FIELDS = ("quant_method", "format_version", "recipe", "tensors")
_TENSOR_FIELDS = ("bits", "group_size", "symmetric", "input_scale")
_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class TensorScheme:
    """How one tensor is stored.

    Attributes:
        format: of its codes.
        input_scale: whether it has a factor of each input.
    """

    format: WeightFormat
    input_scale: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The arrays of the tensor: fields of `QTensor`, and ends of keys in files."""
        zero = () if self.format.symmetric else ("zero",)
        return ("codes", "scale", *zero, *(("input_scale",) if self.input_scale else ()))


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The tensors of a model that are in codes, and how.

    Attributes:
        recipe: name of the recipe that chose them; "" where nothing is in codes.
        tensors: by tree path; all others are floating point.
    """

    recipe: str = ""
    tensors: Mapping[str, TensorScheme] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.recipe, frozenset(self.tensors.items())))

    @property
    def bits(self) -> int:
        """The fewest bits of any matrix; 16 where none is in codes."""
        return min((tensor.format.bits for tensor in self.tensors.values()), default=16)

    def described(self, dtype: str) -> str:
        """What weights are stored in, for messages: "bfloat16", or "3-bit codes and bfloat16"."""
        return f"{self.bits}-bit codes and {dtype}" if self.tensors else dtype

    def to_config(self) -> dict[str, Any]:
        """The object that config.json has as `quantization_config`."""
        from pallas_kernels.dequant_matmul.layout import FORMAT_VERSION

        tensors = {
            path: dataclasses.asdict(tensor.format) | {"input_scale": tensor.input_scale}
            for path, tensor in self.tensors.items()
        }
        values = METHOD, FORMAT_VERSION, self.recipe, tensors
        return dict(zip(_FIELDS, values, strict=True))

    @classmethod
    def from_config(cls, value: Any) -> Scheme:
        """Reads what `to_config` wrote.

        Args:
            value: `quantization_config` of a config.json.

        Raises:
            CheckpointError: another method or version, or a field that is missing, unknown or out
                of range; all such fields in one error.
        """
        from pallas_kernels.dequant_matmul.layout import FORMAT_VERSION

        from .recipe import WeightFormat

        if not isinstance(value, dict) or value.get("quant_method") != METHOD:
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise CheckpointError(
                f"quantization_config has quant_method {_shown(method)}; accepted is "
                f'"{METHOD}", which qwen-jax quantize writes'
            )
        version = value.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise CheckpointError(
                f"quantization_config has format_version {_shown(version)}; this program reads "
                f"{FORMAT_VERSION}: upgrade qwen-jax, or quantise the original release again"
            )
        faults = _wrong_names("quantization_config", value, _FIELDS)
        if not faults:
            faults = _faults(value["recipe"], value["tensors"])
        if faults:
            more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise CheckpointError(
                f"quantization_config is damaged: {'; '.join(faults[:_SHOWN])}{more}; fetch "
                "config.json again, or quantise the original release again"
            )
        tensors = {
            path: TensorScheme(
                WeightFormat(*(fields[n] for n in _TENSOR_FIELDS[:3])), fields["input_scale"]
            )
            for path, fields in value["tensors"].items()
        }
        return cls(value["recipe"], tensors)


def _faults(recipe: Any, tensors: Any) -> list[str]:
    """What is wrong with the fields of a known version."""
    faults = []
    if not isinstance(recipe, str) or not recipe:
        faults.append(f"recipe is {_shown(recipe)}; accepted is a name")
    if not isinstance(tensors, dict) or not tensors:
        faults.append(f"tensors is {_shown(tensors)}; accepted is an object that names some")
        return faults
    for path, fields in tensors.items():
        faults += _tensor_faults(f"tensor {_shown(path)}", fields)
    return faults


def _tensor_faults(what: str, fields: Any) -> list[str]:
    from pallas_kernels.dequant_matmul.layout import BITS, GROUP_SIZES

    if not isinstance(fields, dict):
        return [f"{what} is {_shown(fields)}; accepted is an object"]
    faults = _wrong_names(what, fields, _TENSOR_FIELDS)
    if faults:
        return faults
    for name, accepted in (("bits", BITS), ("group_size", GROUP_SIZES)):
        number = fields[name]
        if type(number) is not int or number not in accepted:
            faults.append(f"{what} has {name} {_shown(number)}; accepted are {accepted}")
    for name in ("symmetric", "input_scale"):
        if type(fields[name]) is not bool:
            faults.append(f"{what} has {name} {_shown(fields[name])}; accepted are true and false")
    return faults


def _wrong_names(what: str, fields: Mapping[str, Any], accepted: tuple[str, ...]) -> list[str]:
    """Fields too many and too few."""
    unknown = [
        f"{what} has an unknown field {_shown(name)}" for name in fields if name not in accepted
    ]
    return unknown + [f"{what} lacks {name}" for name in accepted if name not in fields]


def _shown(value: Any) -> str:
    """A value from a file, printable and of bounded length."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
