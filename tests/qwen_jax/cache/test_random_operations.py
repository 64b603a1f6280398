"""Any sequence of appends, releases and forks leaves what the naive model says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BATCH = 4

# Most tokens of a row, tokens a block, blocks: fewer than all rows would need at full length.
SIZES = {
    "one token a block": (7, 1, 12),
    "blocks of 3": (10, 3, 8),
    "blocks of 4": (12, 4, 6),
    "blocks of 16": (40, 16, 6),
    "blocks of 64, larger than a row": (50, 64, 3),
}


def sequences(longest: int, block_size: int) -> st.SearchStrategy[list[tuple[str, list[int]]]]:
    rows = st.integers(0, BATCH - 1)
    border = min(block_size, longest)
    tokens = st.sampled_from([0, 1, border]) | st.integers(0, min(2 * border, longest))
    write = st.lists(tokens, min_size=BATCH, max_size=BATCH)
    source = st.lists(rows | st.integers(-1, BATCH), min_size=BATCH, max_size=BATCH)
    return st.lists(
        st.tuples(st.just("write"), write)
        | st.tuples(st.just("release"), st.lists(rows, max_size=2))
        | st.tuples(st.just("fork"), source),
        min_size=4,
        max_size=16,
    )


@pytest.mark.parametrize("size", SIZES)
def test_any_operations_match_the_naive_model(checked, traced, size):
    longest, block_size, num_blocks = SIZES[size]
    before = traced.copy()

    @given(sequences(longest, block_size))
    @settings(max_examples=20)
    def run(operations: list[tuple[str, list[int]]]) -> None:
        cache = checked(BATCH, longest, block_size, num_blocks)
        for name, arguments in operations:
            getattr(cache, name)(*arguments)

    run()
    assert set((traced - before).values()) <= {1}
