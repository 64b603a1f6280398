"""What lowered modules say of their kernels."""

from __future__ import annotations

import re

ALIAS = r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)"


def written_in_place(module: str) -> list[str]:
    """Shapes and dtypes of the operands that kernels write their results into, in order.

    Written as in the module, such as "16x64xbf16".
    """
    found = []
    for line in module.splitlines():
        if "xla.gpu.triton" not in line:
            continue
        operands, results = (
            re.findall(r"tensor<([^>]*)>", part) for part in line.rsplit(" : (", 1)[1].split("->")
        )
        pairs = [(int(result), int(operand)) for result, operand in re.findall(ALIAS, line)]
        assert len(dict(pairs)) == len({operand for _, operand in pairs}) == len(pairs)
        for result, operand in pairs:
            assert operands[operand] == results[result]
            found.append(operands[operand])
    return found
