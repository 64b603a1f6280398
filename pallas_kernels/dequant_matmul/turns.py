"""Products of a program's outputs, some in each turn of a loop.

In a model each launch is another kernel, and multiprocessors fetch its instructions anew, which
takes about 8 cycles an instruction: the same instructions in turns take less than as many
instructions as there are outputs. What a turn needs is read some turns before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# So many turns before its own a turn's numbers are read.
AHEAD = 2


def products_in_turns(
    turns: int,
    count: int,
    read: Callable[[Any], Any],
    prepared: Callable[[], Callable[[Any], list[Array]]],
    tile: tuple[int, int],
    program: Any,
) -> list[Float[Array, "o u"]]:
    """The products of all turns, in order.

    Args:
        turns: how many.
        count: products a turn.
        read: turn -> what it needs.
        prepared: called when the first turns' numbers are on their way; gives the function that
            makes a turn's products of what was read.
        tile: of a product.
        program: index of the program, or its first output: no compiler knows it.
    """
    held = [read(turn) for turn in range(max(1, min(AHEAD, turns - 1)))]
    products = prepared()
    if turns == 1:
        return products(held[0])

    def take(turn: Array, carry: tuple[list[Any], list[Array]]) -> tuple[list[Any], list[Array]]:
        (now, *ahead), found = carry
        # The last turns read the last one's once more, which are at hand.
        following = read(jnp.minimum(turn + 1 + len(ahead), turns - 1))
        return [*ahead, following], [*found[count:], *products(now)]

    found = [jnp.zeros(tile, jnp.float32)] * (turns * count)
    # The bit is never set. Knowing that, the compiler would write all turns out.
    end = turns + (program >> 30)
    return jax.lax.fori_loop(0, end, take, (held, found))[1]
