"""The folder that a conversion reads, matched against its configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.assemble import stored_dtype
from qwen_jax.checkpoint.counts import refuse_sizes
from qwen_jax.checkpoint.keys import parse_key
from qwen_jax.checkpoint.plan import LoadPlan, plan_load
from qwen_jax.checkpoint.tensors import tree_tensors
from qwen_jax.config import QwenConfig
from qwen_jax.configuration.spellings import load_config_file

from .logical import LogicalFolder, open_logical


@dataclass(frozen=True)
class SourceFolder:
    """A folder in any layout that is read.

    Attributes:
        folder: its tensors, quantised ones as bfloat16.
        load: where each tensor of the tree comes from.
        raw_config: the object in its `config.json`.
    """

    folder: LogicalFolder
    load: LoadPlan
    raw_config: dict[str, Any]

    @property
    def tree_bytes(self) -> int:
        """Bytes of all tensors of the tree, quantised ones as bfloat16."""
        folder, sources = self.folder, self.load.sources
        return sum(
            math.prod(source.shape) * stored_dtype(folder, source).itemsize for source in sources
        )

    @property
    def vision(self) -> list[str]:
        """Keys of the vision tower."""
        return [key for key in self.folder.tensors if parse_key(key).kind == "visual"]


def open_source(path: Path, *, mtp: bool = True) -> SourceFolder:
    """Opens a model folder for conversion.

    Args:
        path: the folder.
        mtp: whether the multi-token prediction head counts, if there is one.

    Returns:
        The folder. Headers, the configuration and a few small tensors have been read.

    Raises:
        CheckpointError: the folder is damaged or not understood.
        ConfigError: the configuration is malformed or not implemented.
    """
    folder = open_logical(path)  # first, since it names weights of other programs
    config = QwenConfig.from_hf(path)
    refuse_sizes(folder, config)
    # Packers give modules a bias of zeros; that leaves out those which the model lacks.
    tree = tree_tensors(config)
    biases = {key: parse_key(key) for key in folder.zero_biases()}
    needless = {k for k, (kind, path, _) in biases.items() if kind != "visual" and path not in tree}
    folder = folder.without(needless, "all-zero bias")
    raw, _ = load_config_file(path)
    return SourceFolder(folder, plan_load(folder, config, mtp=mtp), dict(raw))
