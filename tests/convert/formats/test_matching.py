"""Mixes of formats and of quantised with plain tensors, decided tensor by tensor."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convert.logical import open_logical
from qwen_jax.errors import CheckpointError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def gptq_module(packing, module: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(module))
    scales = rng.uniform(0.001, 0.02, (8, 1))
    parts = packing.gptq(rng.integers(0, 16, (8, 32)), rng.integers(0, 16, (8, 1)), scales, 4)
    return {f"{module}.{leaf}": array for leaf, array in parts.items()}


def fp8_module(module: str) -> dict[str, np.ndarray]:
    codes = np.arange(8 * 32, dtype=np.uint8).reshape(8, 32)
    return {
        f"{module}.weight": codes.view(ml_dtypes.float8_e4m3fn),
        f"{module}.weight_scale_inv": np.float32([[0.5]]),
    }


def plain_module(module: str) -> dict[str, np.ndarray]:
    return {f"{module}.weight": np.ones((8, 32), ml_dtypes.bfloat16)}


LAYERS = [f"model.layers.{n}.mlp.{name}" for n in range(3) for name in ("gate", "shared_expert")]


@pytest.mark.parametrize("packed", [LAYERS, LAYERS[:2], LAYERS[::2], LAYERS[2:4], []])
def test_modules_are_packed_or_plain_each_by_itself(opened, packing, packed):
    """A packed router, a plain shared expert and the reverse, and one layer unlike the others."""
    arrays = {"lm_head.weight": np.ones((4, 4), np.float16)}
    for module in LAYERS:
        arrays |= gptq_module(packing, module) if module in packed else plain_module(module)
    folder = opened(arrays, GPTQ)
    assert set(folder.tensors) == {"lm_head.weight", *(f"{module}.weight" for module in LAYERS)}
    assert set(folder.parts) == {f"{module}.weight" for module in packed}
    for module in LAYERS:
        info = folder.tensors[f"{module}.weight"]
        assert (info.dtype, info.shape) == ("BF16", (8, 32))
        assert folder.read(info.name).dtype == ml_dtypes.bfloat16
    assert folder.read("lm_head.weight").dtype == np.float16


def test_head_and_embedding_may_be_packed(opened, packing):
    arrays = gptq_module(packing, "lm_head") | gptq_module(packing, "model.embed_tokens")
    folder = opened(arrays, GPTQ)
    assert sorted(folder.parts) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_formats_may_be_mixed(opened, packing):
    arrays = gptq_module(packing, "a") | fp8_module("b") | plain_module("c")
    codes = np.ones((8, 32), int)
    parts = packing.compressed(codes, np.ones((8, 1), np.float32), 4)
    arrays |= {f"d.{leaf}": array for leaf, array in parts.items()}
    folder = opened(arrays, GPTQ)
    assert folder.format_counts == {
        "GPTQ int4": 1,
        "FP8 block": 1,
        "compressed-tensors int4": 1,
    }
    assert (folder.read("d.weight") == 1).all()


def test_scales_of_activations_and_cache_are_dropped_and_counted(opened):
    one = np.float32([1])
    extra = {
        "a.activation_scale": one,
        "a.input_scale": one,
        "self_attn.k_scale": one,
        "self_attn.v_scale": one,
        "experts.down_proj_activation_scale": one,
    }
    folder = opened(fp8_module("a") | extra, {"quant_method": "fp8"})
    assert list(folder.tensors) == ["a.weight"]
    assert folder.skipped == {"activation scale": 3, "cache scale": 2}
    assert folder.format_counts == {"FP8 block": 1}


def test_names_from_files_are_made_printable(refusal):
    text = refusal({"a\x1b[31m.qweight": np.ones((2, 2), np.int32)}, GPTQ)
    assert "\x1b" not in text
    assert "\\x1b[31m.weight" in text


LEAVES = (
    "weight weight_scale_inv weight_scale weight_packed weight_shape weight_zero_point "
    "weight_g_idx qweight qzeros scales g_idx input_scale"
).split()
KINDS = (np.int32, np.int8, np.float16, np.float32, np.uint8, ml_dtypes.float8_e4m3fn, np.int64)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.sampled_from(LEAVES),
        st.tuples(
            st.sampled_from(KINDS),
            st.lists(st.sampled_from([0, 1, 2, 3, 8, 32]), max_size=3),
            st.integers(-1, 9),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(
        [None, GPTQ, {"quant_method": "awq"}, {"quant_method": "fp8", "weight_block_size": [2, 2]}]
    ),
)
def test_any_parts_are_read_or_refused_in_words(write, parts, config):
    arrays = {
        f"w.{leaf}": np.full(shape, abs(fill) if dtype is np.uint8 else fill).astype(dtype)
        for leaf, (dtype, shape, fill) in parts.items()
    }
    path = write(arrays, config)
    try:
        folder = open_logical(path)
        for key, info in folder.tensors.items():
            assert folder.read(key).shape == info.shape
    except CheckpointError as error:
        assert str(error)
