"""The new tokens of one forward pass, as the layers see them."""

from jaxtyping import Array

from ..pytree import pytree
from .rope import Rotary


@pytree
class Chunk:
    """Where the T new tokens of each sequence stand.

    Attributes:
        start: int32 [B], tokens that each sequence had before.
        lengths: int32 [B], how many of the T tokens are real; padding is on the right.
        positions: int32 [B, T], position in the sequence; -1 at padding.
        rotary: cosines and sines of the positions, shared by all layers.
        block_table: int32 [B, W], blocks of the cache that hold each sequence; None without a
            cache.
    """

    start: Array
    lengths: Array
    positions: Array
    rotary: Rotary
    block_table: Array | None = None

    @property
    def valid(self) -> Array:
        """Bool [B, T], True at real tokens."""
        return self.positions >= 0
