"""What a cache of experts would do with recorded ids: hits, and how many experts come together."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from jaxtyping import Int


def lru_hits(ids: Int[np.ndarray, "T B A"], experts: int, resident: int) -> float:
    """Share of uses that find their expert in a cache which turns out what was used longest ago.

    The cache begins empty. Uses count in order of tokens, then sequences, then slots.

    Args:
        ids: of one layer; E and above are empty slots.
        experts: E.
        resident: experts that the cache holds.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    hits = uses = 0
    for expert in ids.reshape(-1).tolist():
        if not 0 <= expert < experts:
            continue
        uses += 1
        if expert in cache:
            hits += 1
            cache.move_to_end(expert)
            continue
        cache[expert] = None
        if len(cache) > resident:
            cache.popitem(last=False)
    return hits / max(uses, 1)


def distinct_experts(ids: Int[np.ndarray, "T L B A"], experts: int, window: int) -> float:
    """Mean number of experts that `window` tokens of a sequence use in a layer.

    Windows do not overlap; a shorter rest counts only where there is no whole window.

    Args:
        ids: E and above are empty slots.
        experts: E.
        window: tokens.
    """
    tokens = len(ids) // window * window or len(ids)
    used = np.zeros((*ids.shape[:3], experts + 1), np.bool_)
    np.put_along_axis(used, np.minimum(ids, experts), True, axis=-1)
    parts = used[:tokens, ..., :experts].reshape(-1, min(window, tokens), *used.shape[1:3], experts)
    return float(parts.any(axis=1).sum(axis=-1).mean())
