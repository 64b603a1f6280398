"""Inputs of the prefill kernels for their benchmark, and the formula in float64."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_attention import specs as block_specs
from pallas_kernels.flash_attention import specs as flash_specs

SAMPLED, TOGETHER = 160, 32


@dataclasses.dataclass
class Inputs:
    """The arrays of a call, and what is needed to check it.

    Attributes:
        arrays: of the call, queries first.
        settings: of the call.
        keys: of each row of the batch, [S, K, H], where it has tokens; on the host.
        values: likewise.
        sampled: queries to check, as row of the batch, index in it, and the tokens it sees.
        padding: index of queries whose result is zero.
        flops: operations of the two products over the pairs of tokens that see each other.
    """

    arrays: tuple[jax.Array, ...]
    settings: dict[str, Any]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    sampled: list[tuple[int, int, np.ndarray]]
    padding: tuple[np.ndarray, ...]
    flops: int

    def expected(self) -> np.ndarray:
        """The sampled results in float64, [samples, N, H]."""
        q, width = np.asarray(self.arrays[0]), self.arrays[0].shape[-1]
        result = np.zeros((len(self.sampled), *q.shape[2:]))
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            own = [number for number, sample in enumerate(self.sampled) if sample[0] == row]
            kv_heads = keys.shape[1]
            group = q.shape[2] // kv_heads
            for head, some in itertools.product(
                range(kv_heads), (own[i : i + TOGETHER] for i in range(0, len(own), TOGETHER))
            ):
                hidden = np.ones((len(some), len(keys)), bool)
                for place, number in enumerate(some):
                    hidden[place, self.sampled[number][2]] = False
                heads = slice(head * group, (head + 1) * group)
                queries = q[row, [self.sampled[number][1] for number in some], heads]
                scores = _float64(queries).reshape(-1, width) @ _float64(keys[:, head]).T
                scores[np.repeat(hidden, group, axis=0)] = -np.inf
                scores -= scores.max(axis=1, keepdims=True)
                weights = np.exp(scores / width**0.5)
                weights /= weights.sum(axis=1, keepdims=True)
                seen = _float64(values[:, head])
                seen[hidden.all(axis=0)] = 0
                result[some, heads] = (weights @ seen).reshape(len(some), group, width)
        return result


def _float64(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.astype(np.float32)).astype(np.float64)


def flash_inputs(spec: flash_specs.Spec) -> Inputs:
    """Random sequences; NaN in padding."""
    batch, length = spec.rows
    live = np.ones((batch, length), bool)
    if spec.packed:
        live[:, sum(spec.lengths) :] = False
    dtype = jnp.dtype(spec.dtype)
    heads = (spec.query_heads, spec.kv_heads, spec.kv_heads)
    q, k, v = (
        jnp.where(
            live[:, :, None, None],
            jax.random.normal(key, (batch, length, count, spec.width), dtype),
            jnp.nan,
        )
        for key, count in zip(jax.random.split(jax.random.key(0), 3), heads, strict=True)
    )
    starts = np.concatenate([[0], np.cumsum(spec.lengths)]) if spec.packed else None
    sampled = []
    share = -(-SAMPLED // len(spec.lengths))
    for number, count in enumerate(spec.lengths):
        row, offset = (0, starts[number]) if spec.packed else (number, 0)
        for token in _sample(count, share):
            first = 0 if spec.window is None else max(0, token - spec.window + 1)
            sampled.append((row, offset + token, offset + np.arange(first, token + 1)))
    arrays = (q, k, v, *((jnp.asarray(starts, jnp.int32),) if spec.packed else ()))
    keys, values = (list(np.asarray(x)) for x in (k, v))
    return Inputs(arrays, spec.settings(), keys, values, sampled, np.nonzero(~live), spec.flops)


def block_inputs(spec: block_specs.Spec) -> Inputs:
    """Random sequences in blocks at random places of a pool; NaN where no token is."""
    rng, size = np.random.default_rng(0), spec.block_size
    owned = [-(-length // size) for length in spec.lengths]
    order = rng.permutation(np.arange(1, 1 + sum(owned)))
    table = np.full((len(owned), spec.columns), 2**31 - 1, np.int32)
    live = np.zeros((1 + len(order), size), bool)
    used = 0
    for row, (blocks, length) in enumerate(zip(owned, spec.lengths, strict=True)):
        ids = table[row, :blocks] = order[used : used + blocks]
        used += blocks
        live[ids] = np.arange(blocks * size).reshape(blocks, size) < length
    dtype, (a, b, c) = jnp.dtype(spec.dtype), jax.random.split(jax.random.key(0), 3)
    shape = (len(live), spec.kv_heads, size, spec.width)
    pools = [
        jnp.where(live[:, None, :, None], jax.random.normal(key, shape, dtype), jnp.nan)
        for key in (a, b)
    ]
    q_shape = (len(owned), spec.new_tokens, spec.query_heads, spec.width)
    lengths = np.asarray(spec.lengths, np.int32)
    positions = lengths[:, None] + np.arange(-spec.new_tokens, 0, dtype=np.int32)
    q = jax.random.normal(c, q_shape, dtype)
    q = jnp.where(positions[:, :, None, None] >= 0, q, jnp.nan)
    sampled, pairs, share = [], 0, -(-SAMPLED // len(owned))
    for row, length in enumerate(spec.lengths):
        new = min(spec.new_tokens, length)
        for token in _sample(new, share):
            seen = _seen(spec, length - new + token)
            sampled.append((row, spec.new_tokens - new + token, seen))
        pairs += sum(len(_seen(spec, at)) for at in range(length - new, length))
    plain = [
        [
            np.asarray(jnp.swapaxes(pool[table[row, :count]], 1, 2)).reshape(
                -1, spec.kv_heads, spec.width
            )
            for row, count in enumerate(owned)
        ]
        for pool in pools
    ]
    arrays = (q, *pools, jnp.asarray(table), jnp.asarray(positions))
    flops = 4 * pairs * spec.query_heads * spec.width
    padding = np.nonzero(positions < 0)
    return Inputs(arrays, spec.settings(), *plain, sampled, padding, flops)


def _seen(spec: block_specs.Spec, at: int) -> np.ndarray:
    seen = np.arange(at + 1)
    if spec.window is None:
        return seen
    return seen[(seen > at - spec.window) | (seen < spec.sinks)]


def _sample(count: int, wanted: int) -> list[int]:
    """Tokens near borders of tiles, the last, and random ones."""
    near = [0, 1, 7, 8, 15, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, count // 2]
    back = [1, 2, 16, 17, 64, 65]
    some = np.random.default_rng(1).integers(0, max(count, 1), wanted).tolist()
    tokens = [count - b for b in back] + near + some
    tokens = [token for token in tokens if 0 <= token < count]
    return list(dict.fromkeys(tokens))[:wanted]
