"""Bytes made ready in a thread of their own while earlier ones are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

PIECE = 16 << 20  # bytes handed on at once
AHEAD = 4  # pieces made ready beforehand
_PAGE = 4096

Item = TypeVar("Item")


def prefetch(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """Yields the items of a generator, which runs up to `AHEAD` items ahead in another thread.

    Args:
        items: runs in the other thread only, its closing included.

    Yields:
        Its items, in order. What it raises is raised where the item would have been.
    """
    with ThreadPoolExecutor(1, "prefetch") as thread:
        ahead: deque[Future[Item | None]] = deque()
        try:
            ahead.extend(thread.submit(next, items, None) for _ in range(AHEAD))
            while (item := ahead.popleft().result()) is not None:
                ahead.append(thread.submit(next, items, None))
                yield item
                del item  # or this frame would keep one more piece in memory
        finally:
            for future in ahead:
                future.cancel()
            thread.submit(items.close).result()


def pieces(data: memoryview) -> Iterator[memoryview]:
    """Cuts bytes into pieces of at most `PIECE` bytes, each in memory when it is yielded."""
    for start in range(0, len(data), PIECE):
        piece = data[start : start + PIECE]
        # One byte of each page is looked at: the bytes may be those of a mapped file, and whoever
        # touches them first waits for the disk.
        np.frombuffer(piece, np.uint8)[::_PAGE].max()
        yield piece
