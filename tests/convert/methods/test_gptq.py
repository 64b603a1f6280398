import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.methods import dequantise, gptq, refined, round_to_nearest, solve
from convert.methods.hessian import DAMPING, factor
from qwen_jax.quant import WeightFormat

FORMAT = WeightFormat(3, 32)
FACTOR = jax.jit(factor)


def problem(outputs=12, inputs=80, rows=400, stack=(), seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((*stack, outputs, inputs)).astype(np.float32)
    x = rng.standard_normal((*stack, rows, inputs)) @ rng.standard_normal((inputs, inputs))
    x *= rng.lognormal(size=inputs)
    hessian = (np.swapaxes(x, -1, -2) @ x / rows).astype(np.float32)
    return weight, hessian


def textbook(weight, hessian, scale, zero, order, bits):
    """The algorithm as in the paper, float64: inverse, its Cholesky factor, column by column."""
    weight = weight.astype(np.float64)[:, order]
    hessian = hessian.astype(np.float64)[np.ix_(order, order)]
    hessian = hessian + DAMPING * np.mean(np.diagonal(hessian)) * np.eye(len(order))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    codes = np.zeros(weight.shape, int)
    for i, column in enumerate(order):
        ratio = weight[:, i] / scale[:, column] + zero[:, column]
        codes[:, column] = np.clip(np.round(ratio), 0, 2**bits - 1)
        error = weight[:, i] - scale[:, column] * (codes[:, column] - zero[:, column])
        weight[:, i + 1 :] -= np.outer(error / upper[i, i], upper[i, i + 1 :])
    return codes


def solve_two(weight, *hessians):
    """A matrix with two Hessians: one shape, and so one program, for all tests."""
    return solve(np.stack([weight] * 2), np.stack(hessians), FORMAT, "gptq")


def output_error(weight, wide, hessian):
    difference = np.asarray(weight, np.float64) - np.asarray(wide, np.float64)
    return np.einsum("...oi,...ij,...oj->...o", difference, hessian.astype(np.float64), difference)


@pytest.mark.parametrize(
    ("format", "options"),
    [(FORMAT, {}), (WeightFormat(4, 32, False), {"act_order": False})],
    ids=["act order", "plain order"],
)
def test_codes_are_those_of_the_textbook(format, options):
    weight, hessian = problem()
    codes = gptq(weight, hessian, format, **options)
    column = np.arange(weight.shape[1]) // format.group_size
    scale = np.asarray(codes.scale, np.float64)[:, column]
    zero = np.full(scale.shape, 3.5) if codes.zero is None else np.asarray(codes.zero)[:, column]
    order = np.arange(80) if options else np.argsort(-np.diagonal(hessian), kind="stable")
    expected = textbook(weight, hessian, scale, zero, order, format.bits)
    # A ratio near the middle of two levels may fall to the other side in float32.
    assert np.mean(np.asarray(codes.values) == expected) > 0.995


def test_a_stack_is_solved_as_its_matrices_are():
    weight, hessian = problem(stack=(2,))
    together = gptq(weight, hessian, FORMAT)
    for i in range(2):
        alone = gptq(weight[i], hessian[i], FORMAT)
        assert np.mean(np.asarray(together.values[i]) == np.asarray(alone.values)) > 0.995


@pytest.mark.parametrize("seed", range(3))
def test_refinement_never_loses_and_solve_never_loses_to_rounding(seed):
    weight, hessian = problem(seed=seed)
    damped = np.asarray(FACTOR(jnp.asarray(hessian)).damped)
    first = gptq(weight, hessian, FORMAT)
    errors = [output_error(weight, dequantise(first, FORMAT), damped)]
    for sweeps in (1, 4):
        codes = refined(weight, hessian, first, FORMAT, sweeps=sweeps)
        assert codes.values.shape == weight.shape
        errors.append(output_error(weight, dequantise(codes, FORMAT), damped))
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-4)).all()
    assert errors[-1].sum() < 0.95 * errors[0].sum()

    rounded = output_error(weight, dequantise(round_to_nearest(weight, FORMAT), FORMAT), hessian)
    solved = solve_two(weight, hessian, hessian)
    best = output_error(weight, solved.weight(FORMAT)[0], hessian)
    assert (best <= rounded * (1 + 1e-5)).all() and best.sum() < 0.6 * rounded.sum()


def test_refinement_ends_where_no_single_code_can_gain():
    weight, hessian = problem()
    codes = refined(weight, hessian, gptq(weight, hessian, FORMAT), FORMAT, sweeps=30)
    damped = np.asarray(FACTOR(jnp.asarray(hessian)).damped, np.float64)
    best = output_error(weight, dequantise(codes, FORMAT), damped)
    values = np.asarray(codes.values).astype(int)
    for column in range(80):
        for step in (-1, 1):
            other = values.copy()
            other[:, column] = np.clip(other[:, column] + step, 0, 7)
            changed = codes._replace(values=jnp.asarray(other, jnp.uint8))
            error = output_error(weight, dequantise(changed, FORMAT), damped)
            assert (error >= best * (1 - 1e-4)).all()


def singular(kind):
    _, hessian = problem(inputs=80)
    if kind == "dead input":
        hessian[7] = hessian[:, 7] = 0
    if kind == "all zero":
        hessian[:] = 0
    if kind == "one sample":
        x = np.random.default_rng(1).standard_normal(80)
        hessian = np.outer(x, x).astype(np.float32)
    if kind == "tiny":
        hessian *= 1e-30
    if kind == "indefinite":
        hessian -= 0.5 * np.eye(80, dtype=np.float32) * np.diagonal(hessian).mean()
    if kind == "NaN":
        hessian[3, 4] = np.nan
    return hessian


@pytest.mark.parametrize(
    "kind", ["dead input", "all zero", "one sample", "tiny", "indefinite", "NaN"]
)
def test_any_hessian_gives_codes(kind):
    weight, healthy = problem(inputs=80)
    solved = solve_two(weight, healthy, singular(kind))
    wide = np.asarray(solved.weight(FORMAT))
    assert np.isfinite(wide).all() and (np.asarray(solved.codes.scale) > 0).all()
    assert np.isfinite(np.asarray(solved.squares)).all()
    # No worse than rounding by more than samples can ask for, and the neighbour is not disturbed.
    assert np.linalg.norm(wide[1] - weight) < 0.6 * np.linalg.norm(weight)
    undisturbed = solve_two(weight, healthy, healthy)
    np.testing.assert_allclose(wide[0], np.asarray(undisturbed.weight(FORMAT))[0], atol=0.3)
    assert list(np.asarray(solved.usable)) == [True, kind not in ("all zero", "NaN")]
    if kind in ("all zero", "NaN"):
        rounded = dequantise(round_to_nearest(weight, FORMAT), FORMAT)
        error = np.linalg.norm(wide[1] - weight)
        assert error <= np.linalg.norm(np.asarray(rounded) - weight) * (1 + 1e-6)
