"""Memory as threads see it that run instruction by instruction: see `ptx`."""

from __future__ import annotations

import math

import numpy as np


class Memory:
    """Bytes at consecutive addresses, of which only those can be read that something was put in.

    Args:
        begin: first address.
        size: so many bytes.
    """

    def __init__(self, begin: int, size: int):
        self._begin, self._bytes = begin, np.zeros(size, np.uint8)
        self._filled, self._stored, self._untold = (np.zeros(size, bool) for _ in range(3))
        # Whose stores others cannot read yet, -1 where all can.
        self._owner = np.full(size, -1)
        # Which thread has read what may be read again by others before they meet, -1 where none,
        # and -2 where several.
        self._reader = np.full(size, -1)

    def put(self, address: int, data: np.ndarray) -> None:
        """What lies there before threads begin."""
        piece = self._piece(address, data.nbytes)
        self._bytes[piece], self._filled[piece] = data.reshape(-1).view(np.uint8), True
        self._untold[piece], self._owner[piece] = False, -1

    def drop(self, address: int, size: int) -> None:
        """What may change from now on."""
        self._filled[self._piece(address, size)] = False

    def publish(self) -> None:
        """Lets what threads stored be read."""
        self._filled |= self._stored
        self._stored[:] = False
        self._owner[:] = self._reader[:] = -1

    def publish_to_owners(self) -> None:
        """Lets what threads stored be read by those of the same owner, and written by them."""
        owned = self._stored & (self._owner >= 0)
        self._filled |= owned
        self._stored &= ~owned
        self._reader[:] = -1

    def forget_readers(self) -> None:
        """Lets others store where threads have read: these say that they have."""
        self._reader[:] = -1

    def tell(self) -> None:
        """Lets what threads stored be read by others than threads, once it is published."""
        self._untold[:] = False

    def load(
        self,
        addresses: np.ndarray,
        size: int,
        *,
        by_threads: bool = True,
        owners: np.ndarray | None = None,
        threads: np.ndarray | None = None,
    ) -> np.ndarray:
        """Some bytes at each address: uint8 [T size].

        Args:
            addresses: of threads.
            size: how many bytes.
            by_threads: whether threads read them.
            owners: of these, int [T]; of no store that others cannot read if None.
            threads: their numbers, int [T], if it matters who reads.
        """
        places = self._places(addresses, size)
        empty = addresses[~self._filled[places].all(1)]
        assert not len(empty), f"nothing is at {int(empty[0]):#x}"
        owner = self._owner[places]
        readers = np.full(len(addresses), -1) if owners is None else owners
        others = (owner >= 0) & (owner != readers[:, None])
        assert not others.any(), "a store of another owner is read"
        assert by_threads or not self._untold[places].any(), "none but threads know of a store"
        if threads is not None:
            self._note(places, threads)
        return self._bytes[places]

    def _note(self, places: np.ndarray, threads: np.ndarray) -> None:
        """That threads read there."""
        who = np.broadcast_to(threads[:, None], places.shape)
        before = self._reader[places]
        self._reader[places] = who
        several = (self._reader[places] != who) | ((before != -1) & (before != who))
        self._reader[places[several]] = -2

    def store(
        self,
        addresses: np.ndarray,
        data: np.ndarray,
        owners: np.ndarray | None = None,
        threads: np.ndarray | None = None,
    ) -> None:
        """Bytes [T size] to each address.

        Args:
            addresses: of threads.
            data: theirs.
            owners: of these, int [T], if they have some.
            threads: their numbers, int [T]; nobody if None.
        """
        places = self._places(addresses, data.shape[1])
        alone = np.unique(places).size == places.size and not self._stored[places].any()
        assert alone, "threads store at one place"
        reader = self._reader[places]
        own = reader == (-1 if threads is None else threads[:, None])
        assert (own | (reader == -1)).all(), "what another thread may yet read is stored to"
        self._bytes[places], self._stored[places] = data, True
        self._filled[places], self._untold[places] = False, True
        # Without one, it is read by nobody before all can.
        self._owner[places] = -1 if owners is None else owners[:, None]

    def stored_from(
        self, address: int, dtype: np.dtype, shape: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """An array, and which elements of it can be read."""
        piece = self._piece(address, math.prod(shape) * dtype.itemsize)
        there = self._filled[piece].reshape(-1, dtype.itemsize)
        assert (there.all(1) == there.any(1)).all(), "elements are stored in part"
        return self._bytes[piece].view(dtype).reshape(shape), there.all(1).reshape(shape)

    def _piece(self, address: int, size: int) -> slice:
        start = address - self._begin
        assert 0 <= start <= start + size <= len(self._bytes)
        return slice(start, start + size)

    def _places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        odd = addresses[addresses % size != 0]
        assert not len(odd), f"{int(odd[0]):#x} is no place of {size} bytes"
        starts = addresses.astype(np.int64) - self._begin
        outside = addresses[(starts < 0) | (starts + size > len(self._bytes))]
        assert not len(outside), f"{int(outside[0]):#x} is in no memory"
        return starts[:, None] + np.arange(size)
