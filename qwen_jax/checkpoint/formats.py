"""How the weights of a folder are stored: our own codes, or what is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..quant.scheme import METHOD, Scheme
from .json_file import read_object
from .problems import listed, show

_OTHER_FILES = (
    ("*.gguf", "GGUF (llama.cpp)"),
    ("*.bin", "PyTorch pickle"),
    ("*.pt", "PyTorch pickle"),
    ("*.pth", "PyTorch pickle"),
    ("*.npz", "NumPy archive (early MLX)"),
    ("*.msgpack", "Flax msgpack"),
    ("*.h5", "TensorFlow HDF5"),
)

_METHODS = {
    "fp8": "FP8 block",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
}

# Last segment of a key -> format; the first row with a hit names the folder, so the telling
# segments come first.
_SEGMENTS = (
    ("weight_scale_inv", "FP8 block"),
    ("weight_packed", "compressed-tensors"),
    ("weight_scale_2", "ModelOpt"),
    ("g_idx", "GPTQ"),
    ("qweight", "AWQ"),
    ("qzeros", "AWQ"),
    ("scales", "MLX"),
    ("biases", "MLX"),
    ("absmax", "bitsandbytes"),
    ("quant_map", "bitsandbytes"),
    ("weight_scale", "compressed-tensors"),
    ("input_scale", "FP8"),
    ("activation_scale", "FP8"),
)


def refuse_other_files(path: Path) -> None:
    """Raises if a folder without safetensors files holds weights of another format.

    Raises:
        CheckpointError: names the format and the files, and what is accepted.
    """
    for pattern, name in _OTHER_FILES:
        files = sorted(p.name for p in path.glob(pattern))
        if files:
            raise CheckpointError(
                f"{path} holds {name} weights ({listed(files)}); only safetensors files in the "
                "Hugging Face layout are read. Use the original release, or save the model with "
                "transformers' save_pretrained first"
            )


def quantisation(path: Path, keys: Iterable[str]) -> str | None:
    """Names the quantised format of a folder, from its config.json or else from its keys.

    Our own codes are none: `read_scheme` tells of them.

    Args:
        path: the folder; it may lack config.json.
        keys: keys of its tensors.

    Returns:
        A name such as "FP8 block" or "GPTQ", or None where nothing is quantised.

    Raises:
        CheckpointError: config.json is not a JSON object.
    """
    config = _raw_config(path)
    return None if _own(config) else _declared(config) or _evident(keys)


def read_scheme(path: Path, keys: Iterable[str]) -> Scheme:
    """Says which tensors of a folder are in codes.

    Args:
        path: the folder; it may lack config.json.
        keys: keys of its tensors.

    Returns:
        The scheme; an empty one where nothing is quantised.

    Raises:
        CheckpointError: weights of another quantised format, a `quantization_config` that is
            damaged or of another version, or one without codes in the files, or the reverse.
    """
    config = _raw_config(path)
    details, keys = config.get("quantization_config"), list(keys)
    holds = any(key.endswith(".codes") for key in keys)
    if _own(config):
        if keys and not holds:
            raise CheckpointError(
                f"{path}: config.json has a quantization_config of {METHOD}, but no tensor is in "
                "codes; check that config.json and the weights are of one release"
            )
        try:
            return Scheme.from_config(details)
        except CheckpointError as error:
            raise CheckpointError(f"{path / 'config.json'}: {error}") from None
    if holds and _declared(config) is None:
        raise CheckpointError(
            f"{path} holds tensors in codes, but its config.json has no quantization_config that "
            "says how to read them; fetch the config.json of the same release"
        )
    refuse_quantised(path, keys)
    return Scheme()


def refuse_quantised(path: Path, keys: Iterable[str]) -> None:
    """Raises if the weights of a folder are quantised.

    Raises:
        CheckpointError: names the format, and what is accepted.
    """
    name = quantisation(path, keys)
    if name is not None:
        raise CheckpointError(
            f"{path} holds quantised weights ({name}) of another program, which are not run: "
            f"convert them first (qwen-jax convert {path} DESTINATION), or use the unquantised "
            "release"
        )


def _raw_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json"
    return read_object(file) if file.is_file() else {}


def declares_codes(path: Path) -> bool:
    """Whether the config.json of a folder says that weights are in our own codes."""
    return _own(_raw_config(path))


def _own(config: Mapping[str, Any]) -> bool:
    details = config.get("quantization_config")
    return isinstance(details, dict) and details.get("quant_method") == METHOD


def _declared(config: Mapping[str, Any]) -> str | None:
    """The format that a config names; MLX writes `quantization`, and mirrors it methodless."""
    inner = config.get("text_config")
    for level in (config, inner if isinstance(inner, dict) else {}):
        if level.get("quantization"):
            return "MLX"
        details = level.get("quantization_config")
        if not details:
            continue
        method = details.get("quant_method") if isinstance(details, dict) else details
        if method is None:
            return "MLX" if "group_size" in details else "unknown quantization_config"
        name = _METHODS.get(str(method), show(method))
        packing = details.get("format") if isinstance(details, dict) else None
        return f"{name}, {show(packing)}" if packing and name == "compressed-tensors" else name
    return None


def _evident(keys: Iterable[str]) -> str | None:
    endings = {key.rpartition(".")[2] for key in keys}
    return next((name for segment, name in _SEGMENTS if segment in endings), None)
