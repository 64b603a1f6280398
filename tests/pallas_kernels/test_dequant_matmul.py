"""Products with codes against float64: reference and Triton kernels, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target
from pallas_kernels.dequant_matmul import (
    api,
    dequant_matmul,
    layout,
    reference,
    triton,
    unpacked,
)
from pallas_kernels.dequant_matmul.config import (
    FewRows,
    ManyRows,
    SomeRows,
    Unpacked,
)
from pallas_kernels.dequant_matmul.qtensor import QTensor
from pallas_kernels.dequant_matmul.specs import SPECS, Matrix
from pallas_kernels.testing import interpreted, norm_error
from tests.pallas_kernels.coded_products import check, drawn, launches, small

CASES = {
    "1 row": small(1, 3, 32),
    "1 row, one input": small(1, 3, 64, inputs=1),
    "2 rows": small(2, 4, 64, zero=True),
    "4 rows": small(4, 3, 128, scale="float32", zero=True),
    "1 row, 8 bits": small(1, 8, 128, zero=True, result="bfloat16"),
    "5 rows": small(5, 3, 128),
    "16 rows": small(16, 4, 64, zero=True, outputs=70),
    "64 rows": small(64, 3, 32, inputs=200, result="bfloat16"),
    "65 rows": small(65, 3, 32),
    "65 rows, 8 bits": small(65, 8, 128, zero=True, result="bfloat16"),
}


# Rows are nothing to the reference: each format once.
FORMATS = ["1 row, one input", "4 rows", "16 rows", "64 rows", "65 rows, 8 bits"]


@pytest.mark.parametrize("name", FORMATS)
def test_reference_equals_the_formula(name):
    check(CASES[name], "reference")


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_formula(name):
    # Many multiprocessors make programs of few outputs, which compile sooner.
    with interpreted(cores=37):
        check(CASES[name], "triton")


# Three tiles or more along each axis, the last ones not full.
CUTS = {
    "few rows": (small(2, 3, 32, inputs=520, zero=True), FewRows(8, 8, 1, awaited=True)),
    "few rows, abreast": (small(1, 8, 128, inputs=1340, outputs=5), FewRows(4, 8, 1, abreast=True)),
    "some rows": (small(33, 3, 64, zero=True, outputs=70), SomeRows(16, 32)),
    "some rows, 4 bits": (small(17, 4, 32, inputs=420, outputs=70), SomeRows(16, 32, blocks=2)),
    "some rows, split": (
        small(7, 8, 32, inputs=520, outputs=32, scale="float32"),
        SomeRows(16, 32, 3, blocks=2),
    ),
    "many rows": (small(70, 3, 64, zero=True), ManyRows(32, 16, 4)),
    "unpacked": (small(66, 3, 32, zero=True), Unpacked(16, 4, 1)),
}


# Multiples of the tile, which need no masks.
WHOLE = {
    "few rows, whole tiles": (small(1, 4, 64, inputs=512, outputs=16), FewRows(4, 8, 1)),
    "unpacked, whole tiles": (small(66, 8, 64, inputs=384, outputs=48), Unpacked(16, 4, 1)),
    "many rows, whole tiles": (small(96, 4, 128, inputs=384, outputs=48), ManyRows(32, 16, 4)),
}


@pytest.mark.parametrize("name", CUTS)
def test_several_tiles(name):
    with interpreted():
        check(CUTS[name][0], None, CUTS[name][1])


def test_a_large_matrix_is_made_part_by_part(monkeypatch):
    """Three parts of 32 outputs, of which the last two overlap."""
    monkeypatch.setattr(unpacked, "PART_BYTES", 2 * 300 * 32)
    spec = small(66, 4, 128, zero=True, outputs=85)
    with interpreted():
        check(spec, None, Unpacked(16, 16, 1))
        run = functools.partial(
            triton.dequant_matmul, config=Unpacked(16, 16, 1), **spec.settings()
        )
        made = re.findall(r"bf16\[(\d+),300\]", str(jax.make_jaxpr(run)(*drawn(spec)[0])))
    assert max(int(outputs) for outputs in made if outputs != "66") == 32


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_whole_tiles(name):
    with interpreted():
        check(WHOLE[name][0], None, WHOLE[name][1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUTS | WHOLE)
def test_several_tiles_on_a_gpu(name):
    spec, config = (CUTS | WHOLE)[name]
    check(spec, None, config)


ON_GPU = CASES | {
    f"{rows} rows, {bits} bits, groups of {group_size}": small(
        rows, bits, group_size, outputs=1000, inputs=1000, zero=group_size == 64
    )
    for rows in (1, 2, 4, 5, 16, 64, 65, 300)
    for bits in layout.BITS
    for group_size in layout.GROUP_SIZES
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_kernel_on_a_gpu_equals_the_formula(name):
    check(ON_GPU[name], "triton")


@pytest.mark.parametrize("rows", [2, 7, 65])
def test_leading_axes_are_kept_and_nothing_mixes(rows):
    """NaN in one row of inputs and in one scale; an output whose scales are zero is zero."""
    spec = small(rows, 3, 32, inputs=96, zero=True)
    (x, (weight,)), _ = drawn(spec)
    x, scale = x.at[1, 5].set(jnp.nan), weight.scale.at[3, 1].set(jnp.nan).at[7].set(0)
    weight = dataclasses.replace(weight, scale=scale)
    with interpreted(cores=37):
        [y] = dequant_matmul(x[None, :, None], (weight,), implementation="triton")
    assert y.shape == (1, rows, 1, 37)
    assert y.dtype == jnp.bfloat16
    wide = np.asarray(y[0, :, 0], np.float64)
    lost = np.zeros(wide.shape, bool)
    lost[1], lost[:, 3] = True, True
    np.testing.assert_array_equal(np.isnan(wide), lost)
    assert not wide[~lost[:, 7], 7].any()
    expected = np.where(np.arange(37) == 7, 0, drawn(spec)[1][0])
    assert norm_error(np.where(lost, 0, wide), np.where(lost, 0, expected)) < 6e-3


def test_gradient_of_the_kernel(check_gradient, normal):
    """Kernels only go forward: the gradient is the reference's. Codes have none."""
    values = np.random.default_rng(0).integers(0, 8, (5, 40))
    codes, x = jnp.asarray(layout.pack(values, 3)), normal(2, 40)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)

    def function(scale, zero):
        weight = QTensor(codes, scale, zero, None, 40, 32)
        with interpreted():
            [y] = dequant_matmul(
                jnp.asarray(x, jnp.bfloat16), (weight,), dtype="float32", implementation="triton"
            )
        return y

    def oracle(scale, zero):
        scale, zero = (np.repeat(z, 32, axis=1)[:, :40] for z in (scale, zero))
        return x @ (scale * (values - zero)).T

    check_gradient(function, oracle, normal(5, 2), normal(5, 2))


