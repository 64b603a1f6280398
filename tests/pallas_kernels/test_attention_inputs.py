"""`attention_inputs` against the formula: reference, interpreted kernel, lowering, refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, lower_for_cuda
from pallas_kernels.attention_inputs import api, attention_inputs
from pallas_kernels.attention_inputs.specs import SPECS, Spec
from pallas_kernels.testing import interpreted
from tests.pallas_kernels.modules import written_in_place

EPS = 1e-3
ROUNDING = {"float32": 2**-22, "bfloat16": 2**-8}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call small enough to be interpreted.

    Attributes:
        spec: shapes; its table has room for the longest sequence.
        start: tokens of each sequence before.
        new: new tokens of each sequence.
        lost: entries (row, column, block) of the table that lead outside the pool.
    """

    spec: Spec
    start: tuple[int, ...]
    new: tuple[int, ...]
    lost: tuple[tuple[int, int, int], ...] = ()


SMALL = Spec(1, 1, 2, 1, 64, 24, block_size=16, columns=5, dtype="float32")
BORDERS = (0, 1, 15, 16, 17, 63, 64, 80, 2**31 - 1)
CASES = {
    "one token": Case(SMALL, BORDERS, (1, 1, 1, 1, 0, 1, 1, 1, 1), ((3, 1, 46), (6, 4, -1))),
    "one token, int8": Case(
        dataclasses.replace(SMALL, cache="int8", norm="plain", kv_heads=2, gated=False),
        BORDERS,
        (1, 1, 1, 1, 0, 1, 1, 1, 1),
        ((3, 1, 2**31 - 1), (6, 4, -1)),
    ),
    "chunks": Case(
        dataclasses.replace(SMALL, dtype="bfloat16", rotated=64, norm="none"),
        (0, 3, 200, 16),
        (65, 64, 1, 0),
        ((0, 2, -1), (1, 0, 2**31 - 1)),
    ),
    "chunks, int8": Case(
        dataclasses.replace(SMALL, cache="int8", dtype="bfloat16"),
        (0, 3, 200, 13, 16),
        (50, 20, 1, 63, 33),
        ((0, 2, -1), (3, 1, 2**31 - 1)),
    ),
    "no cache": Case(
        dataclasses.replace(SMALL, cache="none", kv_heads=2, rotated=2), (0,) * 3, (50,) * 3
    ),
}


@dataclasses.dataclass
class Inputs:
    """Random arrays of a case, those of the pool filled with what must stay where nothing goes."""

    arrays: list[object]
    settings: dict[str, object]

    @classmethod
    def of(cls, normal, case: Case) -> Inputs:
        length = max(case.new)
        spec = dataclasses.replace(case.spec, batch=len(case.new), new_tokens=length)
        arrays = [
            None if x is None else jax.tree.map(lambda x: normal(*x.shape).astype(x.dtype), x)
            for x in spec.arguments()
        ]
        angles = 7 * normal(*arrays[3].shape)
        arrays[3:5] = np.cos(angles), np.sin(angles)
        if spec.cache != "none":
            arrays[7:9] = (np.full(pool.shape, 77, pool.dtype) for pool in arrays[7:9])
            table = 1 + np.random.default_rng(2).permutation(spec.batch * spec.columns)
            arrays[9] = table.reshape(spec.batch, spec.columns).astype(np.int32)
            for row, column, block in case.lost:
                arrays[9][row, column] = block
            step = np.arange(length, dtype=np.int32)[None, :]
            positions = np.array(case.start, np.int32)[:, None] + step
            real = step < np.array(case.new)[:, None]
            arrays[10] = np.where(real, positions, -1)
            for x in arrays[:3]:
                x[~real] = np.nan
        return cls(arrays, spec.settings() | {"eps": EPS})

    def turned(self, x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        """Norm and rotation of heads [B, T, n, H] in float64."""
        cos, sin = (table[:, :, None].astype(np.float64) for table in self.arrays[3:5])
        wide = x.astype(np.float64)
        if weight is not None:
            scale = weight.astype(np.float64) + self.settings["zero_centred"]
            wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * scale
        half = cos.shape[-1]
        first, second = wide[..., :half], wide[..., half : 2 * half]
        turned = [first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]]
        return np.concatenate(turned, -1)


