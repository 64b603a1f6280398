"""What a quantised folder will take, and the making of it: counted from shapes alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from qwen_jax.checkpoint.keys import MTP
from qwen_jax.checkpoint.native import SHARD_METADATA
from qwen_jax.checkpoint.parameters import abstract_parameters
from qwen_jax.config import QwenConfig
from qwen_jax.quant import Method, Recipe, Size, TensorSize, by_part, tensor_sizes

from ..writing import OutputTensor, plan_shards
from ..writing.shard import lay_out
from .choice import Choice, choose
from .tensors import output_tensors, part_of
from .weights import RUN_BYTES

# Rough, for the estimate of time alone.
ASSUMED_BYTES_PER_SECOND = 400e6
ROUNDED_A_SECOND = {"cpu": 1e6, "other": 200e6}  # weights
SOLVED_A_SECOND = {"cpu": 0.3e6, "other": 30e6}
_BASE_MEMORY = 700e6
_RUNS_IN_MEMORY = 12

_PLACE = re.compile(r"^(mtp\.)?(layers\.\d+\.)?|\.weight$")


@dataclass(frozen=True)
class Estimate:
    """Sizes of a folder to be written.

    Attributes:
        config: of the model.
        choice: what becomes codes.
        tensors: what will be written.
        calibration: windows and tokens of each; None without calibration text.
    """

    config: QwenConfig
    choice: Choice
    tensors: Sequence[OutputTensor]
    calibration: tuple[int, ...] | None

    @property
    def sizes(self) -> tuple[TensorSize, ...]:
        """Bytes of each tensor before and after."""
        return tensor_sizes(self.choice.tree, self.choice.scheme)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors that will be written."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def file_bytes(self, max_shard_bytes: int) -> int:
        """Size of all shards together, headers included."""
        shards = lay_out(plan_shards(self.tensors, max_shard_bytes), SHARD_METADATA)
        return sum(shard.nbytes for shard in shards)

    @property
    def bits_per_text_weight(self) -> float:
        """Bits of a weight on average, without the multi-token prediction head."""
        return Size.of(t for t in self.sizes if not t.path.startswith(MTP)).bits_per_value

    @property
    def mtp_bytes(self) -> int:
        """Bytes of the multi-token prediction head."""
        return sum(tensor.after for tensor in self.sizes if tensor.path.startswith(MTP))

    @property
    def kept(self) -> dict[str, int]:
        """How many tensors stay as they are, by name within a layer."""
        paths = (path for path in self.choice.tree if path not in self.choice.scheme.tensors)
        return dict(Counter(_PLACE.sub("", path) for path in paths))

    @property
    def peak_memory(self) -> int:
        """Estimate of the bytes of host memory, mapped files not counted."""
        base = _BASE_MEMORY + _RUNS_IN_MEMORY * RUN_BYTES
        if self.calibration is None:
            return int(base)
        weights = self._largest_layer()
        # Codes one a byte and packed; on a CPU also the layer itself and what is computed from it.
        layer = weights * (1.5 if jax.default_backend() != "cpu" else 18)
        return int(base + layer + 2 * self.state_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of the hidden states of the calibration text between two layers."""
        return 4 * math.prod(self.calibration or (0,)) * self.config.hidden_size

    @property
    def seconds(self) -> float:
        """Estimate of the time on this machine's default device."""
        device = "cpu" if jax.default_backend() == "cpu" else "other"
        rate = (ROUNDED_A_SECOND if self.calibration is None else SOLVED_A_SECOND)[device]
        coded = sum(t.values for t in self.sizes if t.path in self.choice.scheme.tensors)
        moved = sum(t.before for t in self.sizes) + self.tensor_bytes
        return coded / rate + moved / ASSUMED_BYTES_PER_SECOND

    def _largest_layer(self) -> int:
        layers = Counter[str]()
        for tensor in self.sizes:
            layers[part_of(tensor.path)] += tensor.values
        return max(count for part, count in layers.items() if part.startswith("layer"))

    def as_json(self) -> dict[str, Any]:
        """For a reader that is a program."""
        sizes = self.sizes
        total = Size.of(sizes)
        return {
            "recipe": self.choice.recipe.name,
            "tensors_in_codes": len(self.choice.scheme.tensors),
            "weights": total.values,
            "tensor_bytes": self.tensor_bytes,
            "mtp_bytes": self.mtp_bytes,
            "bits_per_text_weight": round(self.bits_per_text_weight, 4),
            "parts": {
                part: {"weights": size.values, "bytes": size.after, "bytes_before": size.before}
                for part, size in by_part(sizes).items()
            },
            "kept": self.kept,
            "peak_memory_bytes": self.peak_memory,
            "seconds": round(self.seconds, 1),
        }


def estimate_shape(
    config: QwenConfig,
    recipe: Recipe,
    *,
    method: Method | None = None,
    calibration: tuple[int, int] | None = None,
) -> Estimate:
    """Counts what a model would take of which there is no more than the configuration.

    Args:
        config: the model; tensors are counted in its dtype.
        recipe: what becomes codes.
        method: in place of the method of every rule.
        calibration: windows and tokens of each.

    Raises:
        RequestError: the recipe does not fit the model, or the method needs calibration text.
    """
    mtp_layers = config.mtp_num_hidden_layers
    tree = abstract_parameters(config, mtp_layers=mtp_layers)
    choice = choose(tree, recipe, method=method, calibrated=calibration is not None)
    tensors = output_tensors(
        config, mtp_layers, choice.tree, choice.scheme, kept=_absent, maker=_absent
    )
    return Estimate(config, choice, tensors, calibration)


def _absent(name: str) -> Any:
    raise RuntimeError(f"internal error: {name} has no weights")
