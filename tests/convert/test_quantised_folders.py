"""Whole folders in every quantised format, through the command line to native ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from qwen_jax.checkpoint.mapping import Layout
from tests.convert.formats.conftest import (
    pack_awq,
    pack_compressed,
    pack_gptq,
    product,
    round_to_bfloat16,
)
from tests.convert.sources import BF16, PER_EXPERT, Arrays, Shell, bits, read, tensors, write

FP8 = ml_dtypes.float8_e4m3fn
GROUP = 8


class Packed(NamedTuple):
    """A quantised matrix: its tensors by the ends of their keys, and what they stand for."""

    parts: Arrays
    values: np.ndarray


def integers(key: str, shape: tuple[int, ...], bits: int) -> tuple[np.ndarray, ...]:
    """Random codes, zero points and scales, and the group of each input."""
    rng = np.random.default_rng(list(key.encode()))
    index = np.arange(shape[1]) // GROUP
    codes = rng.integers(0, 2**bits, shape)
    zeros = rng.integers(0, 2**bits, (shape[0], index[-1] + 1))
    return codes, zeros, rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16), index


def gptq(key: str, shape: tuple[int, ...], width: int = 4) -> Packed:
    made = integers(key, shape, width)
    return Packed(pack_gptq(*made[:3], width), product(*made).view(BF16))


def awq(key: str, shape: tuple[int, ...]) -> Packed:
    made = integers(key, shape, 4)
    return Packed(pack_awq(*made[:3]), product(*made).view(BF16))


def compressed(key: str, shape: tuple[int, ...]) -> Packed:
    codes, zeros, scales, index = integers(key, shape, 4)
    return Packed(
        pack_compressed(codes - 8, scales, 4, zeros - 8),
        product(codes, zeros, scales, index).view(BF16),
    )


def fp8(key: str, shape: tuple[int, ...], block: tuple[int, int] = (8, 16)) -> Packed:
    """In blocks, with a scale of the activations, as some releases have it."""
    rng = np.random.default_rng(list(key.encode()))
    codes = rng.normal(0, 1, shape).astype(FP8)
    counts = [-(-size // along) for size, along in zip(shape, block, strict=True)]
    scales = rng.uniform(0.01, 0.1, counts).astype(np.float32)
    spread = scales.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]
    values = round_to_bfloat16(codes.astype(np.float32) * spread).view(BF16)
    parts = {"weight": codes, "weight_scale_inv": scales, "activation_scale": np.float32([0.5])}
    return Packed(parts, values)


CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "type": "int",
                    "num_bits": 4,
                    "group_size": GROUP,
                    "symmetric": False,
                    "strategy": "group",
                },
            }
        },
    },
    "fp8": {"quant_method": "fp8", "weight_block_size": [8, 16], "activation_scheme": "static"},
}
PACKERS: dict[str, Callable[[str, tuple[int, ...]], Packed]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "fp8 of usual blocks": lambda key, shape: fp8(key, shape, (128, 128)),
}


def is_matrix(key: str) -> bool:
    """Whether packers take a tensor: matrices of attention and of experts."""
    return key.endswith(("_proj.weight", "_qkv.weight", "_z.weight"))


def quantise(
    plain: Arrays, method: str, chosen: Callable[[str], bool] = is_matrix
) -> tuple[Arrays, Arrays]:
    """Packs some matrices; gives the tensors of the folder, and those of one that is not packed."""
    stored, meant = {}, {}
    for key, array in plain.items():
        if not chosen(key):
            stored[key] = meant[key] = array
            continue
        packed = PACKERS[method](key, array.shape)
        meant[key] = packed.values
        module = key.removesuffix("weight")
        stored |= {module + leaf: part for leaf, part in packed.parts.items()}
    return stored, meant


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    return Shell(capsys, tmp_path)


@pytest.fixture
def same(shell: Shell, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Converts a quantised folder and the plain one that it stands for; gives the record."""

    def check(stored: Arrays, meant: Arrays, config: dict[str, Any]) -> dict[str, Any]:
        quantised = write(tmp_path / "quantised", stored, quantization_config=config)
        plain = write(tmp_path / "plain", meant)
        native = shell.convert(quantised)
        assert bits(read(native)) == bits(read(shell.convert(plain, name="native of plain")))
        assert "quantization_config" not in json.loads((native / "config.json").read_text())
        assert shell.run("diff", quantised, native).code == 0
        return json.loads((native / "conversion.json").read_text())

    return check