def check(normal, case: Case, implementation: str) -> None:
    inputs = Inputs.of(normal, case)
    q, k, v = inputs.arrays[:3]
    close = functools.partial(np.testing.assert_allclose, rtol=ROUNDING[case.spec.dtype], atol=4e-6)
    run = jax.jit(
        functools.partial(attention_inputs, implementation=implementation, **inputs.settings)
    )
    found = jax.device_get(run(*inputs.arrays))
    assert found.q.dtype == q.dtype
    expected_q = inputs.turned(q[..., : k.shape[-1]], inputs.arrays[5])
    expected_k = inputs.turned(k, inputs.arrays[6])
    if case.spec.cache == "none":
        assert found.scales is None
        close(found.q, expected_q)
        close(found.key, expected_k)
        np.testing.assert_array_equal(found.value, v)
        return
    real = inputs.arrays[10] >= 0
    close(found.q[real], expected_q[real])
    check_pools(inputs, found, expected_k, close)


def check_pools(inputs: Inputs, found, expected: np.ndarray, close) -> None:
    """Each token lies where the table says, and all else is as it was."""
    v, (key, value, table, positions) = inputs.arrays[2], inputs.arrays[7:11]
    before = inputs.arrays[11] if len(inputs.arrays) > 11 else None
    blocks, _, block_size, _ = key.shape
    free = np.ones(key.shape[:3], bool)
    base = None if before is None else before.key_base.astype(np.float64)
    for b, t in zip(*np.nonzero(positions >= 0), strict=True):
        column, row = divmod(int(positions[b, t]), block_size)
        if column >= table.shape[1] or not 0 <= table[b, column] < blocks:
            continue
        block = table[b, column]
        free[block, :, row] = False
        if base is None:
            close(found.key[block, :, row], expected[b, t])
            np.testing.assert_array_equal(found.value[block, :, row], v[b, t])
            continue
        if row == 0:
            close(found.scales.key_base[block], expected[b, t])
            base[block] = found.scales.key_base[block]
        at, scales = (block, slice(None), row), found.scales
        rest = expected[b, t] - base[block]
        check_codes(rest, found.key[at], scales.key_scale[at], ROUNDING[str(v.dtype)])
        check_codes(v[b, t].astype(np.float64), found.value[at], scales.value_scale[at], 0.0)
    np.testing.assert_array_equal(found.key[free], key[free])
    np.testing.assert_array_equal(found.value[free], value[free])
    assert not free.all()
    if base is not None:
        np.testing.assert_array_equal(found.scales.key_base, base.astype(v.dtype))
        for name in ("key_scale", "value_scale"):
            after, old = getattr(found.scales, name), getattr(before, name)
            np.testing.assert_array_equal(after[free], old[free])


