"""The preallocated cache: blocks of keys and values, and the state of recurrent layers."""

from .blocks import BlockTable, KVBlocks, allocate
from .cache import Cache, LayerCache, check_kv_cache_dtype, fork, init_cache, release
from .recurrent import RecurrentState, empty_recurrent

__all__ = [
    "BlockTable",
    "Cache",
    "KVBlocks",
    "LayerCache",
    "RecurrentState",
    "allocate",
    "check_kv_cache_dtype",
    "empty_recurrent",
    "fork",
    "init_cache",
    "release",
]
