"""FP8 matrices against the definition of e4m3fn, at every code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

FP8 = ml_dtypes.float8_e4m3fn
DECLARED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def blocks(*size: int) -> dict:
    return DECLARED | {"weight_block_size": list(size)}


def decode(code: int) -> float:
    """e4m3fn: a sign, four bits of exponent with bias 7, three of mantissa; S.1111.111 is NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


VALUES = np.array([decode(code) for code in range(256)], np.float32)


def random_codes(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    codes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return np.where(codes % 128 == 127, 0, codes).astype(np.uint8)


def random_scales(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).uniform(0.001, 0.1, shape).astype(np.float32)


def expected(codes: np.ndarray, scales: np.ndarray, size: tuple[int, int], rounded) -> np.ndarray:
    """The product of each code with the scale of its block, bfloat16 bits."""
    values = np.empty(codes.shape, np.float32)
    for o in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            values[o, i] = VALUES[codes[o, i]] * np.float32(scales[o // size[0], i // size[1]])
    return rounded(values)


@pytest.mark.parametrize("scale", [1.0, 0.0123, 1e-38, 3e-44, 2.0**100, 7e35, np.float32(1 / 3)])
def test_every_code_is_exact(opened, packing, bits_of, scale):
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    arrays = {"w.weight": codes.view(FP8), "w.weight_scale_inv": np.float32([[scale]])}
    values = bits_of(opened(arrays, blocks(8, 32)).read("w.weight")).ravel()
    finite = ~np.isnan(VALUES)
    np.testing.assert_array_equal(values[finite], packing.round(VALUES[finite] * np.float32(scale)))
    assert np.isnan(values.view(ml_dtypes.bfloat16)[~finite].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 1), (128, 128)),
        ((7, 300), (128, 128)),
        ((130, 5), (128, 128)),
        ((40, 33), (8, 8)),
        ((9, 64), (4, 100)),
        ((33, 40), (1, 16)),
        ((300, 2), (7, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_ragged_blocks(opened, packing, bits_of, shape, size, dtype):
    codes = random_codes(shape)
    scales = random_scales((-(-shape[0] // size[0]), -(-shape[1] // size[1]))).astype(dtype)
    folder = opened({"w.weight": codes.view(FP8), "w.weight_scale_inv": scales}, blocks(*size))
    whole = expected(codes, scales, size, packing.round)
    info = folder.tensors["w.weight"]
    assert (info.dtype, info.shape, info.name) == ("BF16", shape, "w.weight")
    assert list(folder.tensors) == ["w.weight"]
    for start, stop in [
        (0, None),
        (1, None),
        (shape[0] // 2, shape[0] // 2 + 3),
        (0, 0),
        (-1, None),
    ]:
        rows = slice(start, stop)
        np.testing.assert_array_equal(bits_of(folder.read("w.weight", rows)), whole[rows])


def test_default_block_is_128_by_128(opened, packing, bits_of):
    codes, scales = random_codes((130, 257)), random_scales((2, 3))
    arrays = {"w.weight": codes.view(FP8), "w.weight_scale_inv": scales}
    whole = expected(codes, scales, (128, 128), packing.round)
    for config in (None, DECLARED, {"quant_method": "gptq", "bits": 4}):
        np.testing.assert_array_equal(bits_of(opened(arrays, config).read("w.weight")), whole)


def test_block_size_beyond_all_reason(opened, packing, bits_of):
    codes, scales = random_codes((4, 4)), random_scales((1, 1))
    arrays = {"w.weight": codes.view(FP8), "w.weight_scale_inv": scales}
    values = bits_of(opened(arrays, blocks(10**30, 10**30)).read("w.weight"))
    np.testing.assert_array_equal(values, expected(codes, scales, (4, 4), packing.round))


def test_more_blocks_a_row_than_16_bit_indices(opened, bits_of, packing):
    codes, scales = random_codes((3, 600)), random_scales((2, 300))
    arrays = {"w.weight": codes.view(FP8), "w.weight_scale_inv": scales}
    values = bits_of(opened(arrays, blocks(2, 2)).read("w.weight"))
    np.testing.assert_array_equal(values, expected(codes, scales, (2, 2), packing.round))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_a_matrix(opened, packing, bits_of, shape):
    codes, scale = random_codes((5, 7)), np.full(shape, 0.0371, np.float32)
    whole = packing.round(VALUES[codes] * np.float32(0.0371))
    for key, config in [
        ("weight_scale", {"quant_method": "compressed-tensors", "format": "float-quantized"}),
        ("weight_scale", DECLARED),
        ("weight_scale_inv", DECLARED | {"weight_block_size": None}),
    ]:
        arrays = {"w.weight": codes.view(FP8), f"w.{key}": scale}
        np.testing.assert_array_equal(bits_of(opened(arrays, config).read("w.weight")), whole)


@pytest.mark.parametrize("shape", [(70,), (70, 1)])
def test_one_scale_a_row(opened, packing, bits_of, shape):
    codes, scales = random_codes((70, 40)), random_scales(shape)
    arrays = {"w.weight": codes.view(FP8), "w.weight_scale": scales}
    folder = opened(arrays, {"quant_method": "compressed-tensors", "format": "float-quantized"})
    whole = expected(codes, scales.reshape(70, 1), (1, 40), packing.round)
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)
    np.testing.assert_array_equal(bits_of(folder.read("w.weight", slice(33, 50))), whole[33:50])


def test_stack_of_experts(opened, packing, bits_of):
    key = "layers.0.mlp.experts"
    codes, scales = random_codes((3, 16, 20)), random_scales((3, 2, 3))
    down, down_scales = random_codes((3, 20, 8), 5), random_scales((3, 3, 1))
    arrays = {
        f"{key}.gate_up_proj": codes.view(FP8),
        f"{key}.gate_up_proj_scale_inv": scales,
        f"{key}.gate_up_proj_activation_scale": np.ones(3, np.float32),
        f"{key}.down_proj": down.view(FP8),
        f"{key}.down_proj_scale_inv": down_scales,
    }
    folder = opened(arrays, blocks(8, 8))
    assert sorted(folder.tensors) == [f"{key}.down_proj", f"{key}.gate_up_proj"]
    assert folder.skipped == {"activation scale": 1}
    for expert in range(3):
        for name, c, s in [("gate_up_proj", codes, scales), ("down_proj", down, down_scales)]:
            values = bits_of(folder.read(f"{key}.{name}", slice(expert, expert + 1)))[0]
            whole = expected(c[expert], s[expert], (8, 8), packing.round)
            np.testing.assert_array_equal(values, whole)


@pytest.mark.parametrize("shape", [(2,), (2, 1, 1), (2, 2, 1)])
def test_stack_of_experts_without_blocks(opened, packing, bits_of, shape):
    codes, scales = random_codes((2, 6, 4)), random_scales(shape)
    arrays = {"experts.gate_up_proj": codes.view(FP8), "experts.gate_up_proj_scale_inv": scales}
    values = bits_of(
        opened(arrays, DECLARED | {"weight_block_size": None}).read("experts.gate_up_proj")
    )
    by_row = np.repeat(scales.reshape(2, -1), 6 // (scales.size // 2), axis=1)
    np.testing.assert_array_equal(values, packing.round(VALUES[codes] * by_row[:, :, None]))


def test_block_across_gate_and_up_is_refused(refusal):
    arrays = {
        "experts.gate_up_proj": random_codes((2, 24, 8)).view(FP8),
        "experts.gate_up_proj_scale_inv": random_scales((2, 3, 1)),
    }
    assert "joins gate and up of 12 rows each, not a multiple of the 8" in refusal(
        arrays, blocks(8, 8)
    )


def test_scales_stored_as_powers_of_two(opened, refusal, packing, bits_of):
    codes = random_codes((16, 16))
    stored = np.array([[120, 127], [100, 130]], np.uint8)
    scales = 2.0 ** (stored.astype(np.float32) - 127)
    whole = expected(codes, scales, (8, 8), packing.round)
    arrays = {"w.weight": codes.view(FP8), "w.weight_scale_inv": stored}
    folder = opened(arrays, blocks(8, 8) | {"scale_fmt": "ue8m0"})
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)
    assert "w.weight_scale_inv is U8" in refusal(arrays, blocks(8, 8))
    named = arrays | {"w.weight_scale_inv": stored.view(ml_dtypes.float8_e8m0fnu)}
    np.testing.assert_array_equal(bits_of(opened(named, blocks(8, 8)).read("w.weight")), whole)


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        ((4, 258), (1, 4)),  # two shards of 129 columns, their blocks joined
        ((4, 258), (1, 2)),
        ((129, 4), (1, 1)),
        ((129, 4), (3, 1)),
        ((256, 256), ()),
        ((256, 256), (256, 1)),
        ((256, 256), (1, 2, 2)),
        ((3, 8, 8), (2, 1, 1)),
        ((3, 8, 8), (1, 1)),
    ],
)
def test_wrong_number_of_scales_is_refused(refusal, shape, counts):
    key = "experts.down_proj" if len(shape) == 3 else "w.weight"
    arrays = {key: random_codes(shape).view(FP8), f"{key}_scale_inv": random_scales(counts)}
    text = refusal(arrays, blocks(128, 128))
    assert f"{key} of shape {list(shape)} has scales of shape {list(counts)}" in text


def test_lonely_parts_are_refused_together(refusal):
    text = refusal(
        {
            "a.weight": random_codes((4, 4)).view(FP8),
            "b.weight_scale_inv": random_scales((1, 1)),
            "c.weight": np.ones((4, 4), ml_dtypes.bfloat16),
            "c.weight_scale_inv": random_scales((1, 1)),
            "d.weight": random_codes((4, 4)).view(ml_dtypes.float8_e5m2),
            "d.weight_scale_inv": random_scales((1, 1)),
            "e.weight": random_codes((4, 4)).view(FP8),
            "e.weight_scale_inv": np.ones((1, 1), np.int32),
            "f.weight": random_codes((4,)).view(FP8),
            "f.weight_scale_inv": random_scales((1,)),
            "g.weight": np.ones((4, 4), ml_dtypes.bfloat16),
        },
        DECLARED,
    )
    assert "a.weight is F8_E4M3" in text
    assert "b.weight has scale_inv, but no weight" in text
    assert "c.weight is BF16; expected F8_E4M3" in text
    assert "d.weight is F8_E5M2; expected F8_E4M3" in text
    assert "e.weight_scale_inv is I32" in text
    assert "f.weight has shape [4]" in text
    assert "g.weight" not in text


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_are_refused(read_refusal, bad):
    scales = random_scales((2, 2))
    scales[1, 0] = bad
    arrays = {"w.weight": random_codes((16, 16)).view(FP8), "w.weight_scale_inv": scales}
    assert "w.weight_scale_inv: 1 of 4 scales are infinite" in read_refusal(arrays, blocks(8, 8))


def test_negative_scale_is_refused(read_refusal):
    arrays = {"w.weight": random_codes((4, 4)).view(FP8), "w.weight_scale": np.float32([-1])}
    assert "w.weight_scale: 1 of 1 scales are negative" in read_refusal(arrays, DECLARED)


def test_zero_scale_must_not_hide_weights(opened, read_refusal):
    codes, scales = random_codes((20, 20)), random_scales((3, 3))
    scales[1, 2] = 0
    codes[8:16, 16:] = [0, 0x80, 0, 0]
    arrays = {"w.weight": codes.view(FP8), "w.weight_scale_inv": scales}
    values = opened(arrays, blocks(8, 8)).read("w.weight")
    assert (values[8:16, 16:] == 0).all()
    codes[15, 19] = 1
    assert "is 0 for block [1, 2]" in read_refusal(arrays, blocks(8, 8))
    folder = opened(arrays, blocks(8, 8))
    assert folder.read("w.weight", slice(0, 15)).shape == (15, 20)
    assert folder.read("w.weight", slice(16, 20)).shape == (4, 20)


def test_zero_scale_of_one_expert(opened):
    codes, scales = random_codes((3, 8, 8)), random_scales((3, 1, 1))
    scales[1] = 0
    arrays = {"e.down_proj": codes.view(FP8), "e.down_proj_scale_inv": scales}
    folder = opened(arrays, blocks(8, 8))
    assert folder.read("e.down_proj", slice(2, 3)).shape == (1, 8, 8)
    with pytest.raises(ValueError, match=r"e\.down_proj_scale_inv is 0 for block \[0, 0\]"):
        folder.read("e.down_proj", slice(1, 3))
