"""How many layers and experts a folder has, beside what its configuration says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from .safetensors_io import TensorFolder

if TYPE_CHECKING:
    from ..config import QwenConfig

EXPERT_NUMBER = re.compile(r"(?<=\.mlp\.experts\.)\d+(?=\.)")

_ALWAYS_LISTED = 1000  # layers or experts
_LAYER_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")


def refuse_sizes(folder: TensorFolder, config: QwenConfig) -> None:
    """Raises before millions of tensors that cannot be there are listed one by one.

    Raises:
        CheckpointError: the configuration has more layers, or experts that are stored one by one,
            than the folder has tensors.
    """
    keys = folder.tensors
    counts = {"num_hidden_layers": config.num_hidden_layers}
    counts["mtp_num_hidden_layers"] = config.mtp_num_hidden_layers
    if any(EXPERT_NUMBER.search(key) for key in keys):
        counts["num_experts"] = config.num_experts
    for name, count in counts.items():
        if count > max(len(keys), _ALWAYS_LISTED):
            raise CheckpointError(
                f"{folder.path}: {name} is {count} in the configuration, but the folder has only "
                f"{len(keys)} tensors; check that config.json and the weights are of one release"
            )


def numbers_beyond(unused: list[str], config: QwenConfig) -> list[str]:
    """Says where unused keys count more layers or experts than the configuration."""
    limits = (
        ("layers", _LAYER_NUMBER, config.num_hidden_layers),
        ("experts", EXPERT_NUMBER, config.num_experts),
    )
    remarks = []
    for what, pattern, limit in limits:
        numbers = [int(match[0][:9]) for key in unused if (match := pattern.search(key))]
        if numbers and max(numbers) >= limit:
            remarks.append(f"{what} up to number {max(numbers)}; the configuration has {limit}")
    return remarks
