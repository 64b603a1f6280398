"""Which implementation runs, what is said about the others, and where gradients come from."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, current_target, targeting, triton_refusals
from pallas_kernels.dispatch import Implementation, Operation, ReferenceWarning, Refused, recording


def scaled(x, *, factor):
    return jnp.sin(x) * factor


def narrow(target, x, *, factor):
    reasons = [] if target.platform == "gpu" else [f"runs on no {target.platform}"]
    return reasons + ([f"width is {x.shape[1]}"] if x.shape[1] > 4 else [])


def positive(target, x, *, factor):
    return [] if factor > 0 else [f"factor is {factor}"]


@pytest.fixture
def operation() -> Operation:
    """Two implementations, of which the first multiplies by 10 on top, so that it is seen."""
    fast = Implementation(lambda x, *, factor: scaled(x, factor=10 * factor), narrow)
    return Operation("scale", {"fast": fast, "reference": Implementation(scaled, positive)})


ONES, WIDE = np.ones((2, 4), np.float32), np.ones((2, 5), np.float32)


def test_first_that_accepts_runs(operation):
    with targeting(H200):
        np.testing.assert_allclose(operation(ONES, implementation=None, factor=1.0), 10 * np.sin(1))
    np.testing.assert_allclose(operation(ONES, implementation=None, factor=1.0), np.sin(ONES))


def test_named_one_runs(operation):
    with targeting(H200):
        result = operation(ONES, implementation="reference", factor=1.0)
    np.testing.assert_allclose(result, np.sin(ONES))


def test_named_one_never_falls_back(operation):
    with pytest.raises(ExceptionGroup, match=r"scale .*float32\[2, 5\], factor=1.0") as caught:
        operation(WIDE, implementation="fast", factor=1.0)
    (refused,) = caught.value.exceptions
    assert isinstance(refused, Refused)
    assert str(refused) == "fast: runs on no cpu; width is 5"


def test_reasons_of_all_where_none_accepts(operation):
    with pytest.raises(ExceptionGroup) as caught:
        operation(ONES, implementation=None, factor=-1.0)
    # What the reference refuses has no meaning: why a kernel would not take it besides is noise.
    assert [str(error) for error in caught.value.exceptions] == ["reference: factor is -1.0"]
    assert "reference: factor is -1.0" in str(caught.value)


def test_unknown_name_is_refused_with_the_known_ones(operation):
    with pytest.raises(ExceptionGroup, match="quick: scale has fast, reference only"):
        operation(ONES, implementation="quick", factor=1.0)


def test_parts_of_other_operations_are_not_recorded(operation):
    with recording() as calls, targeting(H200):
        np.testing.assert_allclose(operation.within(ONES, factor=1.0), 10 * np.sin(1))
        np.testing.assert_allclose(operation.within(WIDE, factor=1.0), np.sin(WIDE), rtol=1e-6)
    assert not calls
    with pytest.raises(ExceptionGroup, match=r"factor is -1\.0"):
        operation.within(ONES, factor=-1.0)


def test_traced_settings_are_refused(operation):
    with pytest.raises(ExceptionGroup, match=r"factor is float32.*; accepted is a plain Python"):
        jax.jit(lambda factor: operation(ONES, implementation=None, factor=factor))(1.0)


def test_calls_alike_are_compiled_once(operation):
    traced = []

    def counted(x, *, factor):
        traced.append(factor)
        return scaled(x, factor=factor)

    counting = Implementation(counted, lambda *_, **__: [])
    operation = Operation("scale", {**operation.implementations, "fast": counting})
    operation(ONES, implementation="fast", factor=1.0)
    operation(ONES, implementation="fast", factor=2.0)
    before = len(traced)
    assert set(traced) == {1.0, 2.0}
    operation(ONES, implementation="fast", factor=1.0)
    assert len(traced) == before


def test_the_device_is_part_of_what_is_compiled(operation):
    run = jax.jit(lambda x: operation(x, implementation=None, factor=1.0))
    np.testing.assert_allclose(run(ONES), np.sin(ONES), rtol=1e-6)
    with targeting(H200):
        np.testing.assert_allclose(run(ONES), 10 * np.sin(ONES), rtol=1e-6)
    np.testing.assert_allclose(run(ONES), np.sin(ONES), rtol=1e-6)


def test_choice_is_told_for_shapes_alone_and_for_any_device(operation):
    shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    on_gpu = operation.choose(shape, implementation=None, target=H200, factor=1.0)
    assert (on_gpu.chosen, on_gpu.refused) == ("fast", {})
    here = operation.choose(shape, implementation=None, factor=1.0)
    assert (here.chosen, here.refused) == ("reference", {"fast": ["runs on no cpu"]})
    none = operation.choose(shape, implementation="fast", factor=1.0)
    assert (none.chosen, none.refused) == (None, {"fast": ["runs on no cpu"]})


def test_reference_on_a_gpu_is_warned_of_once(operation):
    with targeting(H200):
        with pytest.warns(ReferenceWarning, match=r"scale runs as plain .*\(fast: width is 5\)"):
            operation(WIDE, implementation=None, factor=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            operation(WIDE, implementation=None, factor=1.0)


def test_reference_is_not_warned_of_where_it_was_asked_for_or_without_a_gpu(operation):
    operation(WIDE, implementation=None, factor=1.0)
    with targeting(H200):
        operation(WIDE, implementation="reference", factor=1.0)


def test_gradient_is_that_of_the_reference(operation):
    def total(x):
        return jnp.sum(operation(x, implementation=None, factor=2.0))

    with targeting(H200):
        value, gradient = jax.value_and_grad(total)(ONES)
    np.testing.assert_allclose(value, 10 * 2 * np.sin(ONES).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * np.cos(ONES), rtol=1e-6)


def test_target_is_the_device_of_the_call():
    device = jax.devices()[0]
    assert current_target().platform == device.platform
    with jax.default_device(device):
        assert current_target().kind == device.device_kind


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target("cpu", "cpu"), "needs a GPU, and the call is for cpu"),
        (Target("gpu", "Tesla T4", 40, (7, 5)), "8.0 or later, and the call is for Tesla T4"),
        (Target("gpu", "AMD Instinct MI300X", 304), "8.0 or later, and the call is for AMD"),
    ],
)
def test_triton_needs_a_recent_gpu(target, reason):
    (said,) = triton_refusals(target)
    assert reason in said


@pytest.mark.parametrize(
    ("capability", "kib"), [((9, 0), 227), ((8, 0), 163), ((8, 9), 99), ((12, 0), 99)]
)
def test_shared_memory_of_a_program(capability, kib):
    assert Target("gpu", "some", 100, capability).shared_memory == 1024 * kib
