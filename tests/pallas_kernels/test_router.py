"""The router against its rule in float64: reference and kernels, options, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, lower_for_cuda
from pallas_kernels.router import RouterOutput, api, few_rows, router, triton
from pallas_kernels.router.config import FEW_ROWS, Config
from pallas_kernels.router.specs import OPTIONS, SPECS, Spec
from pallas_kernels.testing import interpreted


def choice(logits, options, slots: int, *, renormalise: bool):
    """Ids and weights by the rule, in float64, row by row."""
    rows, experts = logits.shape
    ids, weights = np.full((rows, slots), experts), np.zeros((rows, slots))
    for row in range(rows):
        given = {name: array[min(row, len(array) - 1)] for name, array in options.items()}
        score = (logits[row].astype(np.float64) + given.get("bias", 0)) / given.get(
            "temperature", 1
        )
        score[~given.get("mask", np.full(experts, True))] = -np.inf
        forced = given.get("forced", np.full(experts, False))
        filled = min(slots, np.sum(score > -np.inf), max(0, given.get("limit", slots)))
        if filled == 0 or not given.get("valid", True):
            continue
        p = np.exp(score - score.max())
        p /= p.sum()
        open_ones = np.flatnonzero(score > -np.inf)
        chosen = sorted(open_ones, key=lambda e: (not forced[e], 0 if forced[e] else -score[e], e))
        chosen = sorted(chosen[:filled], key=lambda expert: (-score[expert], expert))
        ids[row, :filled] = chosen
        weights[row, :filled] = p[chosen] / (p[chosen].sum() if renormalise else 1)
        weights[row, :filled] *= given.get("scale", np.ones(experts))[chosen]
    return ids, weights


def arguments(spec: Spec) -> list[jax.Array | None]:
    """Numbers whose products float32 holds, so that many scores are equal; some rows are odd.

    Of three rows or more, one may take two experts only, one none, and the last is padding of NaN.
    """
    rng = np.random.default_rng(spec.rows)
    rows, experts = spec.rows, spec.experts
    x = rng.integers(-2, 3, (rows, spec.width)) * (rng.random((rows, spec.width)) < 0.1)
    mask = rng.random((rows, experts)) < 0.8
    valid = np.full(rows, True)
    if rows > 2:
        mask[0], mask[1] = np.arange(experts) < 2, False
        if "valid" in spec.given:
            valid[-1] = False
            x = np.where(valid[:, None], x, np.nan)
    values = [
        x,
        rng.integers(-1, 2, (experts, spec.width)) / 4,
        rng.integers(-3, 4, (rows, experts)) / 8,
        mask,
        valid,
        rng.integers(-1, spec.slots + 3, rows),
        2.0 ** rng.integers(-1, 2, rows),
        rng.random((rows, experts)) < 2 / experts,
        rng.integers(0, 5, (rows, experts)) / 4,
        [1],
    ]
    return [
        None if shape is None else jnp.asarray(_of_shape(np.asarray(value), shape), shape.dtype)
        for shape, value in zip(spec.arguments(), values, strict=True)
    ]


def _of_shape(value: np.ndarray, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """The first rows; or, of several calls, between rows that are odd or not what is asked for."""
    if shape.shape[0] <= len(value):
        return value[: shape.shape[0]]
    others = 1 - value.astype(np.int32) if value.dtype == bool else np.full(value.shape, np.nan)
    return np.concatenate([others, value, others])


def check(spec: Spec, implementation: str | None, config: Config | None = None):
    arrays = arguments(spec)
    run = functools.partial(api.OPERATION, implementation=implementation, **spec.settings())
    if config is not None:
        run = functools.partial(triton.router, config=config, **spec.settings())
    output = jax.jit(run)(*arrays)
    assert [array.dtype for array in output] == [jnp.int32, jnp.float32, jnp.float32]
    x, weight = (np.asarray(array, np.float64) for array in arrays[:2])
    np.testing.assert_array_equal(output.logits, x @ weight.T)
    options = dict(zip(OPTIONS, arrays[2:], strict=True))
    options = {name: np.asarray(a) for name, a in options.items() if a is not None}
    if options.pop("part", None) is not None:
        mine = slice(spec.rows, 2 * spec.rows)
        options |= {name: a[mine] for name, a in options.items() if a.ndim == 2}
    ids, weights = choice(x @ weight.T, options, spec.slots, renormalise=spec.renormalise)
    np.testing.assert_array_equal(output.ids, ids)
    np.testing.assert_allclose(output.weights, weights, 1e-5, 1e-12)


CASES = {
    "one row": Spec(1, 64, 8, 3, given=()),
    "60 experts": Spec(13, 600, 60, 4, renormalise=False, given=OPTIONS),
    "one row of options": Spec(5, 300, 37, 5, given=OPTIONS[:-1], shared_row=True),
    "all experts, float32": Spec(3, 301, 7, 7, "bfloat16", "float32", given=("mask", "limit")),
    "one expert": Spec(3, 5, 1, 1),
    "many rows": Spec(FEW_ROWS + 6, 32, 12, 3, given=("valid", "bias")),
    "forced": Spec(6, 90, 21, 5, given=("valid", "forced", "scale")),
    "forced, not renormalised": Spec(6, 90, 16, 4, renormalise=False, given=("mask", "forced")),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_follows_the_rule(name):
    check(CASES[name], "reference")


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_follow_the_rule(name):
    with interpreted():
        check(CASES[name], "triton")


CUTS = [Config(2, 2, 1, 2), Config(4, 1, 2, 4)]


@pytest.mark.parametrize("config", CUTS, ids=str)
def test_ways_to_cut_the_product(monkeypatch, config):
    """Three blocks or more of rows, experts and columns, the last ones short, in a loop."""
    monkeypatch.setattr(few_rows, "UNROLLED", 8 * config.rows * config.experts)
    with interpreted():
        check(Spec(9, 1300 if config.parts > 1 else 600, 27, 4), None, config)


ON_GPU = CASES | {
    name: dataclasses.replace(spec, rows=min(spec.rows, 1000)) for name, spec in SPECS.items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_kernels_on_a_gpu_follow_the_rule(name):
    check(ON_GPU[name], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*CUTS, Config(1, 4, 2, 2), Config(8, 4, 1, 4)], ids=str)
def test_ways_to_cut_the_product_on_a_gpu(config):
    check(Spec(9, 2100, 27, 4), None, config)
    check(Spec(9, 4100, 27, 4, weight="float32"), None, config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_logits_on_a_gpu_are_products_in_float32(name):
    spec = ON_GPU[name]
    keys = jax.random.split(jax.random.key(0))
    x, weight = (
        jax.random.normal(key, array.shape, array.dtype)
        for key, array in zip(keys, spec.arguments()[:2], strict=True)
    )
    output = router(x, weight, implementation="triton", **spec.settings())
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    # A library's product may add one number after the other: 2,048 of them in float32 are off by
    # 4e-4 at most here, and TF32 would be by 2e-2.
    bar = 1e-6 if spec.rows <= FEW_ROWS else 1e-5
    np.testing.assert_allclose(output.logits, x @ weight.T, 0, bar * spec.width**0.5)
    ids, weights = choice(np.asarray(output.logits), {}, **spec.settings())
    np.testing.assert_array_equal(output.ids, ids)
    np.testing.assert_allclose(output.weights, weights, 1e-5, 1e-12)


def odd(implementation: str, bias: list[float], **settings: Any) -> RouterOutput:
    """Of logits 0, 1, 2, 3 and a bias."""
    with interpreted():
        return router(
            jnp.ones((1, 1)),
            jnp.arange(4.0)[:, None],
            bias=jnp.asarray([bias], jnp.float32),
            implementation=implementation,
            **{"slots": 3, "renormalise": True} | settings,
        )


BOTH = pytest.mark.parametrize("implementation", ["triton", "reference"])


@BOTH
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_score_that_is_no_number_comes_first_and_no_weight_is_one(
    implementation, renormalise, wrong
):
    output = odd(implementation, [0, wrong, 0, 0], renormalise=renormalise)
    assert output.ids.tolist() == [[1, 3, 2]]
    assert np.isnan(output.weights).all()


@BOTH
def test_a_row_of_nan_takes_experts_that_exist(implementation):
    output = odd(implementation, [np.nan] * 4)
    assert output.ids.tolist() == [[0, 1, 2]]
    assert np.isnan(output.weights).all()


@BOTH
def test_an_expert_at_minus_infinity_is_not_chosen(implementation):
    output = odd(implementation, [0, -np.inf, -np.inf, 0], slots=4)
    assert output.ids.tolist() == [[3, 0, 4, 4]]
    np.testing.assert_allclose(output.weights, [[1 / (1 + np.exp(-3)), 1 / (1 + np.exp(3)), 0, 0]])


@BOTH
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_forced_expert_is_chosen_whatever_its_score_but_not_against_the_mask(
    implementation, renormalise
):
    """One of -infinity has weight 0 behind the others; scores far apart leave no NaN."""
    options = {
        "forced": jnp.asarray([[True, True, True, False]]),
        "mask": jnp.asarray([[True, False, True, True]]),
        "renormalise": renormalise,
    }
    output = odd(implementation, [-np.inf, 0, -200, 0], slots=2, **options)
    assert output.ids.tolist() == [[2, 0]]
    np.testing.assert_array_equal(output.weights, [[renormalise, 0]])
    output = odd(implementation, [-np.inf, np.nan, 0, 0], slots=3, **options)
    assert output.ids.tolist() == [[3, 2, 0]]
    total = 1 + np.exp(-1)
    np.testing.assert_allclose(output.weights, [[1 / total, np.exp(-1) / total, 0]], 1e-6)


@BOTH
def test_a_scale_that_is_no_number_does_not_reach_empty_slots(implementation):
    options = {"limit": jnp.asarray([1]), "scale": jnp.asarray([[np.inf, np.nan, np.nan, 2.0]])}
    output = odd(implementation, [0.0] * 4, slots=4, renormalise=True, **options)
    assert output.ids.tolist() == [[3, 4, 4, 4]]
    assert output.weights.tolist() == [[2, 0, 0, 0]]


@BOTH
def test_zeros_of_either_sign_are_equal(implementation):
    with interpreted():
        output = router(
            jnp.asarray([[0.0]]),
            jnp.asarray([[-1.0], [1.0], [-1.0], [1.0]]),
            slots=4,
            renormalise=False,
            implementation=implementation,
        )
    assert output.ids.tolist() == [[0, 1, 2, 3]]
    assert output.weights.tolist() == [[0.25] * 4]


@pytest.mark.parametrize("renormalise", [True, False])
def test_gradient_of_the_kernels(check_gradient, normal, renormalise):
    """Kernels only go forward: the gradient is the reference's. Empty slots have none."""
    mask = np.full((4, 9), True)
    mask[1], mask[2, 3:] = False, False
    limit = np.asarray([1, 3, 3, 0], np.int32)
    values = normal(4, 6), normal(9, 6), normal(4, 9), 1 + normal(4) ** 2

    def function(x, weight, bias, temperature):
        with interpreted():
            output = router(
                x,
                weight,
                bias=bias,
                temperature=temperature,
                mask=jnp.asarray(mask),
                limit=jnp.asarray(limit),
                slots=3,
                renormalise=renormalise,
                implementation="triton",
            )
        return jnp.concatenate([output.weights, output.logits], axis=1)

    def oracle(x, weight, bias, temperature):
        options = {"bias": bias, "temperature": temperature, "mask": mask, "limit": limit}
        logits = x @ weight.T
        weights = choice(logits, options, 3, renormalise=renormalise)[1]
        return np.concatenate([weights, logits], axis=1)

    check_gradient(function, oracle, *values)


