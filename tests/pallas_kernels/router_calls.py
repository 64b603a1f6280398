"""Calls of the router that tests compare with its rule in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.router import api, triton
from pallas_kernels.router.config import Config
from pallas_kernels.router.specs import OPTIONS, Spec


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
