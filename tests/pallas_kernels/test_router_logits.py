"""Logits: ways to cut the product, and that it is as exact as float32 allows."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels._compat import H200, lower_for_cuda
from pallas_kernels.router import few_rows, router, some_rows
from pallas_kernels.router.config import (
    FEW_ROWS,
    MANY_ROWS,
    PIECE,
    SOME_ROWS,
    FewRows,
    SomeRows,
    config_for,
    heuristic,
)
from pallas_kernels.router.specs import SPECS, Spec
from pallas_kernels.router.top_k import top_k
from pallas_kernels.testing import interpreted
from tests.pallas_kernels.places import Rows, access
from tests.pallas_kernels.router_calls import check, choice

FEW = [FewRows(2, 2, 1, 2), FewRows(4, 1, 2, 4)]
# Of ten pieces: three blocks of rows and of experts, parts that are uneven, none, or many.
SOME = [
    SomeRows(8, 16, 1, 1, 1),
    SomeRows(8, 16, 3, 1, 3),
    SomeRows(8, 16, 17, 1, 2),
    SomeRows(16, 32, 4, 2, 4),
    SomeRows(32, 16, 10, 4, 2),
]


@pytest.mark.parametrize("config", FEW, ids=str)
def test_ways_to_cut_the_product_on_cuda_cores(monkeypatch, config):
    """Three blocks or more of rows, experts and columns, the last ones short, in a loop."""
    monkeypatch.setattr(few_rows, "UNROLLED", 8 * config.rows * config.experts)
    with interpreted():
        check(Spec(9, 1300 if config.parts > 1 else 600, 27, 4), None, config)


@pytest.mark.parametrize("config", SOME, ids=str)
def test_ways_to_cut_the_product_on_tensor_cores(config):
    with interpreted():
        check(Spec(20, 620, 40, 4, renormalise=False, given=("bias", "forced")), None, config)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 128, 192])
def test_widths_about_a_piece(width):
    with interpreted():
        check(Spec(7, width, 33, 2, "bfloat16"), None, SomeRows(8, 32, 2, 2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*FEW, FewRows(1, 4, 2, 2), FewRows(8, 4, 1, 4)], ids=str)
def test_ways_to_cut_the_product_on_a_gpu(config):
    check(Spec(9, 2100, 27, 4), None, config)
    check(Spec(9, 4100, 27, 4, weight="float32"), None, config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*SOME, SomeRows(64, 32, 16, 8, 3)], ids=str)
@pytest.mark.parametrize("width", [65, 620, 2048])
def test_ways_to_cut_the_product_on_tensor_cores_of_a_gpu(config, width):
    check(Spec(20, width, 40, 4), None, config)
    check(Spec(60, width, 256, 8, "bfloat16", given=("valid", "forced", "mask")), None, config)


@pytest.mark.parametrize("config", SOME, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuts_lower_for_cuda(config, dtype):
    x, weight = Spec(20, 620, 40, dtype=dtype).arguments()[:2]

    def call(x, weight):
        return some_rows.product(x, weight, config)

    assert lower_for_cuda(call, x, weight).count("xla.gpu.triton") == 1


@pytest.mark.parametrize(("rows", "width", "experts"), [(20, 100, 40), (32, 128, 64), (1, 1, 1)])
def test_nothing_past_the_end_is_read_or_written(monkeypatch, rows, width, experts):
    monkeypatch.setattr(some_rows.plt, "load", access)
    monkeypatch.setattr(some_rows.plt, "store", access)
    monkeypatch.setattr(some_rows.pl, "program_id", lambda _: 0)
    for row, expert in itertools.product(range(0, rows, 16), range(0, experts, 16)):
        at = row + jnp.arange(16), expert + jnp.arange(16)
        for column in range(0, width, PIECE):
            some_rows._read(Rows(rows, width), at[0], column)
        some_rows._store(Rows(1, rows, experts), *at, jnp.zeros((16, 16)))


def drawn(spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Normal x and weight."""
    keys = jax.random.split(jax.random.key(0))
    x, weight = (
        jax.random.normal(key, array.shape, array.dtype)
        for key, array in zip(keys, spec.arguments()[:2], strict=True)
    )
    return x, weight


def check_logits(spec: Spec, bar: float) -> None:
    """Of normal numbers; and ids and weights are those of the logits that are given."""
    x, weight = drawn(spec)
    output = router(x, weight, implementation="triton", **spec.settings())
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    np.testing.assert_allclose(output.logits, x @ weight.T, 0, bar * spec.width**0.5)
    ids, weights = choice(np.asarray(output.logits), {}, **spec.settings())
    np.testing.assert_array_equal(output.ids, ids)
    np.testing.assert_allclose(output.weights, weights, 1e-5, 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [FEW_ROWS, FEW_ROWS + 1, 33, SOME_ROWS + 1, 200])
