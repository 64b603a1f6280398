"""Both forms of the delta rule are accurate whatever the decay and however alike the keys."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from pallas_kernels.delta_rule.rule import CHUNK, chunked_rule, recurrent_rule

SHAPE = (1, 130, 4)  # batch, tokens, heads
WIDTH = 16
FORMS = {"chunked": jax.jit(chunked_rule), "recurrent": jax.jit(recurrent_rule)}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def draw(rng, **given):
    """Arguments of the rule in float32, random but for those given."""
    batch, _, heads = SHAPE
    arguments = {
        "q": unit(rng.standard_normal((*SHAPE, WIDTH))),
        "k": unit(rng.standard_normal((*SHAPE, WIDTH))),
        "v": rng.standard_normal((*SHAPE, WIDTH)),
        "g": -rng.uniform(0, 1, SHAPE),
        "beta": rng.uniform(0, 1, SHAPE),
        "state": rng.standard_normal((batch, heads, WIDTH, WIDTH)),
    } | given
    return [np.asarray(x, np.float32) for x in arguments.values()]


def oracle(q, k, v, g, beta, state):
    q, k, v, g, beta, state = (x.astype(np.float64) for x in (q, k, v, g, beta, state.copy()))
    read = np.zeros(v.shape)
    for b, t, h in np.ndindex(*g.shape):
        s = np.exp(g[b, t, h]) * state[b, h]
        s = s + np.outer(k[b, t, h], beta[b, t, h] * (v[b, t, h] - s.T @ k[b, t, h]))
        state[b, h], read[b, t, h] = s, s.T @ q[b, t, h]
    return read, state


def check(form, arguments):
    for actual, wanted in zip(FORMS[form](*arguments), oracle(*arguments), strict=True):
        assert np.abs(np.asarray(actual) - wanted).max() < 1e-5 * wanted.std()


def decays(rng):
    """Log decays by kind. One running sum would get weak ones behind strong ones wrong."""
    strong = -rng.uniform(0, 50, SHAPE)
    then_weak = np.where(np.arange(SHAPE[1])[None, :, None] < 30, strong, -0.01)
    some = rng.random(SHAPE) < 0.5
    return {
        "none": np.zeros(SHAPE),
        "weak": -rng.uniform(0, 0.01, SHAPE),
        "around one": -rng.uniform(0, 3, SHAPE),
        "strong": strong,
        "strong, then weak": then_weak,
        "mixed": np.where(some, -50, -0.01),
        "mixed, extreme": np.where(some, -1e5, -0.01),
        "forget all at times": np.where(some, -np.inf, -1e-3),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", decays(np.random.default_rng(0)))
def test_any_decay(form, kind):
    rng = np.random.default_rng(0)
    check(form, draw(rng, g=decays(rng)[kind]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("noise", [0, 1e-3, 0.1])
@pytest.mark.parametrize("beta", [1.0, 0.9999, 0.5])
def test_keys_that_repeat(form, noise, beta):
    rng = np.random.default_rng(0)
    keys = np.eye(WIDTH)[0] + noise * rng.standard_normal((*SHAPE, WIDTH))
    check(form, draw(rng, k=unit(keys), g=np.zeros(SHAPE), beta=np.full(SHAPE, beta)))


def test_inverse_as_a_product_of_powers_would_fail_on_keys_that_repeat():
    # (I + A)^-1 = (I - A)(I + A^2)(I + A^4)... is exact on paper, as A^64 = 0.
    system = np.tril(np.full((CHUNK, CHUNK), 0.9999, np.float32), -1)
    inverse, power = np.eye(CHUNK, dtype=np.float32) - system, system
    for _ in range(5):
        power = power @ power
        inverse = inverse + inverse @ power
    exact = np.linalg.inv(np.eye(CHUNK) + system.astype(np.float64))
    assert np.abs(exact).max() < 1.01
    assert np.abs(inverse - exact).max() > 1e3
