"""What the tests of all operations share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture
def normal() -> Callable[..., np.ndarray]:
    """Draws float32 standard normal arrays, the same in every run of a test."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return draw


@pytest.fixture
def check_gradient(normal) -> Callable[..., Callable]:
    """Compares the gradient of a function with central differences of its float64 oracle.

    The scalar is the sum of the result times random numbers, and the comparison is along one random
    direction an argument. Returns the compiled value and gradient.
    """

    def check(function: Callable, oracle: Callable, *arguments: np.ndarray) -> Callable:
        wanted = np.asarray(oracle(*arguments))
        cotangent = normal(*wanted.shape)

        def scalar(*arguments):
            return jnp.sum(function(*arguments) * cotangent)

        grad = jax.jit(jax.value_and_grad(scalar, argnums=tuple(range(len(arguments)))))
        value, gradients = grad(*arguments)
        np.testing.assert_allclose(value, np.sum(wanted * cotangent), rtol=1e-3, atol=1e-3)
        wide = [argument.astype(np.float64) for argument in arguments]
        for number, gradient in enumerate(gradients):
            assert np.isfinite(gradient).all(), f"argument {number}"
            direction, epsilon = normal(*gradient.shape).astype(np.float64), 1e-5

            def along(step: float, number=number, direction=direction) -> float:
                moved = [*wide[:number], wide[number] + step * direction, *wide[number + 1 :]]
                return float(np.sum(oracle(*moved) * cotangent))

            slope = (along(epsilon) - along(-epsilon)) / (2 * epsilon)
            size = np.linalg.norm(gradient) * np.linalg.norm(direction)
            slope_of_gradient = np.sum(np.asarray(gradient, np.float64) * direction)
            assert abs(slope_of_gradient - slope) < 1e-4 * size + 1e-6, f"argument {number}"
        return grad

    return check
