"""Dense products whose codes stream: which calls do, and their numbers on a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import H200, lower_for_cuda
from pallas_kernels.dequant_matmul import mosaic_gpu
from pallas_kernels.dequant_matmul.api import OPERATION
from pallas_kernels.dequant_matmul.specs import Matrix, Spec
from pallas_kernels.dequant_matmul.stream import fitting
from pallas_kernels.testing import norm_error
from tests.pallas_kernels.expert_calls import filled

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="Mosaic GPU kernels are written for JAX 0.11 and later"
)
ODD = Matrix(72, 16)
CALLS = {
    "one matrix": Spec(16, 1024, (Matrix(640, 4, 64),), "float32"),
    "three, and one that is no codes": Spec(
        32, 2048, (Matrix(1024, 4, 64), Matrix(128, 4, 64), Matrix(64, 8, 64), ODD)
    ),
    "parts of the inputs": Spec(33, 4096, (Matrix(320, 8, 64),), "float32"),
    "3 bits": Spec(16, 2048, (Matrix(12288, 3, 128),)),
    "64 rows": Spec(64, 2048, (Matrix(4096, 4, 128),)),
    "5 rows of many outputs": Spec(5, 2048, (Matrix(24832, 4, 32),), "float32"),
    "groups of 32 of 8 bits": Spec(24, 1536, (Matrix(192, 8, 32), Matrix(128, 8, 32)), "float32"),
}


@needs_mosaic
@pytest.mark.parametrize("name", CALLS)
def test_streams_lower_for_cuda(name):
    spec = CALLS[name]
    run = functools.partial(OPERATION, implementation="mosaic_gpu", **spec.settings())
    text = lower_for_cuda(run, *spec.arguments())
    formats = {(m.bits, m.group_size) for m in spec.matrices if m.coded}
    assert text.count("mosaic_gpu_v2") == len(formats)


@needs_mosaic
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(4, 2048, (Matrix(640, 4, 64),)), "4 rows"),
        (Spec(65, 2048, (Matrix(640, 4, 64),)), "65 rows"),
        (Spec(8, 2048, (Matrix(640, 3, 64),)), "none of the weights"),
        (Spec(8, 2048, (Matrix(640, 3, 32),)), "none of the weights"),
        (Spec(8, 2048, (Matrix(640, 4, 64, zero=True),)), "none of the weights"),
        (Spec(8, 2048, (Matrix(641, 4, 64),)), "none of the weights"),
        (Spec(8, 2000, (Matrix(640, 4, 64),)), "none of the weights"),
    ],
)
def test_what_is_not_streamed(spec, reason):
    assert reason in "; ".join(mosaic_gpu.refusals(H200, *spec.arguments(), **spec.settings()))


@needs_mosaic
def test_whole_tiles_stream_beside_others():
    """Outputs that are no whole tiles are Triton's, and what is beside them is not."""
    spec = Spec(8, 1024, (Matrix(72, 4, 64), Matrix(128, 4, 64)))
    run = functools.partial(OPERATION, implementation=None, **spec.settings())
    text = lower_for_cuda(run, *spec.arguments())
    assert text.count("mosaic_gpu_v2") == text.count("xla.gpu.triton") == 1


@needs_mosaic
@pytest.mark.parametrize("rows", [5, 33])
@pytest.mark.parametrize("cores", [1, 2, 7, 16])
def test_few_multiprocessors(rows, cores):
    """Each part of rows and inputs has a program, or the call is refused."""
    target = dataclasses.replace(H200, cores=cores)
    for inputs in (512, 4096, 8192):
        spec = Spec(rows, inputs, (Matrix(128, 8, 64),))
        reasons = mosaic_gpu.refusals(target, *spec.arguments(), **spec.settings())
        stream = fitting(8, 64, rows, inputs, (128,), cores, target.shared_memory)
        assert bool(reasons) == (stream is None)
        assert stream is None or stream.splits * stream.row_parts <= cores


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_streams_on_a_gpu(name):
    spec = CALLS[name]
    rng = np.random.default_rng(0)
    like, shapes = spec.arguments()
    x = jnp.asarray(rng.standard_normal(like.shape), like.dtype)
    weights, wide = zip(*(filled(rng, shape) for shape in shapes), strict=True)
    run = jax.jit(functools.partial(OPERATION, implementation="mosaic_gpu", **spec.settings()))
    found = run(x, weights)
    bar = 1e-5 if spec.result == "float32" else 3e-3
    for y, matrix in zip(found, wide, strict=True):
        assert norm_error(y, np.asarray(x, np.float64) @ matrix.T) < bar
    for _ in range(50):
        for y, again in zip(found, run(x, weights), strict=True):
            np.testing.assert_array_equal(y, again)
