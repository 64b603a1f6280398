"""The preallocated cache: blocks of keys and values, and the state of recurrent layers."""

from .blocks import BlockTable, KVBlocks, allocate, append
from .cache import Cache, LayerCache, fork, init_cache, release
from .recurrent import RecurrentState, empty_recurrent

__all__ = [
    "BlockTable",
    "Cache",
    "KVBlocks",
    "LayerCache",
    "RecurrentState",
    "allocate",
    "append",
    "empty_recurrent",
    "fork",
    "init_cache",
    "release",
]
