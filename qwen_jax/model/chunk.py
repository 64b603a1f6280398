"""The new tokens of one forward pass, as the layers see them."""

import dataclasses

from jaxtyping import Array

from ..pytree import pytree
from .intervention import StepIntervention
from .rope import Rotary
from .routing import RouterContext


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
        tokens: int32 [B, T], ids; 0 at padding. None where a layer runs alone.
        intervention: what an experiment changes in the routing of the tokens; None for nothing.
        layer: static, number of the layer that sees it. Not the module's: equal layers share
            compiled functions.
    """

    start: Array
    lengths: Array
    positions: Array
    rotary: Rotary
    block_table: Array | None = None
    tokens: Array | None = None
    intervention: StepIntervention | None = None
    layer: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def valid(self) -> Array:
        """Bool [B, T], True at real tokens."""
        return self.positions >= 0

    def router_context(self, mixed: Array) -> RouterContext:
        """What the layer's router may look at, `mixed` being its mixer's output."""
        change = self.intervention
        return RouterContext(
            valid=self.valid,
            mixed=mixed,
            tokens=self.tokens,
            positions=self.positions,
            layer=self.layer,
            intervention=None if change is None else change.of(self.layer),
        )
