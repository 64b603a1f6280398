"""The folder that is quantised."""

from __future__ import annotations

from pathlib import Path

from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.problems import show
from qwen_jax.errors import CheckpointError
from qwen_jax.quant.scheme import METHOD

from ..side_files import CONFIG
from ..source import SourceFolder, open_source


def refuse_own_codes(path: Path) -> None:
    """Raises if a folder was quantised by this program: codes of codes lose more than they save.

    Raises:
        CheckpointError: it was.
    """
    file = path / CONFIG
    values = read_object(file).get("quantization_config") if file.is_file() else None
    if isinstance(values, dict) and values.get("quant_method") == METHOD:
        raise CheckpointError(
            f"{path} is quantised already (recipe {show(values.get('recipe'))}), by qwen-jax "
            "quantize; give the folder that it was made from"
        )


def open_floats(path: Path) -> SourceFolder:
    """Opens a model folder whose weights are to be quantised; those of other formats as bfloat16.

    Raises:
        CheckpointError: the folder is damaged, not understood, or quantised by this program.
        ConfigError: the configuration is malformed or not implemented.
    """
    refuse_own_codes(path)
    return open_source(path)
