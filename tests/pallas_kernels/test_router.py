"""The router against its rule in float64: reference and kernels, options, and odd scores."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import lower_for_cuda
from pallas_kernels.router import RouterOutput, api, router
from pallas_kernels.router.config import SOME_ROWS
from pallas_kernels.router.specs import OPTIONS, SPECS, Spec
from pallas_kernels.testing import interpreted
from tests.pallas_kernels.router_calls import check, choice

CASES = {
    "one row": Spec(1, 64, 8, 3, given=()),
    "60 experts": Spec(13, 600, 60, 4, renormalise=False, given=OPTIONS),
    "one row of options": Spec(5, 300, 37, 5, given=OPTIONS[:-1], shared_row=True),
    "all experts, float32": Spec(3, 301, 7, 7, "bfloat16", "float32", given=("mask", "limit")),
    "one expert": Spec(3, 5, 1, 1),
    "many rows": Spec(SOME_ROWS + 6, 32, 12, 3, given=("valid", "bias")),
    "many rows, float32": Spec(SOME_ROWS + 1, 32, 12, 3, weight="float32"),
    "forced": Spec(6, 90, 21, 5, given=("valid", "forced", "scale")),
    "forced among equals": Spec(30, 8, 60, 7, given=("valid", "limit", "mask", "forced")),
    "forced, not renormalised": Spec(6, 90, 16, 4, renormalise=False, given=("mask", "forced")),
}


@pytest.mark.parametrize("name", CASES)
def test_reference_follows_the_rule(name):
    check(CASES[name], "reference")


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_follow_the_rule(name):
    with interpreted():
        check(CASES[name], "triton")


ON_GPU = CASES | {
    name: dataclasses.replace(spec, rows=min(spec.rows, 2500)) for name, spec in SPECS.items()
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_kernels_on_a_gpu_follow_the_rule(name):
    check(ON_GPU[name], "triton")


@pytest.mark.parametrize("name", SPECS)
def test_kernels_lower_for_cuda(name):
    spec = SPECS[name]

    def call(*arrays):
        return api.OPERATION(*arrays, implementation="triton", **spec.settings())

    launches = 1 if spec.rows > SOME_ROWS and spec.weight == "float32" else 2
    assert lower_for_cuda(call, *spec.arguments()).count("xla.gpu.triton") == launches


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
def test_nan_of_either_sign_ranks_as_infinity_does(implementation):
    output = odd(implementation, [np.inf, np.nan, -np.nan, np.inf], slots=4)
    assert output.ids.tolist() == [[0, 1, 2, 3]]


@BOTH
def test_zeros_of_either_sign_rank_alike(implementation):
    """The first is so little below zero that what is left of it is its sign."""
    output = odd(implementation, [-1e-30, -1, -2, -3], temperature=jnp.asarray([1e30]))
    assert output.ids.tolist() == [[0, 1, 2]]


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
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_forced_expert_comes_before_one_at_infinity(implementation, wrong):
    """Of more that are forced than there are slots too; and what is not chosen is in no sum."""
    forced = jnp.asarray([[False, True, True, True]])
    output = odd(implementation, [wrong, 0, 0, 0], slots=2, forced=forced)
    assert output.ids.tolist() == [[2, 1]]
    total = 1 + np.exp(-1)
    np.testing.assert_allclose(output.weights, [[1 / total, np.exp(-1) / total]], 1e-6)


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
