"""The norms against their formulas in float64: reference and Triton kernel, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, lower_for_cuda
from pallas_kernels.rms_norm import add_rms_norm, api, gated_rms_norm, rms_norm, triton
from pallas_kernels.rms_norm.config import Config, config_for
from pallas_kernels.rms_norm.specs import SPECS, Spec
from pallas_kernels.testing import interpreted, relative_error

EPS = 1e-3


def formula(x, weight, y, gate, *, zero_centred):
    """The norm and the sum, in float64, with the roundings that the definition has before them."""
    dtype = x.dtype
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    total = x if y is None else x + np.asarray(y.astype(dtype), np.float64)
    if dtype == jnp.bfloat16:
        total = np.asarray(total.astype(dtype), np.float64)
    result = total / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + EPS)
    result *= weight + (1 if zero_centred else 0)
    if gate is not None:
        gate = np.asarray(gate, np.float64)
        result *= gate / (1 + np.exp(-gate))
    return result, total


def arguments(spec: Spec) -> list[jax.Array | None]:
    """Values whose sizes differ from row to row; one row is zero."""
    rng = np.random.default_rng(spec.rows)
    size = np.geomspace(1e-3, 1e3, spec.rows)[:, None].astype(np.float32)
    size[spec.rows // 2] = 0
    arrays = []
    for array, scale in zip(spec.arguments(), (size, 1, size, 3), strict=True):
        if array is not None:
            array = jnp.asarray((scale * rng.standard_normal(array.shape)).astype(array.dtype))
        arrays.append(array)
    return arrays


def bar(dtype: str) -> float:
    """Greatest share of its own size by which a result may be off: two roundings of bfloat16."""
    return 1e-5 if dtype == "float32" else 2**-7


def check(spec: Spec, implementation: str | None, config: Config | None = None):
    x, weight, y, gate = arguments(spec)
    settings = {"eps": EPS, "zero_centred": spec.zero_centred, "dtype": jnp.dtype(spec.result)}
    run = functools.partial(api.OPERATION, implementation=implementation, **settings)
    if config is not None:
        run = functools.partial(triton.rms_norm, config=config, **settings)
    normal, total = jax.jit(run)(x, weight, y, gate)
    expected, added = formula(x, weight, y, gate, zero_centred=spec.zero_centred)
    assert normal.dtype == spec.result
    np.testing.assert_allclose(np.asarray(normal, np.float64), expected, bar(spec.result), 1e-6)
    if y is None:
        assert total is None
    else:
        assert total.dtype == spec.dtype
        np.testing.assert_allclose(np.asarray(total, np.float64), added, bar(spec.dtype), 1e-6)


HEADS = {"result": "bfloat16", "weight": "float32", "gated": True, "zero_centred": False}
CASES = {
    "one row": Spec(1, 64),
    "plain": Spec(5, 96, result="float32", zero_centred=False),
    "zero-centred": Spec(5, 96, result="float32", weight="float32"),
    "bfloat16": Spec(5, 160, "bfloat16"),
    "one number": Spec(3, 1, result="float32"),
    "add": Spec(5, 80, result="float32", added="bfloat16"),
    "add to bfloat16": Spec(5, 64, "bfloat16", added="float32"),
    "gated": Spec(7, 128, "bfloat16", **HEADS),
    "gated, float32": Spec(7, 24, "float32", **HEADS | {"result": "float32"}),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_the_formula(name):
    check(CASES[name], "reference")


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_formula(name):
    with interpreted():
        check(CASES[name], "triton")


@pytest.mark.parametrize(("name", "rows"), [("add", 3), ("add", 11), ("gated", 1), ("gated", 8)])
def test_programs_of_several_rows(name, rows):
    with interpreted():
        check(dataclasses.replace(CASES[name], rows=rows), None, Config(4, 1))


ON_GPU = CASES | {
    name: dataclasses.replace(spec, rows=min(spec.rows, 5000)) for name, spec in SPECS.items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_kernel_on_a_gpu_equals_the_formula(name):
    check(ON_GPU[name], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_programs_of_several_rows_on_a_gpu(rows):
    check(dataclasses.replace(CASES["gated"], rows=rows), None, Config(4, 1))


def test_the_three_calls_reach_their_forms():
    x, weight, y, _ = arguments(CASES["add"])
    expected, added = formula(x, weight, y, None, zero_centred=True)
    normal, total = add_rms_norm(x, y, weight, eps=EPS, zero_centred=True)
    assert relative_error(normal, expected) < 1e-5
    assert relative_error(total, added) < 1e-5
    plain, _ = formula(x, weight, None, None, zero_centred=False)
    assert relative_error(rms_norm(x, weight, eps=EPS), plain) < 1e-5
    gate = jnp.broadcast_to(jnp.flip(weight), x.shape)
    gated, _ = formula(x, weight, None, gate, zero_centred=False)
    assert relative_error(gated_rms_norm(x, gate, weight, eps=EPS), gated) < 1e-5
    assert rms_norm(x, weight, eps=EPS, dtype="bfloat16").dtype == jnp.bfloat16
    assert gated_rms_norm(x.astype(jnp.bfloat16), gate, weight, eps=EPS).dtype == jnp.bfloat16


def test_leading_axes_are_kept_and_rows_do_not_mix():
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 32)).astype(np.float32)
    x[1, 0, 2] = np.nan
    with interpreted():
        normal = rms_norm(jnp.asarray(x), jnp.ones(32), eps=EPS, implementation="triton")
    assert normal.shape == x.shape
    np.testing.assert_array_equal(np.isnan(normal), np.isnan(x))


@pytest.mark.parametrize("form", ["plain", "add", "gated"])
def test_gradient_of_the_kernel(check_gradient, normal, form):
    """Kernels only go forward: the gradient is the reference's."""
    x, other, weight = normal(3, 10), normal(3, 10), normal(10)

    def function(x, other, weight):
        settings = {"eps": EPS, "implementation": "triton"}
        with interpreted():
            if form == "gated":
                return gated_rms_norm(x, other, weight, **settings)
            if form == "plain":
                return rms_norm(x, weight, zero_centred=True, **settings) * other
            both = add_rms_norm(x, other, weight, **settings)
            return both.normal * both.total

    def oracle(x, other, weight):
        if form == "gated":
            return formula(x, weight, None, other, zero_centred=False)[0]
        if form == "plain":
            return formula(x, weight, None, None, zero_centred=True)[0] * other
        return np.prod(formula(x, weight, other, None, zero_centred=False), axis=0)

    check_gradient(function, oracle, x, other, weight)