def check_codes(rows: np.ndarray, codes: np.ndarray, scale: np.ndarray, rounding: float) -> None:
    """The codes of heads [K, H] are as near as the greatest value lets them be."""
    slack = rounding * 4 + 1e-5  # the row itself was rounded, at about this size
    np.testing.assert_allclose(scale, np.abs(rows).max(-1) / 127, rtol=slack, atol=slack / 127)
    error = np.abs(scale[:, None] * codes.astype(np.float64) - rows)
    assert (error <= (0.5 + slack) * scale[:, None] + slack).all()


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_the_formula(normal, name):
    check(normal, CASES[name], "reference")


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_formula(normal, name):
    with interpreted():
        check(normal, CASES[name], "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_formula_on_a_gpu(normal, name):
    check(normal, CASES[name], "triton")


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_tokens_one_by_one_leave_what_one_call_leaves(normal, implementation):
    case = Case(CASES["chunks, int8"].spec, (13, 0), (34, 20))
    arrays = Inputs.of(normal, case).arrays
    arrays[7:9] = (np.zeros_like(pool) for pool in arrays[7:9])
    with interpreted():
        run = jax.jit(functools.partial(attention_inputs, implementation=implementation))
        whole = run(*arrays)
        steps = [*arrays]
        for first, last in ((0, 17), (17, 34)):
            for number in (0, 1, 2, 3, 4, 10):
                steps[number] = arrays[number][:, first:last]
            found = run(*steps)
            steps[7], steps[8], steps[11] = found.key, found.value, found.scales
    jax.tree.map(np.testing.assert_array_equal, found[1:], whole[1:])


def test_rows_of_zeros_have_finite_scales():
    arrays = [
        None if x is None else jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), x)
        for x in dataclasses.replace(SPECS["batch 1, int8"], norm="none").arguments()
    ]
    found = jax.jit(attention_inputs)(*arrays)
    for leaf in jax.tree.leaves(found):
        assert not np.asarray(leaf).any()


@pytest.mark.parametrize("name", SPECS)
def test_kernel_lowers_for_cuda(name):
    spec = SPECS[name]
    module = lower_for_cuda(
        functools.partial(attention_inputs, implementation="triton", **spec.settings()),
        *spec.arguments(),
    )
    assert module.count("xla.gpu.triton") == 1


def test_the_reference_writes_pools_in_place(optimised):
    arguments = dataclasses.replace(CASES["one token, int8"].spec, columns=400).arguments()
    run = functools.partial(attention_inputs, implementation="reference")
    lowered = jax.jit(run, donate_argnums=(7, 8, 11)).lower(*arguments)
    memory = lowered.compile().memory_analysis()
    pools = jax.tree.leaves([arguments[7:9], arguments[11]])
    assert memory.alias_size_in_bytes >= sum(x.size * x.dtype.itemsize for x in pools)


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("batch 8", ["8320x256xbf16"] * 2),
        ("batch 1, int8", ["1152x256xi8"] * 2 + ["1152xf32"] * 2 + ["18x256xbf16"]),
        ("8k tokens, no cache", []),
    ],
)
def test_the_kernel_writes_pools_in_place(name, pools):
    run = functools.partial(attention_inputs, implementation="triton")
    assert written_in_place(lower_for_cuda(run, *SPECS[name].arguments())) == pools


def choose(target=H200, *, replaced=None, **changes):
    arrays = list(dataclasses.replace(SPECS["batch 8"], **changes).arguments())
    for number, shape in (replaced or {}).items():
        arrays[number] = shape
    return api.OPERATION.choose(
        *arrays, implementation=None, target=target, eps=EPS, zero_centred=False
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 80}, "head dim 80 is not one of 64, 128, 256"),
        ({"dtype": "float16"}, "(float16) are not all the same one of bfloat16, float32"),
        ({"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
        (
            {"replaced": {3: jax.ShapeDtypeStruct((8, 1, 32), jnp.bfloat16)}},
            "cosines and sines are bfloat16 and float32, not float32",
        ),
    ],
)
def test_refusals_of_the_kernel(changes, reason):
    choice = choose(**changes)
    assert choice.chosen == "reference"
    assert any(reason in said for said in choice.refused["triton"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"replaced": {0: jax.ShapeDtypeStruct((8, 1, 16, 300), jnp.bfloat16)}},
            "query heads are 300 wide; accepted is the keys' 256, or twice that",
        ),
        ({"rotated": 258}, "258 dimensions are to be turned; accepted is up to the head's 256"),
        ({"rotated": 0}, "cos has shape [8, 1, 0], which holds nothing"),
        (
            {"replaced": {9: None}},
            "a cache has key_blocks, value_blocks, block_table and positions",
        ),
        ({"cache": "int8", "replaced": {11: None}}, "keys are int8 without scales"),
    ],
)
def test_calls_without_a_meaning_are_refused_by_all(changes, reason):
    choice = choose(**changes)
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said)