@pytest.mark.parametrize("method", CONFIGS)
def test_everything_packed_that_packers_take(same, method):
    stored, meant = quantise(tensors(PER_EXPERT), method)
    record = same(stored, meant, CONFIGS[method])
    (count,) = record["formats"].values()
    assert count == sum(map(is_matrix, meant)) == 37
    assert record["skipped"] == ({"activation scale": 37} if method == "fp8" else {})


MIXES: dict[str, Callable[[str], bool]] = {
    "the router": lambda key: key.endswith("mlp.gate.weight"),
    "the router too": lambda key: is_matrix(key) or key.endswith("mlp.gate.weight"),
    "the shared expert": lambda key: ".shared_expert." in key,
    "experts, not the shared one": lambda key: ".experts." in key,
    "one layer": lambda key: is_matrix(key) and "layers.1." in key,
    "one expert": lambda key: ".experts.2." in key,
    "the head and the embedding": lambda key: key.endswith(("embed_tokens.weight", "head.weight")),
}


@pytest.mark.parametrize(
    ("method", "mix"),
    [
        *(("fp8", mix) for mix in MIXES),
        *(("gptq", mix) for mix in ("the router", "the shared expert", "one layer")),
    ],
)
def test_each_matrix_is_packed_or_plain_by_itself(same, method, mix):
    stored, meant = quantise(tensors(PER_EXPERT), method, MIXES[mix])
    assert stored.keys() != meant.keys()
    same(stored, meant, CONFIGS[method])


def test_formats_may_differ_from_layer_to_layer(same):
    by_layer: list[Arrays] = [{}, {}, {}]
    for key, array in tensors(PER_EXPERT).items():
        by_layer[0 if "layers.0." in key else 1 if "layers.1." in key else 2][key] = array
    first, second = quantise(by_layer[0], "gptq"), quantise(by_layer[1], "fp8 of usual blocks")
    rest = by_layer[2]
    record = same(first[0] | second[0] | rest, first[1] | second[1] | rest, CONFIGS["gptq"])
    assert sorted(record["formats"]) == ["FP8 block", "GPTQ int4"]


def test_stack_of_experts_in_fp8_is_the_same_as_one_by_one(same):
    """The release in FP8 has its experts one by one, that in bfloat16 in stacks."""
    stored, meant = quantise(tensors(PER_EXPERT), "fp8", lambda key: ".experts." in key)
    fused = tensors()
    for key in [key for key in fused if ".experts." in key]:
        module = key.rpartition(".")[0]
        names = ("down_proj",) if key.endswith("down_proj") else ("gate_proj", "up_proj")
        fused[key] = np.stack(
            [np.concatenate([meant[f"{module}.{e}.{name}.weight"] for name in names])
             for e in range(4)]
        )  # fmt: skip
    same(stored, fused, CONFIGS["fp8"])


def test_biases_of_zeros_that_packers_add_are_dropped_and_counted(same, shell, tmp_path):
    stored, meant = quantise(tensors(), "gptq")
    module = "model.layers.1.self_attn.q_proj"
    biased = stored | {f"{module}.bias": np.zeros(32, np.float16)}
    assert same(biased, meant, CONFIGS["gptq"])["skipped"] == {"all-zero bias": 1}
    biased[f"{module}.bias"] = np.float16([0] * 31 + [1e-7])
    source = write(tmp_path / "biased", biased, quantization_config=CONFIGS["gptq"])
    shell.refused(source, "unused (1)", f"{module}.bias")


def test_biases_of_zeros_in_the_vision_tower_stay(shell, tmp_path):
    stored, _ = quantise(tensors(), "fp8")
    module = "model.visual.blocks.0.attn.qkv"
    parts, values = fp8(module, (8, 16))
    stored |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
    stored[f"{module}.bias"] = np.zeros(8, BF16)
    source = write(tmp_path / "source", stored, quantization_config=CONFIGS["fp8"])
    native = read(shell.convert(source, "--keep-visual"))
    assert native[f"{module}.weight"].tobytes() == values.tobytes()
    assert not native[f"{module}.bias"].any()


