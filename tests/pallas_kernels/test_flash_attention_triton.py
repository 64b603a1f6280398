"""The kernels of `flash_attention`: interpreted, lowered, and what they refuse."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, Target, lower_for_cuda
from pallas_kernels.attention.cut import Cut, cut_for
from pallas_kernels.flash_attention import api, cudnn, flash_attention, triton
from pallas_kernels.flash_attention.specs import SPECS, Spec
from pallas_kernels.testing import interpreted, prefill_bar, token_error
from tests.pallas_kernels.test_flash_attention import packed_attention

ADA = Target("gpu", "NVIDIA GeForce RTX 4090", 128, (8, 9))

CASES = {
    "whole rows": (Spec((100, 100), 6, 2, 64, "float32"), Cut(32, 16, 4, 2)),
    "window, seven heads a group": (
        Spec((65,), 7, 1, 128, "bfloat16", window=20),
        Cut(32, 16, 4, 2),
    ),
    "packed": (
        Spec((65, 0, 1, 64, 63), 6, 2, 64, "float32", packed=True, padding=7),
        Cut(32, 16, 4, 2),
    ),
    "packed, window": (
        Spec((3, 2, 1, 100), 4, 2, 256, "bfloat16", packed=True, padding=1, window=40),
        Cut(64, 32, 4, 2),
    ),
    "one token": (Spec((1,), 2, 1, 64, "float32"), None),
}


def check(normal, spec: Spec, cut: Cut | None) -> None:
    """Compares the kernel with the formula, with NaN in padding."""
    batch, length = spec.rows
    heads = (spec.query_heads, spec.kv_heads, spec.kv_heads)
    cu_seqlens = np.array(spec.cu_seqlens, np.int32) if spec.packed else None
    q, k, v = (normal(batch, length, n, spec.width).astype(jnp.dtype(spec.dtype)) for n in heads)
    if spec.padding:
        for x in (q, k, v):
            x[:, -spec.padding :] = np.nan
    run = functools.partial(triton.flash_attention, cut=cut, **spec.settings())
    mixed = np.asarray(jax.jit(run)(q, k, v, cu_seqlens))
    ends = np.array([0, length]) if cu_seqlens is None else cu_seqlens
    expected = packed_attention(q, k, v, ends, spec.window)
    assert mixed.dtype == q.dtype
    assert token_error(mixed, expected) <= prefill_bar(expected, spec.dtype)


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_formula(normal, name):
    with interpreted():
        check(normal, *CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_formula_on_a_gpu(normal, name):
    check(normal, *CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
def test_cudnn_equals_the_formula_on_a_gpu(normal, window):
    q, k, v = (normal(2, 300, n, 256).astype(jnp.bfloat16) for n in (4, 2, 2))
    mixed = flash_attention(q, k, v, window=window, implementation="cudnn")
    expected = packed_attention(q, k, v, [0, 300], window)
    assert token_error(mixed, expected) <= prefill_bar(expected, "bfloat16")


@pytest.mark.parametrize("name", SPECS)
def test_kernel_lowers_for_cuda(name):
    spec = SPECS[name]
    run = functools.partial(flash_attention, implementation="triton", **spec.settings())
    module = lower_for_cuda(run, *spec.arguments())
    assert module.count("xla.gpu.triton") == 1


def choose(target=H200, *, k_dtype=None, batch=None, numbers=None, **changes):
    q, k, v, *rest = dataclasses.replace(SPECS["512"], **changes).arguments()
    if k_dtype is not None:
        k = jax.ShapeDtypeStruct(k.shape, k_dtype)
    if batch is not None:
        q, k, v = (jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v))
    if numbers is not None:
        rest = [jax.ShapeDtypeStruct(numbers, jnp.int32)]
    window = changes.get("window")
    return {
        name: api.OPERATION.choose(
            q, k, v, *rest, implementation=name, target=target, window=window
        )
        for name in ("triton", "cudnn", None)
    }


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, {"triton", "cudnn"}),
        ({"window": 7}, {"triton", "cudnn"}),
        ({"width": 64, "query_heads": 14}, {"triton", "cudnn"}),
        ({"packed": True, "lengths": (5, 6)}, {"triton"}),
        ({"dtype": "float32"}, {"triton"}),
        ({"dtype": "float16"}, {"cudnn"}),
        ({"width": 80}, {"cudnn"}),
        ({"target": ADA}, {"triton"}),
        ({"target": ADA, "width": 128}, {"triton", "cudnn"}),
    ],
)
def test_calls_on_a_gpu_take_a_kernel(monkeypatch, changes, taken):
    monkeypatch.setattr(cudnn, "_refusals_of_jax", lambda *_: [])  # there may be no cuDNN here
    choices = choose(**changes)
    assert {name for name in ("triton", "cudnn") if choices[name].chosen} == taken
    assert choices[None].chosen in taken


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN may be there")
def test_cudnn_is_refused_with_the_words_of_jax_where_it_is_not_there():
    (reason,) = choose()["cudnn"].refused["cudnn"]
    assert "cuDNN" in reason
    assert choose()[None].chosen == "triton"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("triton", {"width": 80}, "head dim 80 is not one of 64, 128, 256"),
        ("triton", {"dtype": "float16"}, "(float16, float16, float16) are not all the same one"),
        ("triton", {"k_dtype": jnp.float32}, "(bfloat16, float32, bfloat16) are not all the same"),
        ("triton", {"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
        ("cudnn", {"target": Target("cpu", "cpu")}, "it needs a GPU, and the call is for cpu"),
        ("cudnn", {"dtype": "float32"}, "(float32, float32, float32) are not all the same one"),
        ("cudnn", {"packed": True}, "it takes no packed sequences"),
        ("cudnn", {"width": 260}, "head dim 260 is not a multiple of 8 up to 256"),
        ("cudnn", {"target": ADA}, "head dim 256 is not a multiple of 8 up to 128"),
        (
            "cudnn",
            {"target": Target("gpu", "Tesla T4", 40, (7, 5)), "width": 64},
            "compute capability 8.0 or later, and the call is for Tesla T4",
        ),
    ],
)
def test_refusals_of_the_kernels(name, changes, reason):
    choice = choose(**changes)[name]
    assert choice.chosen is None
    assert any(reason in said for said in choice.refused[name])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"query_heads": 15}, "15 query heads cannot share 2 key/value heads evenly"),
        ({"window": 0}, "window is 0; accepted is a whole number from 1 on, or None"),
        ({"packed": True, "batch": 2}, "there are 2 rows; with cu_seqlens, all sequences are in"),
        ({"numbers": (1,)}, "cu_seqlens has shape [1]; it has a number more than there are"),
        ({"numbers": (2, 3)}, "cu_seqlens has shape [2, 3]"),
    ],
)
def test_calls_without_a_meaning_are_refused_by_all(changes, reason):
    choice = choose(**changes)[None]
    assert choice.chosen is None
    for said in choice.refused.values():
        assert any(reason in text for text in said)


@pytest.mark.parametrize("target", [H200, ADA, Target("gpu", "NVIDIA A100", 108, (8, 0))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_fit_into_shared_memory(target, dtype, width):
    # As compiled for compute capability 8.9: float32 operands are held as two halves.
    halves, size = (2, 4) if dtype == "float32" else (1, 2)
    for length, most_tile in itertools.product((9, 512, 8192), (16, 128)):
        q = Spec((length,), width=width, dtype=dtype).arguments()[0]
        cut = cut_for(target, q, 2, context=length, most_tile=most_tile)
        assert cut.tile <= most_tile
        assert size * width * (halves * cut.rows + 4 * cut.tile) <= target.shared_memory
        assert 4 * width * cut.rows <= target.shared_memory
        assert cut.splits * 2 * -(-length * 8 // cut.rows) <= max(target.cores, length * 8)
