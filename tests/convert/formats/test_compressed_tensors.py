"""Packed and int8 matrices of compressed-tensors, packed here code by code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

BITS = tuple(range(2, 9))


def config(*groups: dict, form: str = "pack-quantized") -> dict:
    described = {
        f"group_{number}": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"type": "int", "dynamic": False, "observer": "minmax"} | weights,
        }
        for number, weights in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": described,
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def weights(bits: int = 4, group: int | None = 32, symmetric: bool = False, **more) -> dict:
    strategy = "channel" if group is None else "group"
    return {
        "num_bits": bits,
        "group_size": group,
        "symmetric": symmetric,
        "strategy": strategy,
    } | more


def matrix(bits: int, outputs: int, inputs: int, group: int):
    """Random signed codes [O, I], zero points and float32 scales [O, G], and groups of inputs."""
    rng = np.random.default_rng(bits)
    half = 2 ** (bits - 1)
    index = np.arange(inputs) // group
    codes = rng.integers(-half, half, (outputs, inputs))
    zeros = rng.integers(-half, half, (outputs, index[-1] + 1))
    return codes, zeros, rng.uniform(0.001, 0.02, zeros.shape).astype(np.float32), index


def keyed(parts: dict, module: str = "w") -> dict:
    return {f"{module}.{leaf}": array for leaf, array in parts.items()}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero", ["none", "packed", "int8"])
@pytest.mark.parametrize("shape", [(33, 64, 32), (40, 32, 16)])
def test_every_width(opened, packing, bits_of, bits, zero, shape):
    codes, zeros, scales, index = matrix(bits, *shape)
    if zero == "none":
        zeros = np.zeros_like(zeros)
    parts = packing.compressed(codes, scales, bits, zeros if zero == "packed" else None)
    if zero == "int8":
        parts["weight_zero_point"] = zeros.astype(np.int8)
    declared = config(weights(bits, shape[2], zero == "none"))
    folder = opened(keyed(parts), declared)
    whole = packing.product(codes, zeros, scales, index)
    assert list(folder.tensors) == ["w.weight"]
    assert folder.format_counts == {f"compressed-tensors int{bits}": 1}
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)
    for start, stop in [(0, 1), (3, 7), (6, shape[0]), (shape[0] - 1, shape[0])]:
        rows = slice(start, stop)
        np.testing.assert_array_equal(bits_of(folder.read("w.weight", rows)), whole[rows])


@pytest.mark.parametrize("scale_shape", [(24, 1), (24,)])
@pytest.mark.parametrize("bits", [4, 8])
def test_one_scale_a_row(opened, packing, bits_of, bits, scale_shape):
    codes, zeros, scales, index = matrix(bits, 24, 50, 50)
    parts = packing.compressed(codes, scales, bits, zeros)
    parts["weight_scale"] = parts["weight_scale"].reshape(scale_shape)
    rows = len(parts["weight_zero_point"])
    parts["weight_zero_point"] = parts["weight_zero_point"].reshape(rows, *scale_shape[1:])
    folder = opened(keyed(parts), config(weights(bits, None)))
    whole = packing.product(codes, zeros, scales, index)
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)
    np.testing.assert_array_equal(bits_of(folder.read("w.weight", slice(9, 20))), whole[9:20])


@pytest.mark.parametrize("order", ["group", "weight", "static", None])
def test_groups_in_the_order_of_activations(opened, packing, bits_of, order):
    codes, zeros, scales, index = matrix(4, 16, 96, 32)
    index = np.random.default_rng(0).permutation(index)
    parts = packing.compressed(codes, scales, 4, zeros) | {"weight_g_idx": index.astype(np.int32)}
    folder = opened(keyed(parts), config(weights(actorder=order)))
    whole = packing.product(codes, zeros, scales, index)
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)


def test_two_schemes_in_one_folder(opened, packing, bits_of):
    """As in a release with group size 128 for most and 32 for some, and 8 bits beside 4."""
    arrays, wholes = {}, {}
    for module, bits, group in [("a", 4, 64), ("b", 4, 32), ("c", 8, 32)]:
        codes, zeros, scales, index = matrix(bits, 16, 128, group)
        arrays |= keyed(packing.compressed(codes, scales, bits, zeros), module)
        wholes[f"{module}.weight"] = packing.product(codes, zeros, scales, index)
    folder = opened(arrays, config(weights(4, 64), weights(4, 32), weights(8, 32)))
    for key, whole in wholes.items():
        np.testing.assert_array_equal(bits_of(folder.read(key)), whole)


def test_shapes_tell_enough_without_a_configuration(opened, packing, bits_of):
    codes, _, scales, index = matrix(4, 16, 128, 32)
    zeros = np.zeros_like(scales, np.int64)
    folder = opened(keyed(packing.compressed(codes, scales, 4)))
    whole = packing.product(codes, zeros, scales, index)
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)


def test_words_with_empty_ends_are_refused(refusal, packing):
    """Ten codes of 3 bits a word, as early writers packed them: 13 words a row instead of 12."""
    codes, _, scales, _ = matrix(3, 4, 128, 32)
    parts = packing.compressed(codes, scales, 3)
    loose = [
        [packing.stream(row[i : i + 10] + 4, 3)[0] for i in range(0, 128, 10)] for row in codes
    ]
    parts["weight_packed"] = np.array(loose, np.int32)
    text = refusal(keyed(parts), config(weights(3, 32, True)))
    assert "w.weight has 13 words and 4 groups for rows of 128 weights, which fits no" in text
    short = packing.compressed(codes[:, :20], scales[:, :1], 3)
    text = refusal(keyed(short), config(weights(3, None, True)))
    assert "could be packed in more than one way" in text


def test_faults_of_many_matrices_are_named_together(refusal, packing):
    def parts(module, **changes):
        codes, zeros, scales, _ = matrix(4, 16, 64, 32)
        made = packing.compressed(codes, scales, 4, zeros) | changes
        return keyed({leaf: array for leaf, array in made.items() if array is not None}, module)

    zeros = np.zeros
    text = refusal(
        {
            **parts("a", weight_scale=None),
            **parts("b", weight_shape=None),
            **parts("c", weight_packed=None),
            **parts("d", weight_zero_point=None),
            **parts("e", weight_shape=np.array([16, 65])),
            **parts("f", weight_shape=np.array([15, 64])),
            **parts("g", weight_shape=np.array([16, -64])),
            **parts("h", weight_shape=np.array([2, 8, 64])),
            **parts("i", weight_scale=zeros((16, 3), np.float32)),
            **parts("j", weight_zero_point=zeros((3, 2), np.int32)),
            **parts("k", weight_g_idx=zeros(63, np.int32)),
            **parts("l", weight_packed=zeros((16, 8), np.uint8)),
            **parts("m", weight=zeros((16, 64), np.float16)),
            **parts("n", weight_scale=zeros((16, 2), np.uint8)),
            **parts("o", weight_packed=zeros((16, 9), np.int32)),
            **parts("p", weight_shape=np.array([16, 0])),
        },
        config(weights()),
    )
    for expected in (
        "a.weight has weight_packed, weight_shape, weight_zero_point, but no weight_scale",
        "b.weight has weight_packed, weight_scale, weight_zero_point, but no weight_shape",
        "c.weight has weight_scale, weight_shape, weight_zero_point, but no weight_packed",
        "d.weight has no weight_zero_point, but the configuration says asymmetric",
        "e.weight has 8 words and 2 groups for rows of 65 weights, which fits no scheme",
        "f.weight has weight_packed [16, 8] and weight_scale [16, 2], but weight_shape 15, 64",
        "g.weight_shape says 16, -64",
        "h.weight_shape has shape [3]",
        "i.weight has 8 words and 3 groups",
        "j.weight_zero_point has shape [3, 2]; expected [2, 2]",
        "k.weight_g_idx has shape [63]; expected [64]",
        "l.weight_packed is U8; expected I32",
        "m.weight is there in two forms",
        "n.weight_scale is U8",
        "o.weight has 9 words",
        "p.weight_shape says 16, 0",
    ):
        assert expected in text


def test_lost_order_is_refused(refusal, packing):
    codes, zeros, scales, _ = matrix(4, 16, 64, 32)
    parts = keyed(packing.compressed(codes, scales, 4, zeros))
    text = refusal(parts, config(weights(actorder="group")))
    assert "w.weight has no weight_g_idx, but actorder is group" in text


def test_zero_points_of_a_symmetric_scheme_are_refused(opened, read_refusal, packing):
    codes, zeros, scales, _ = matrix(4, 16, 64, 32)
    parts = keyed(packing.compressed(codes, scales, 4, zeros))
    text = read_refusal(parts, config(weights(symmetric=True)))
    assert "w.weight_zero_point holds zero points other than 0" in text
    none = keyed(packing.compressed(codes, scales, 4, np.zeros_like(zeros)))
    opened(none, config(weights(symmetric=True))).read("w.weight")


def test_values_that_make_no_sense_are_refused(read_refusal, packing):
    codes, zeros, scales, index = matrix(4, 16, 64, 32)
    index[0] = 2
    parts = packing.compressed(codes, scales, 4, zeros)
    text = read_refusal(keyed(parts | {"weight_g_idx": index.astype(np.int32)}), config(weights()))
    assert "w.weight_g_idx holds group numbers 0 to 2; there are 2 groups" in text
    scales[0, 0] = np.inf
    text = read_refusal(keyed(packing.compressed(codes, scales, 4, zeros)), config(weights()))
    assert "w.weight_scale: 1 of 32 scales are infinite" in text


@pytest.mark.parametrize(
    ("scale_shape", "size"),
    [((), (9, 40)), ((1,), (9, 40)), ((9, 1), (1, 40)), ((9,), (1, 40)), ((9, 5), (1, 8))],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(opened, packing, bits_of, scale_shape, size, symmetric):
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, (9, 40)).astype(np.int8)
    scales = rng.uniform(0.001, 0.02, scale_shape)
    scales = np.asarray(scales, np.float32)
    zeros = np.asarray(rng.integers(-128, 128, scale_shape), np.int8)
    arrays = {"w.weight": codes, "w.weight_scale": scales}
    arrays |= {} if symmetric else {"w.weight_zero_point": zeros}
    declared = config(weights(8, 8 if size[1] == 8 else None, symmetric), form="int-quantized")
    folder = opened(arrays, declared)
    spread = [
        np.broadcast_to(a.reshape(-1, 40 // size[1]), (9, 40 // size[1])) for a in (zeros, scales)
    ]
    spread[0] = np.zeros_like(spread[0]) if symmetric else spread[0]
    whole = packing.product(codes, *spread, np.arange(40) // size[1])
    assert folder.format_counts == {"int8": 1}
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)
    np.testing.assert_array_equal(bits_of(folder.read("w.weight", slice(4, 8))), whole[4:8])


def test_int8_faults(refusal):
    codes = np.ones((4, 8), np.int8)
    scales = np.ones((4, 1), np.float32)
    text = refusal(
        {
            "a.weight": codes,
            "b.weight": codes,
            "b.weight_scale": np.ones((3, 1), np.float32),
            "c.weight": codes,
            "c.weight_scale": scales,
            "c.weight_zero_point": np.ones((4,), np.int8),
            "d.weight_scale": scales,
            "e.weight": codes,
            "e.weight_scale": scales,
            "e.weight_scale_inv": scales,
        },
        config(weights(8, None), form="int-quantized"),
    )
    for expected in (
        "a.weight is I8",
        "b.weight of shape [4, 8] has scales of shape [3, 1]",
        "c.weight_zero_point has shape [4]; expected [4, 1]",
        "d.weight has weight_scale, but no weight",
        "e.weight is there in two forms: as weight, weight_scale, and as scale_inv",
    ):
        assert expected in text


def test_fp8_blocks_of_a_group(opened, packing, bits_of):
    codes = np.arange(200, dtype=np.uint8).reshape(10, 20)
    codes[codes % 128 == 127] = 0
    scales = np.float32([[0.5, 0.25], [2, 3], [0.1, 0.7]])
    arrays = {
        "w.weight": codes.view(ml_dtypes.float8_e4m3fn),
        "w.weight_scale": scales,
        "w.input_scale": np.float32([1]),
        "w.k_scale": np.float32([1]),
    }
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 16]}
    folder = opened(arrays, config(block, form="float-quantized"))
    spread = np.repeat(np.repeat(scales, 4, 0), 16, 1)[:10, :20]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * spread
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), packing.round(values))
    assert folder.skipped == {"activation scale": 1, "cache scale": 1}