def test_logits_are_products_in_float32(rows, dtype):
    with interpreted(cores=8):
        check_logits(Spec(rows, 2000, 40, 4, dtype), 1e-6)


def test_logits_of_large_tiles_are_products_in_float32():
    """Three blocks of experts, and one more."""
    with interpreted(cores=200):
        check_logits(Spec(MANY_ROWS + 1, 515, 385, 4), 1e-6)


def test_what_long_sums_round_off_is_kept():
    """Without that the error would be 2.2e-7 of the logits' deviation."""
    spec = Spec(65, 8192, 40)
    x, weight = drawn(spec)
    with interpreted():
        logits = some_rows.product(x, weight, SomeRows(64, 32, 1, 8, 2))[0]
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    error = np.sqrt(np.mean((np.asarray(logits, np.float64) - wanted) ** 2))
    assert error < 6e-8 * spec.width**0.5


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_logits_on_a_gpu_are_products_in_float32(name):
    spec = dataclasses.replace(SPECS[name], rows=min(SPECS[name].rows, 2500))
    # A library's product may add one number after the other: 2,048 of them in float32 are off by
    # 4e-4 at most here, and TF32 would be by 2e-2.
    library = spec.rows > SOME_ROWS and spec.weight == "float32"
    check_logits(spec, 1e-5 if library else 1e-6)


def check_every_bit() -> None:
    """Experts that read one column each give it back, whatever float32 number is there."""
    bits = np.random.default_rng(0).integers(0, 2**32, (SOME_ROWS, 3 * PIECE), np.uint32)
    # Below 2^-102 a last part has no place in bfloat16.
    exponent = (bits >> 23) & 0xFF
    x = np.where((exponent > 25) & (exponent < 255), bits, 0).view(np.float32)
    x[0, :2] = np.finfo(np.float32).max, np.finfo(np.float32).min
    x[1, :3] = 1 + 2.0**-23, -1 + 2.0**-24, 2.0**-101 * (2 - 2.0**-23)
    parts = some_rows.product(
        jnp.asarray(x), jnp.eye(x.shape[1], dtype=jnp.bfloat16), SomeRows(64, 32, 2, 8, 3)
    )
    logits = top_k(parts, *[None] * 8, slots=1, renormalise=True)[2]
    np.testing.assert_array_equal(logits, x)


def test_no_bit_of_x_is_lost():
    with interpreted():
        check_every_bit()


@pytest.mark.gpu
def test_no_bit_of_x_is_lost_on_a_gpu():
    check_every_bit()


@pytest.mark.parametrize("rows", [5, 8, 13, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("experts", [60, 128, 256, 512])
@pytest.mark.parametrize("width", [600, 2048, 2880, 4096])
def test_tensor_cores_are_all_at_work_on_an_h200(rows, experts, width):
    x, weight = Spec(rows, width, experts).arguments()[:2]
    config = heuristic(H200.cores, x, weight)
    assert isinstance(config, SomeRows)
    blocks = -(-rows // config.rows) * -(-experts // config.experts)
    pieces = -(-width // PIECE)
    assert min(80, blocks * min(12, pieces)) <= blocks * config.parts <= 2 * H200.cores
    # Each part has something to add.
    assert (config.parts - 1) * -(-pieces // config.parts) < pieces


@pytest.mark.parametrize(
    ("rows", "weight", "kind"),
    [
        (1, "bfloat16", FewRows),
        (FEW_ROWS, "bfloat16", FewRows),
        (FEW_ROWS + 1, "bfloat16", SomeRows),
        (SOME_ROWS, "bfloat16", SomeRows),
        (SOME_ROWS, "float32", FewRows),
    ],
)
def test_either_kind_of_cores_may_be_tried_where_both_can(rows, weight, kind):
    arrays = Spec(rows, weight=weight).arguments()[:2]
    with tuning.listening() as heard:
        assert isinstance(config_for(H200, *arrays), kind)
    (decision,) = heard.values()
    kinds = {type(decision.heuristic), *map(type, decision.others)}
    assert kinds == ({FewRows, SomeRows} if weight == "bfloat16" else {FewRows})


@pytest.mark.parametrize("experts", [60, 128, 256, 512])
@pytest.mark.parametrize(
    "rows", [SOME_ROWS + 1, 200, 512, MANY_ROWS, MANY_ROWS + 1, 2048, 8192, 16384]
)
def test_rows_of_prompts_keep_all_multiprocessors_at_work(rows, experts):
    x, weight = Spec(rows, experts=experts).arguments()[:2]
    with tuning.listening() as heard:
        config = config_for(H200, x, weight)
    blocks = -(-rows // config.rows) * -(-experts // config.experts)
    assert min(16 * blocks // 2, H200.cores) // 2 < blocks * config.parts
    assert config.parts == 1 or blocks * config.parts <= 2 * H200.cores
    (decision,) = heard.values()
    assert {type(each) for each in decision.others} == {SomeRows}
    assert all(each.parts >= 1 for each in decision.others)
