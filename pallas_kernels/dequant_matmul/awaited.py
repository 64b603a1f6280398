"""Words that are asked for one right behind the other, whatever the compiler thinks of it.

Compilers move a load to where its number is needed, which saves registers; loads that stand there
one behind the other then wait for memory one after the other. What a product begins with is made to
need all words: so no product begins before all have been asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from .._compat import INTERPRETER, assembled, current_target


def zero_behind(numbers: Sequence[Shaped[Array, "*s"]]) -> Float[Array, "*s"]:
    """Zero in float32, behind all numbers.

    Args:
        numbers: of 32 bits each, one or more.
    """
    if current_target().platform == INTERPRETER:
        return jnp.zeros(numbers[0].shape, jnp.float32)
    count, lines = len(numbers), ["{ .reg .b32 all; mov.b32 all, $1;"]
    for index in range(2, count, 2):
        lines.append(f"lop3.b32 all, all, ${index}, ${index + 1}, 0x96;")
    if count % 2 == 0:
        lines.append(f"xor.b32 all, all, ${count};")
    # At most 32 bits are set; the assembler does not look that far.
    lines.append("popc.b32 all, all; shr.u32 all, all, 6; mov.b32 $0, all; }")
    words = [lax.bitcast_convert_type(number, jnp.int32) for number in numbers]
    return assembled(" ".join(lines), words, ",".join(["=f", *["r"] * count]))