def numbered(arrays: Arrays, numbers: tuple[int, ...]) -> Arrays:
    """Gives the experts other numbers; one more of them becomes a copy of the first."""
    renamed = {}
    for key, array in arrays.items():
        before, found, after = key.partition(".experts.")
        old, _, rest = after.partition(".")
        if not found:
            renamed[key] = array
            continue
        for place, new in enumerate(numbers):
            if int(old) == place % 4:
                renamed[f"{before}.experts.{new}.{rest}"] = array
    return renamed


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            (0, 1, 3, 4),
            (
                "missing (6)",
                "experts.2.gate_proj",
                "unused (6)",
                "up to number 4; the configuration",
            ),
        ),
        ((0, 1, 2, 3, 4), ("unused (6)", "experts.4.down_proj", "experts up to number 4")),
        ((0, 1, 2), ("missing (6)", "experts.3.gate_proj")),
    ],
)
def test_expert_numbers_with_a_gap_or_one_too_many(shell, tmp_path, numbers, words):
    stored, _ = quantise(tensors(PER_EXPERT), "fp8", lambda key: ".experts." in key)
    source = write(
        tmp_path / "source", numbered(stored, numbers), quantization_config=CONFIGS["fp8"]
    )
    shell.refused(source, *words)


def without(leaf: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.pop(f"model.layers.1.self_attn.o_proj.{leaf}")


def grown(leaf: str, axis: int) -> Callable[[Arrays], None]:
    def grow(arrays: Arrays) -> None:
        key = f"model.layers.1.self_attn.o_proj.{leaf}"
        arrays[key] = np.concatenate([arrays[key], arrays[key]], axis)

    return grow


def renamed(arrays: Arrays) -> None:
    key = "model.layers.1.self_attn.o_proj."
    arrays[f"{key}weight_scale_factor"] = arrays.pop(f"{key}weight_scale_inv")


@pytest.mark.parametrize(
    ("method", "damage", "words"),
    [
        ("fp8", without("weight_scale_inv"), ("without the scales", "o_proj.weight is F8_E4M3")),
        ("fp8", without("weight"), ("has scale_inv, but no weight",)),
        ("fp8", grown("weight_scale_inv", 0), ("has scales of shape [4, 1]; expected [2, 1]",)),
        ("fp8", renamed, ("o_proj.weight is F8_E4M3",)),
        ("gptq", without("qzeros"), ("has qweight, scales, but no qzeros",)),
        ("gptq", grown("qzeros", 0), ("o_proj", "qzeros")),
        ("gptq", grown("scales", 1), ("o_proj", "scales")),
        ("awq", without("scales"), ("but no scales",)),
        ("awq", grown("qweight", 1), ("o_proj", "qweight")),
        ("compressed-tensors", without("weight_shape"), ("but no weight_shape",)),
        ("compressed-tensors", grown("weight_scale", 1), ("o_proj.weight", "4 groups")),
    ],
)
def test_parts_that_are_missing_or_do_not_fit(shell, tmp_path, method, damage, words):
    stored, _ = quantise(tensors(), method)
    damage(stored)
    source = write(tmp_path / "source", stored, quantization_config=CONFIGS[method])
    shell.refused(source, *words)
    assert shell.run("diff", source, source).code == 2


def test_scales_that_are_not_finite_end_the_run(shell, tmp_path):
    stored, _ = quantise(tensors(), "fp8")
    stored["model.layers.1.self_attn.o_proj.weight_scale_inv"][1] = np.nan
    source = write(tmp_path / "source", stored, quantization_config=CONFIGS["fp8"])
    shell.refused(source, "o_proj.weight_scale_inv: 1 of 2 scales are infinite or not a number")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CONFIGS["fp8"] | {"secret": 1}, ("unknown fields", "secret: 1")),
        (CONFIGS["fp8"] | {"fmt": "e5m2"}, ('fmt is "e5m2"; accepted: "e4m3"',)),
        ({"quant_method": "bitsandbytes"}, ("quantised weights (bitsandbytes)", "what is read")),
        ({"quant_method": "quark"}, ("quantised weights (quark)",)),
        ({"bits": 4, "group_size": 64, "mode": "affine"}, ("quantised weights (MLX)",)),
    ],
)
def test_configurations_that_are_not_understood(shell, tmp_path, config, words):
    stored, _ = quantise(tensors(), "fp8")
    source = write(tmp_path / "source", stored, quantization_config=config)
    shell.refused(source, *words)
    shell.refused(source, *words, verb="export")


def test_older_name_of_the_configuration_goes_too(shell, tmp_path):
    stored, _ = quantise(tensors(Layout()), "compressed-tensors")
    source = write(tmp_path / "source", stored, compression_config=CONFIGS["compressed-tensors"])
    written = json.loads((shell.convert(source) / "config.json").read_text())
    assert not [name for name in written if "config" in name]