@pytest.mark.parametrize("name", SPECS)
def test_kernels_lower_for_cuda(name):
    spec = SPECS[name]

    def call(*arrays):
        return api.OPERATION(*arrays, implementation="triton", **spec.settings())

    launches = 2 if spec.rows <= FEW_ROWS else 1
    assert lower_for_cuda(call, *spec.arguments()).count("xla.gpu.triton") == launches


def choose(target=H200, **changes):
    spec = dataclasses.replace(SPECS["8 rows, 8 of 256, all options"], **changes)
    return api.OPERATION.choose(
        *spec.arguments(), implementation=None, target=target, **spec.settings()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rows": 2**20, "width": 64},
        {"dtype": "bfloat16", "weight": "float32", "given": ()},
        {"experts": 1024, "slots": 1024},
        {"target": Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))},
    ],
)
def test_a_gpu_takes_the_kernels(changes):
    choice = choose(**changes)
    assert (choice.chosen, choice.refused) == ("triton", {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "x is float16, not bfloat16 or float32"),
        ({"weight": "float16"}, "weight is float16"),
        ({"experts": 1025}, "weight has 1025 experts, more than 1024"),
        ({"rows": 2**20}, "x has 2147483648 numbers, 2^31 or more"),
        ({"rows": 2**23, "width": 8}, "the logits has 2147483648 numbers"),
        (
            {"rows": 2**20, "width": 64, "experts": 1024, "given": ("bias", "part")}
            | {"shared_row": False},
            "an option [3145728, 1024] has 3221225472 numbers",
        ),
        ({"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
    ],
)
def test_refusals_of_the_kernels(changes, reason):
    choice = choose(**changes)
    assert choice.chosen == "reference"
    assert any(reason in said for said in choice.refused["triton"])


def test_options_of_several_calls_have_rows_for_each():
    arrays = jnp.ones((2, 3)), jnp.ones((4, 3))
    options = {"part": jnp.ones((1,), jnp.int32), "bias": jnp.zeros((3, 4))}
    with pytest.raises(ExceptionGroup, match="bias has 3 rows; accepted with a part are multiples"):
        router(*arrays, slots=2, renormalise=True, **options)


@pytest.mark.parametrize("slots", [0, 5])
def test_slots_that_have_no_meaning(slots):
    with pytest.raises(ExceptionGroup, match=f"slots is {slots}; accepted is 1 to 4"):
        router(jnp.ones((2, 3)), jnp.ones((4, 3)), slots=slots, renormalise=True)


@pytest.mark.parametrize(
    ("option", "shape", "dtype", "reason"),
    [
        ("bias", (3, 4), "float32", "bias has 3 rows; accepted is 1, or 2 as there are of x"),
        ("mask", (3, 4), "bool", "mask has 3 rows"),
        ("mask", (2, 4), "int32", "mask is int32; accepted is bool"),
        ("bias", (2, 4), "bfloat16", "bias is bfloat16; accepted is float32"),
        ("temperature", (2,), "bfloat16", "temperature is bfloat16; accepted is float32"),
        ("bias", (2, 3), "float32", r"bias is \[R E\] = \[2, 3\], but E is 4 in weight"),
        ("valid", (3,), "bool", r"valid is \[M\] = \[3\], but M is 2 in x"),
        ("valid", (2,), "float32", "valid is float32; accepted is bool"),
        ("limit", (1,), "int32", r"limit is \[M\] = \[1\], but M is 2"),
        ("limit", (2,), "float32", "limit is float32; accepted is int32"),
        ("forced", (3, 4), "bool", "forced has 3 rows; accepted is 1, or 2"),
        ("scale", (1, 4), "bfloat16", "scale is bfloat16; accepted is float32"),
        ("part", (2,), "int32", r"part has shape \[2\]; accepted is \[1\]"),
    ],
)
def test_options_that_have_no_meaning(option, shape, dtype, reason):
    arrays: list[Any] = [None] * len(OPTIONS)
    arrays[OPTIONS.index(option)] = jnp.zeros(shape, dtype)
    with pytest.raises(ExceptionGroup, match=reason):
        api.OPERATION(
            jnp.ones((2, 3)),
            jnp.ones((4, 3)),
            *arrays,
            slots=2,
            renormalise=True,
            implementation=None,
        )
