"""Products with several matrices that share their input, in one launch."""

from __future__ import annotations

import pytest

from pallas_kernels.dequant_matmul.config import FewRows, SomeRows
from pallas_kernels.dequant_matmul.specs import Matrix, Spec
from pallas_kernels.testing import interpreted
from tests.pallas_kernels.coded_products import check, launches

# Two of each of two formats, which are one body, and others; some are no codes.
ALIKE = Matrix(37, 3, 32), Matrix(1, 16), Matrix(21, 3, 32), Matrix(9, 16)
OTHERS = Matrix(70, 8, 64, zero=True), Matrix(33, 4, 128, scale="float32"), Matrix(5, 32)


def together(rows: int, *matrices: Matrix, inputs: int = 300) -> Spec:
    """A call with several matrices."""
    return Spec(rows, inputs, matrices or (*ALIKE, *OTHERS), "float32")


TOGETHER = {
    "1 row": together(1),
    "7 rows": together(7, *ALIKE[1:3], OTHERS[0], OTHERS[2]),
    "65 rows": together(65, *OTHERS),
    "few rows, many tiles": together(2, *ALIKE, inputs=1340),
    "arrays alone": together(1, ALIKE[1], OTHERS[2]),
}
CUT_TOGETHER = {
    "few rows": (together(2, *ALIKE, inputs=520), FewRows(8, 8, 1, abreast=True)),
    "some rows, split": (together(19, *ALIKE[:2]), SomeRows(16, 32, 2, blocks=2)),
}


@pytest.mark.parametrize("name", ["1 row", "7 rows"])
def test_the_reference_of_several_matrices(name):
    check(TOGETHER[name], "reference")


@pytest.mark.parametrize("name", TOGETHER)
def test_several_matrices(name):
    with interpreted(cores=37):
        check(TOGETHER[name], "triton")


@pytest.mark.parametrize("name", CUT_TOGETHER)
def test_several_tiles_of_several_matrices(name):
    with interpreted():
        check(CUT_TOGETHER[name][0], None, CUT_TOGETHER[name][1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOGETHER | CUT_TOGETHER)
def test_several_matrices_on_a_gpu(name):
    spec, config = (TOGETHER | CUT_TOGETHER)[name], None
    if not isinstance(spec, Spec):
        spec, config = spec
    check(spec, None, config)


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        (together(1), 1),
        (together(65), 4),  # arrays go to XLA
        (together(16), 2),  # 3 bits take inputs in another order than 4 and 8
        (together(7, ALIKE[1], *OTHERS), 1),
    ],
)
def test_launches_of_several_matrices(spec, number):
    assert launches(spec) == number
