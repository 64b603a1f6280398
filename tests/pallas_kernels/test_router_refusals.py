"""Which calls of the router the kernels take, and which have no meaning."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels._compat import H200, Target
from pallas_kernels.router import api, router
from pallas_kernels.router.specs import OPTIONS, SPECS


def choose(target=H200, **changes):
    spec = dataclasses.replace(SPECS["8 rows, 8 of 256, all options"], **changes)
    return api.OPERATION.choose(
        *spec.arguments(), implementation=None, target=target, **spec.settings()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rows": 2**20, "width": 64},
        {"dtype": "bfloat16", "weight": "float32", "given": ()},
        {"experts": 1024, "slots": 1024},
        {"target": Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))},
    ],
)
def test_a_gpu_takes_the_kernels(changes):
    choice = choose(**changes)
    assert (choice.chosen, choice.refused) == ("triton", {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float16"}, "x is float16, not bfloat16 or float32"),
        ({"weight": "float16"}, "weight is float16"),
        ({"experts": 1025}, "weight has 1025 experts, more than 1024"),
        ({"rows": 2**20}, "x has 2147483648 numbers, 2^31 or more"),
        ({"rows": 2**23, "width": 8}, "the logits has 2147483648 numbers"),
        (
            {"rows": 2**20, "width": 64, "experts": 1024, "given": ("bias", "part")}
            | {"shared_row": False},
            "an option [3145728, 1024] has 3221225472 numbers",
        ),
        ({"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
    ],
)
def test_refusals_of_the_kernels(changes, reason):
    choice = choose(**changes)
    assert choice.chosen == "reference"
    assert any(reason in said for said in choice.refused["triton"])


def test_options_of_several_calls_have_rows_for_each():
    arrays = jnp.ones((2, 3)), jnp.ones((4, 3))
    options = {"part": jnp.ones((1,), jnp.int32), "bias": jnp.zeros((3, 4))}
    with pytest.raises(ExceptionGroup, match="bias has 3 rows; accepted with a part are multiples"):
        router(*arrays, slots=2, renormalise=True, **options)


@pytest.mark.parametrize("slots", [0, 5])
def test_slots_that_have_no_meaning(slots):
    with pytest.raises(ExceptionGroup, match=f"slots is {slots}; accepted is 1 to 4"):
        router(jnp.ones((2, 3)), jnp.ones((4, 3)), slots=slots, renormalise=True)


@pytest.mark.parametrize(
    ("option", "shape", "dtype", "reason"),
    [
        ("bias", (3, 4), "float32", "bias has 3 rows; accepted is 1, or 2 as there are of x"),
        ("mask", (3, 4), "bool", "mask has 3 rows"),
        ("mask", (2, 4), "int32", "mask is int32; accepted is bool"),
        ("bias", (2, 4), "bfloat16", "bias is bfloat16; accepted is float32"),
        ("temperature", (2,), "bfloat16", "temperature is bfloat16; accepted is float32"),
        ("bias", (2, 3), "float32", r"bias is \[R E\] = \[2, 3\], but E is 4 in weight"),
        ("valid", (3,), "bool", r"valid is \[M\] = \[3\], but M is 2 in x"),
        ("valid", (2,), "float32", "valid is float32; accepted is bool"),
        ("limit", (1,), "int32", r"limit is \[M\] = \[1\], but M is 2"),
        ("limit", (2,), "float32", "limit is float32; accepted is int32"),
        ("forced", (3, 4), "bool", "forced has 3 rows; accepted is 1, or 2"),
        ("scale", (1, 4), "bfloat16", "scale is bfloat16; accepted is float32"),
        ("part", (2,), "int32", r"part has shape \[2\]; accepted is \[1\]"),
    ],
)
def test_options_that_have_no_meaning(option, shape, dtype, reason):
    arrays: list[Any] = [None] * len(OPTIONS)
    arrays[OPTIONS.index(option)] = jnp.zeros(shape, dtype)
    with pytest.raises(ExceptionGroup, match=reason):
        api.OPERATION(
            jnp.ones((2, 3)),
            jnp.ones((4, 3)),
            *arrays,
            slots=2,
            renormalise=True,
            implementation=None,
        )
