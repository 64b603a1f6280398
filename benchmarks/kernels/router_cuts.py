"""Ways to cut the router's product that its benchmark times, by case of `specs.SPECS`."""

from __future__ import annotations

from pallas_kernels.router.config import Config, FewRows, SomeRows

# Rows, experts, parts, warps.
ONE = [(1, 1, 8, 8), (1, 1, 4, 4), (1, 2, 8, 8), (1, 2, 4, 4), (1, 1, 4, 8), (1, 1, 2, 8)]
ON_CUDA_CORES = {
    "1 row, 8 of 256": ONE,
    "1 row, 10 of 512": [*ONE, (1, 4, 8, 8), (1, 4, 4, 4), (1, 2, 4, 8)],
    "4 rows, 8 of 256": [
        *((4, 2, parts, warps) for parts, warps in ((4, 4), (8, 8), (4, 8))),
        *((4, 1, parts, warps) for parts, warps in ((4, 4), (8, 8))),
        (2, 2, 4, 4),
    ],
    "8 rows, 8 of 256": [
        *((8, 2, parts, warps) for parts, warps in ((4, 4), (8, 8))),
        (4, 2, 4, 4),
        (8, 1, 8, 8),
    ],
    "32 rows, 8 of 256": [(8, 2, 1, 4), (4, 4, 1, 4)],
    "64 rows, 8 of 256": [(8, 4, 1, 4)],
}
# Rows, experts, parts, warps, stages. Of 2,048 columns, eight parts are four pieces each.
ON_TENSOR_CORES = {
    "4 rows, 8 of 256": [(8, 32, 16, 2, 3), (8, 16, 16, 1, 3), (8, 16, 8, 1, 5)],
    "8 rows, 8 of 256": [
        *((8, 32, parts, 2, stages) for parts, stages in ((16, 3), (16, 2), (8, 5), (32, 2))),
        *((8, 16, parts, 1, stages) for parts, stages in ((16, 3), (8, 5), (8, 3), (32, 2))),
    ],
    "16 rows, 8 of 256": [
        *((8, 32, parts, 2, stages) for parts, stages in ((16, 3), (16, 2), (8, 5))),
        *((8, 16, parts, 1, stages) for parts, stages in ((8, 5), (8, 3))),
        *((16, 32, parts, 2, stages) for parts, stages in ((16, 3), (8, 5))),
        (32, 16, 8, 4, 5),
    ],
    "32 rows, 8 of 256": [
        *((32, 16, parts, 4, stages) for parts, stages in ((8, 5), (8, 4), (8, 3), (8, 1))),
        *((32, 16, parts, 4, stages) for parts, stages in ((16, 3), (16, 2), (4, 5))),
        (32, 32, 16, 2, 3),
        (64, 32, 16, 8, 3),
        (8, 32, 16, 2, 3),
    ],
    "32 rows, 10 of 512": [
        *((32, 16, parts, 4, stages) for parts, stages in ((4, 5), (8, 5), (8, 3))),
        (32, 32, 8, 2, 5),
        (64, 32, 8, 8, 5),
    ],
    "64 rows, 8 of 256": [
        *((64, 32, parts, 8, stages) for parts, stages in ((16, 3), (16, 2), (8, 5))),
        *((64, 16, parts, 8, stages) for parts, stages in ((8, 5), (8, 3), (16, 3))),
        (32, 16, 8, 4, 5),
        (32, 16, 4, 4, 5),
    ],
}
SWEPT: dict[str, list[Config]] = {
    name: [
        *(SomeRows(*cut) for cut in ON_TENSOR_CORES.get(name, ())),
        *(FewRows(*cut) for cut in ON_CUDA_CORES.get(name, ())),
    ]
    for name in (ON_TENSOR_CORES | ON_CUDA_CORES)
}