@pytest.mark.parametrize("name", SPECS)
def test_kernel_lowers_for_cuda_as_one_launch(name):
    spec = SPECS[name]

    def call(*arrays):
        return api.OPERATION(*arrays, implementation="triton", **spec.settings())

    assert lower_for_cuda(call, *spec.arguments()).count("xla.gpu.triton") == 1


def choose(target=H200, **changes):
    spec = dataclasses.replace(SPECS["8 rows"], **changes)
    return api.OPERATION.choose(
        *spec.arguments(), implementation=None, target=target, **spec.settings()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"width": 5120, "rows": 100_000},
        {"width": 1, "dtype": "bfloat16", "weight": "float32"},
        {"added": "float32", "result": "float32"},
        {"gated": True, "target": Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))},
    ],
)
def test_a_gpu_takes_the_kernel(changes):
    choice = choose(**changes)
    assert (choice.chosen, choice.refused) == ("triton", {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "x is float16, not bfloat16 or float32"),
        ({"weight": "float16"}, "weight is float16"),
        ({"added": "float16"}, "y is float16"),
        ({"result": "float16"}, "the result is float16"),
        ({"width": 16385}, "rows of x have 16385 numbers, more than 16384"),
        ({"rows": 2**20}, "x has 2147483648 numbers, 2^31 or more"),
        ({"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
    ],
)
def test_refusals_of_the_kernel(changes, reason):
    choice = choose(**changes)
    assert choice.chosen == "reference"
    assert any(reason in said for said in choice.refused["triton"])


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (1, "weight is [D] = [3], but D is 2048 in x"),
        (2, "y is [... D] = [3], but ... is (8,) in x"),
        (3, "gate is [... D] = [3], but D is 2048 in x"),
    ],
)
def test_calls_without_a_meaning_are_refused_by_all(place, reason):
    arrays = list(SPECS["8 rows"].arguments())
    arrays[place] = jax.ShapeDtypeStruct((3,), jnp.float32)
    choice = api.OPERATION.choose(
        *arrays, implementation=None, target=H200, **SPECS["8 rows"].settings()
    )
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said)


def test_few_rows_get_a_program_each_and_many_narrow_ones_share():
    programs = {name: config_for(H200, SPECS[name].arguments()[0]) for name in SPECS}
    assert programs["1 row"] == Config(1, 16)
    assert programs["gated, 1 token"] == Config(1, 1)
    assert programs["gated, 8192 tokens"] == Config(16, 8)
