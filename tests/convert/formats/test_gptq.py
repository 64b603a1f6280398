"""GPTQ matrices, packed here code by code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

BITS = (2, 3, 4, 8)


def config(bits: int = 4, group: int = 32, **more) -> dict:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False} | more


def matrix(bits: int, outputs: int, inputs: int, group: int, seed: int = 0):
    """Random codes [O, I], zero points and float16 scales [O, G], and the group of each input."""
    rng = np.random.default_rng(seed)
    index = np.arange(inputs) // group
    codes = rng.integers(0, 2**bits, (outputs, inputs))
    zeros = rng.integers(0, 2**bits, (outputs, index[-1] + 1))
    scales = rng.uniform(0.001, 0.02, zeros.shape).astype(np.float16)
    return codes, zeros, scales, index


def keyed(parts: dict, module: str = "w") -> dict:
    return {f"{module}.{leaf}": array for leaf, array in parts.items()}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("order", ["absent", "in order", "by activation"])
def test_every_width(opened, packing, bits_of, bits, version, order):
    codes, zeros, scales, index = matrix(bits, 64, 96, 32)
    parts = packing.gptq(codes, zeros, scales, bits, version)
    if order != "absent":
        index = np.random.default_rng(1).permutation(index) if order == "by activation" else index
        parts["g_idx"] = index.astype(np.int32)
    declared = config(bits, checkpoint_format={1: "gptq", 2: "gptq_v2"}[version])
    folder = opened(keyed(parts), declared | {"desc_act": order == "by activation"})
    whole = packing.product(codes, zeros, scales, index)
    assert list(folder.tensors) == ["w.weight"]
    assert folder.tensors["w.weight"].shape == (64, 96)
    assert folder.format_counts == {f"GPTQ int{bits}": 1}
    np.testing.assert_array_equal(bits_of(folder.read("w.weight")), whole)
    for start, stop in [(0, 1), (5, 40), (31, 33), (63, 64), (10, 10)]:
        rows = slice(start, stop)
        np.testing.assert_array_equal(bits_of(folder.read("w.weight", rows)), whole[rows])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(60, 64, 16), (1, 32, -1), (8, 160, 128), (33, 32, 32)]
)
def test_odd_sizes(opened, packing, bits_of, bits, outputs, inputs, group):
    size = inputs if group == -1 else group
    codes, zeros, scales, index = matrix(bits, outputs, inputs, size)
    parts = packing.gptq(codes, zeros, scales, bits)
    folder = opened(keyed(parts, "mlp.gate"), config(bits, group))
    whole = packing.product(codes, zeros, scales, index)
    np.testing.assert_array_equal(bits_of(folder.read("mlp.gate.weight")), whole)


def test_inputs_that_fill_no_word(opened, packing, bits_of):
    codes, zeros, scales, index = matrix(3, 32, 40, 20)
    parts = packing.gptq(codes, zeros, scales, 3) | {"g_idx": index.astype(np.int32)}
    values = opened(keyed(parts), config(3, 20)).read("w.weight")
    np.testing.assert_array_equal(bits_of(values), packing.product(codes, zeros, scales, index))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_other_dtypes_of_scales(opened, packing, bits_of, dtype):
    codes, zeros, scales, index = matrix(4, 16, 32, 32)
    parts = packing.gptq(codes, zeros, scales, 4)
    parts["scales"] = (parts["scales"].astype(np.float32) * 1.001).astype(dtype)
    values = opened(keyed(parts), config()).read("w.weight")
    whole = packing.product(codes, zeros, parts["scales"].T, index)
    np.testing.assert_array_equal(bits_of(values), whole)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
def test_symmetric_zero_point_is_the_middle(opened, packing, bits_of, bits, label, version):
    """Whatever the label says: releases exist that store version 2 under the name of version 1."""
    codes, zeros, scales, index = matrix(bits, 32, 32, 32)
    zeros[:] = 2 ** (bits - 1)
    parts = packing.gptq(codes, zeros, scales, bits, version)
    declared = config(bits, checkpoint_format=label, sym=True)
    whole = packing.product(codes, zeros, scales, index)
    np.testing.assert_array_equal(bits_of(opened(keyed(parts), declared).read("w.weight")), whole)


def test_symmetric_with_other_zero_points_is_refused(read_refusal, packing):
    codes, zeros, scales, _ = matrix(4, 8, 32, 32)
    for value in (6, 9):
        zeros[:] = value
        parts = keyed(packing.gptq(codes, zeros, scales, 4, 2))
        text = read_refusal(parts, config(sym=True))
        assert f"w.qzeros holds zero points {value} to {value}" in text
    zeros[:] = 8
    zeros[3] = 7
    parts = keyed(packing.gptq(codes, zeros, scales, 4, 2))
    assert "holds zero points 7 to 8" in read_refusal(parts, config(sym=True))


def test_stored_field_of_all_ones_is_zero(opened, packing, bits_of):
    codes, zeros, scales, index = matrix(4, 8, 32, 32)
    zeros[:] = 0
    parts = packing.gptq(codes, zeros, scales, 4)
    assert (parts["qzeros"] == -1).all()
    whole = packing.product(codes, zeros, scales, index)
    np.testing.assert_array_equal(bits_of(opened(keyed(parts), config()).read("w.weight")), whole)


def test_other_bits_and_groups_by_module(opened, packing, bits_of):
    arrays, wholes = {}, {}
    for module, bits, group in [("a", 4, 32), ("b", 8, 32), ("c", 4, 16), ("d", 2, 96)]:
        codes, zeros, scales, index = matrix(bits, 32, 96, group)
        arrays |= keyed(packing.gptq(codes, zeros, scales, bits), module)
        wholes[f"{module}.weight"] = packing.product(codes, zeros, scales, index)
    dynamic = {
        "lm_head": {},
        "+:.*b": {"bits": 8},
        "c$": {"group_size": 16},
        "d": {"bits": 2, "group_size": -1},
        "-:.*visual.*": {},
    }
    folder = opened(arrays, config(dynamic=dynamic))
    for key, whole in wholes.items():
        np.testing.assert_array_equal(bits_of(folder.read(key)), whole)
    assert folder.format_counts == {"GPTQ int4": 2, "GPTQ int8": 1, "GPTQ int2": 1}


def test_negative_and_zero_scales_are_read(opened, packing, bits_of):
    codes, zeros, scales, index = matrix(4, 16, 64, 32)
    scales[2] = 0
    scales[5] *= -1
    values = opened(keyed(packing.gptq(codes, zeros, scales, 4)), config()).read("w.weight")
    whole = packing.product(codes, zeros, scales, index)
    np.testing.assert_array_equal(bits_of(values), whole)


def test_faults_of_many_matrices_are_named_together(refusal, packing):
    def parts(module, **changes):
        made = packing.gptq(*matrix(4, 32, 64, 32)[:3], 4) | changes
        return keyed({leaf: array for leaf, array in made.items() if array is not None}, module)

    zeros = np.zeros
    arrays = {
        **parts("a", qzeros=None),
        **parts("b", scales=None),
        **parts("c", qweight=None),
        **parts("d", scales=zeros((2, 31), np.float16)),
        **parts("e", scales=zeros((3, 32), np.float16)),
        **parts("f", qzeros=zeros((2, 5), np.int32)),
        **parts("g", g_idx=zeros(56, np.int32)),
        **parts("h", g_idx=zeros((64, 1), np.int32)),
        **parts("i", qweight=zeros((8, 32), np.int64)),
        **parts("j", qweight=zeros((16, 32), np.int32)),
        **parts("k", weight=zeros((32, 64), ml_dtypes.bfloat16)),
        **parts("l", weight_scale=zeros((1,), np.float32)),
        **parts("m", qweight=zeros((8, 32, 1), np.int32)),
        **parts("n", qweight=zeros((0, 32), np.int32)),
        **parts("o", g_idx=zeros((0,), np.int32)),
        **parts("p", scales=zeros((2, 32), np.int8)),
    }
    text = refusal(arrays, config())
    for expected in (
        "a.weight has qweight, scales, but no qzeros",
        "b.weight has qweight, qzeros, but no scales",
        "c.weight has qzeros, scales, but no qweight",
        "d.weight has qweight [8, 32] and scales [2, 31]",
        "e.weight has qweight [8, 32], qzeros [2, 4], scales [3, 32], which do not fit the",
        "f.weight has qweight [8, 32], qzeros [2, 5]",
        "g.weight has g_idx [56]",
        "h.g_idx has shape [64, 1]",
        "i.qweight is I64",
        "j.weight has qweight [16, 32]",
        "k.weight is there in two forms: as qweight, qzeros, scales, and as weight",
        "l.weight is there in two forms",
        "m.qweight has shape [8, 32, 1]",
        "n.qweight has shape [0, 32]",
        "o.g_idx has shape [0]",
        "p.scales is I8",
        "4 bits in groups of 32",
    ):
        assert expected in text


def test_shapes_must_fit_the_configuration(refusal, packing):
    arrays = keyed(packing.gptq(*matrix(4, 32, 64, 32)[:3], 4))
    assert "8 bits in groups of 32" in refusal(arrays, config(8))
    assert "4 bits in groups of 64" in refusal(arrays, config(4, 64))
    assert "fit more than one of" in refusal(arrays, config(dynamic={"x": {"group_size": 33}}))


@pytest.mark.parametrize("number", [-1, 2])
def test_group_numbers_out_of_range_are_refused(read_refusal, packing, number):
    codes, zeros, scales, index = matrix(4, 8, 64, 32)
    index[5] = number
    parts = packing.gptq(codes, zeros, scales, 4) | {"g_idx": index.astype(np.int32)}
    text = read_refusal(keyed(parts), config())
    assert f"{min(number, 0)} to {max(number, 1)}; there are 2 groups" in text


def test_scales_that_are_not_finite_are_refused(read_refusal, packing):
    codes, zeros, scales, _ = matrix(4, 8, 64, 32)
    scales[7, 1] = np.nan
    text = read_refusal(keyed(packing.gptq(codes, zeros, scales, 4)), config())
    assert "w.scales: 1 of 16 scales are infinite or not a number" in text


def test_lost_order_is_refused(opened, refusal, packing):
    arrays = keyed(packing.gptq(*matrix(4, 8, 64, 32)[:3], 4))
    assert "w.weight has no g_idx, but desc_act is true" in refusal(arrays, config(desc_act=True))
    opened(arrays, config(desc_act=True, static_groups=True))
    one_group = keyed(packing.gptq(*matrix(4, 8, 64, 64)[:3], 4))
    opened(one_group, config(4, 64, desc_act=True))


@pytest.mark.parametrize("declared", [None, {"quant_method": "fp8"}])
def test_zero_convention_must_be_declared(refusal, packing, declared):
    text = refusal(keyed(packing.gptq(*matrix(4, 8, 64, 32)[:3], 4)), declared)
    assert "w.weight has qweight, qzeros, scales, but the configuration says" in text