@pytest.mark.parametrize("name", SPECS)
def test_a_call_lowers_for_cuda_as_one_launch(name):
    assert launches(SPECS[name]) == 1


MATRIX = Matrix(12288)


def choose(
    matrix=MATRIX,
    rows=16,
    inputs=2048,
    x="bfloat16",
    dtype="bfloat16",
    target=H200,
    implementation=None,
    **parts,
):
    """What takes a call with one matrix and a plain one; `parts` are others of the first one."""
    weight = matrix.array(inputs)
    parts = {name: jax.ShapeDtypeStruct(*part) if part else None for name, part in parts.items()}
    weights = dataclasses.replace(weight, **parts), Matrix(1, 16).array(inputs)
    settings = {"implementation": implementation, "target": target, "dtype": jnp.dtype(dtype)}
    x = jax.ShapeDtypeStruct((rows, inputs), x)
    return api.OPERATION.choose(x, weights, **settings)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"matrix": Matrix(12288, 4, 32, True, "float32"), "dtype": "float32"},
        {"matrix": Matrix(12288, 8), "inputs": 1},
        {"target": Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))},
    ],
)
def test_a_gpu_takes_the_kernel(changes):
    # What streams is asked first, see `test_dense_stream_calls`.
    choice = choose(implementation="triton", **changes)
    assert (choice.chosen, choice.refused) == ("triton", {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"scale": ((12288, 16), "float16")},
            "scale of weights[0] is float16, not bfloat16 or float32",
        ),
        ({"zero": ((12288, 16), "float16")}, "zero of weights[0] is float16"),
        ({"dtype": "float16"}, "the result is float16"),
        ({"x": "float32"}, "x is float32, not bfloat16"),
        ({"rows": 2**20}, "x has 2147483648 elements, 2^31 or more"),
        ({"rows": 2**18}, "the result of weights[0] has 3221225472 elements"),
        ({"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
    ],
)
def test_refusals_of_the_kernel(changes, reason):
    choice = choose(**changes)
    assert choice.chosen == "reference"
    assert any(reason in said for said in choice.refused["triton"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"codes": ((12288, 5, 64), "uint32")},
            "weights[0]: codes have 5 words for 32 values in groups of 128; accepted are (3, 4, 8)",
        ),
        (
            {"codes": ((12288, 3, 65), "uint32")},
            "codes is uint32[12288, 3, 65]; 2048 inputs in groups of 128 need uint32[12288, 3, 64]",
        ),
        ({"scale": ((12288, 15), "bfloat16")}, "need floating[12288, 16]"),
        ({"matrix": Matrix(12288, 3, 16)}, "in groups of 16; accepted are"),
        ({"dtype": "int8"}, "dtype is int8; accepted is floating point"),
        ({"codes": ((12288, 3, 64), "int32")}, "codes is int32[12288, 3, 64]; 2048 inputs"),
        ({"scale": ((12, 16), "bfloat16")}, "scale is bfloat16[12, 16]; 2048 inputs"),
        ({"zero": ((12288, 8), "bfloat16")}, "zero is bfloat16[12288, 8]; 2048 inputs"),
        ({"input_scale": ((2048,), "float32")}, "weights[0] has an input_scale"),
    ],
)
def test_calls_without_a_meaning_are_refused_by_all(changes, reason):
    choice = choose(**changes)
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said), said


def test_the_reference_works_through_large_matrices_in_pieces(monkeypatch):
    monkeypatch.setattr(reference, "_VALUES_AT_ONCE", 3300)  # 11 outputs at a time
    check(small(5, 3, 64, zero=True), "reference")
    spec = small(5, 3, 64, outputs=8000)
    arrays = spec.arguments()
    compiled = jax.jit(functools.partial(reference.dequant_matmul, **spec.settings())).lower(
        *arrays
    )
    held = compiled.compile().memory_analysis().temp_size_in_bytes
    assert held < 8000 * 300 * 4 / 5
