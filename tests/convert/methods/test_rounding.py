import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from convert.methods import Codes, dequantise, min_max, round_to_nearest
from qwen_jax.quant import WeightFormat

FORMATS = [WeightFormat(b, g, s) for b, g, s in itertools.product((3, 4, 8), (32,), (True, False))]
# Of all formats' tests, so that each format is compiled once.
SHAPE = (3, 4, 70)


def random_weight(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def levels(codes: Codes, format: WeightFormat) -> np.ndarray:
    """All numbers that each group can hold, float64: [O, J, 2^bits]."""
    centre = {3: 3.5, 4: 7.5, 8: 128.0}[format.bits]
    zero = np.full(codes.scale.shape, centre) if codes.zero is None else np.asarray(codes.zero)
    values = np.arange(2**format.bits)
    return np.asarray(codes.scale, np.float64)[..., None] * (values - zero[..., None])


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_each_weight_gets_its_nearest_level(format):
    weight = random_weight(SHAPE)
    codes = round_to_nearest(weight, format)
    group = np.arange(70) // format.group_size
    distance = np.abs(levels(codes, format)[..., group, :] - weight[..., None])
    chosen = np.take_along_axis(distance, np.asarray(codes.values)[..., None].astype(int), -1)
    np.testing.assert_allclose(chosen[..., 0], distance.min(axis=-1), atol=1e-6)
    assert codes.values.dtype == np.uint8 and int(codes.values.max()) < 2**format.bits


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_scales_and_zero_points_are_bfloat16_and_positive(format):
    codes = round_to_nearest(random_weight(SHAPE), format)
    for array in (codes.scale, codes.zero):
        if array is not None:
            assert (array.astype(jnp.bfloat16).astype(jnp.float32) == array).all()
    assert (codes.scale > 0).all() and jnp.isfinite(codes.scale).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("value", [0.0, 0.375, -1.5, 1e-30, -(2.0**100)])
def test_groups_of_one_value_are_exact(format, value):
    weight = np.full(SHAPE, value, np.float32)
    codes = round_to_nearest(weight, format)
    wide = np.asarray(dequantise(codes, format))
    nearest = np.asarray(jnp.asarray(value, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(wide, nearest, rtol=0, atol=1e-29)
    assert (codes.scale > 0).all()


def test_searched_scales_lose_less_than_unsearched_ones_in_every_group():
    format = WeightFormat(3, 32)
    weight = random_weight((16, 64))

    def errors(search):
        wide = dequantise(round_to_nearest(weight, format, search=search), format)
        return np.square(weight - wide).reshape(16, 2, 32).sum(axis=-1)

    assert (errors(True) <= errors(False) + 1e-6).all()
    assert errors(True).sum() < 0.9 * errors(False).sum()


def test_important_inputs_are_rounded_better():
    format = WeightFormat(3, 32)
    weight = random_weight((64, 32))
    importance = np.where(np.arange(32) < 4, 100.0, 1.0).astype(np.float32)
    plain = dequantise(round_to_nearest(weight, format), format)
    heavy = dequantise(round_to_nearest(weight, format, importance=importance), format)
    first = [np.square(weight - wide)[:, :4].sum() for wide in (plain, heavy)]
    assert first[1] < 0.7 * first[0]


def test_min_max_is_the_integer_grid():
    weight = np.array([[-3.0, -1.4, 0.2, 1.6, 3.0, *[0.0] * 27]], np.float32)
    wide = min_max(jnp.asarray(weight), WeightFormat(3, 32))
    np.testing.assert_array_equal(wide[0, :5], [-3, -1, 0, 2, 3])
