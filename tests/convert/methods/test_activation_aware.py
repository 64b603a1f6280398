import numpy as np

from convert.methods import activation_aware, dequantise, solve
from qwen_jax.quant import WeightFormat

FORMAT = WeightFormat(3, 32)


def outlier_problem():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((48, 64)).astype(np.float32)
    x = rng.standard_normal((300, 64))
    x[:, [3, 40]] *= 30
    return weight, (x.T @ x / 300).astype(np.float32)


def test_outliers_among_activations_are_met_by_finer_steps():
    weight, hessian = outlier_problem()
    scaled = solve(weight, hessian, FORMAT, "activation-aware")
    rounded = solve(weight, hessian, FORMAT, "round-to-nearest")
    errors = [float(solution.squares[3]) for solution in (scaled, rounded)]
    assert errors[0] < 0.8 * errors[1]
    scales = np.asarray(scaled.input_scale)
    assert scales[[3, 40]].max() < 0.9 * np.delete(scales, [3, 40]).min()


def test_without_outliers_nothing_is_lost():
    weight, _ = outlier_problem()
    identity = np.eye(64, dtype=np.float32)
    scaled = solve(weight, identity, FORMAT, "activation-aware")
    rounded = solve(weight, identity, FORMAT, "round-to-nearest")
    np.testing.assert_allclose(scaled.input_scale, 1.0)
    assert float(scaled.squares[3]) <= float(rounded.squares[3]) * (1 + 1e-5)


def test_dead_inputs_and_matrices_without_samples_have_finite_scales():
    weight, hessian = outlier_problem()
    dead = hessian.copy()
    dead[5] = dead[:, 5] = 0
    stack = np.stack([hessian, dead, np.zeros_like(hessian)])
    codes, input_scale = activation_aware(np.stack([weight] * 3), stack, FORMAT)
    input_scale = np.asarray(input_scale)
    assert input_scale.shape == (3, 64) and input_scale.dtype == np.float32
    assert np.isfinite(input_scale).all() and (input_scale > 0).all()
    assert np.isfinite(np.asarray(dequantise(codes, FORMAT))).all()
    # The channel that never lit up does not change the others.
    others = np.arange(64) != 5
    ratio = input_scale[1, others] / input_scale[0, others]
    np.testing.assert_allclose(ratio / ratio[0], 1, rtol=0.02)
    np.testing.assert_allclose(input_scale[2], 1.0)


def test_factors_to_be_folded_are_tied_powers_of_two_and_hardly_worse():
    weight, hessian = outlier_problem()
    tied = solve(weight, hessian, FORMAT, "activation-aware", (2, 2, 16))
    free = solve(weight, hessian, FORMAT, "activation-aware")
    rounded = solve(weight, hessian, FORMAT, "round-to-nearest")
    factors = np.asarray(tied.input_scale)
    np.testing.assert_array_equal(np.frexp(factors)[0], 0.5)
    heads = factors.reshape(2, 2, 16)
    np.testing.assert_array_equal(heads[:, 0], heads[:, 1])
    # Both outliers, at 3 and at 40, and what shares their factors.
    assert set(np.flatnonzero(factors < factors.max())) == {3, 19, 40, 56}
    errors = [float(solution.squares[3]) for solution in (tied, free, rounded)]
    assert errors[0] < 1.1 * errors[1] and errors[0] < 0.8 * errors[2]
