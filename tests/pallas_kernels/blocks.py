"""Sequences in a block cache, and the attention over them by the formula."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from pallas_kernels.block_attention import BlockScales, block_attention

run = jax.jit(block_attention, static_argnames=("window", "sinks"))


@dataclasses.dataclass
class Blocks:
    """Random sequences, plain and in blocks."""

    key: np.ndarray
    value: np.ndarray
    key_blocks: np.ndarray
    value_blocks: np.ndarray
    table: np.ndarray
    scales: BlockScales | None = None

    @classmethod
    def of(
        cls, lengths: list[int], block_size: int, *, columns=0, heads: int = 2, width=8, outlier=0.0
    ):
        """Sequences of these lengths, in blocks that lie in random order in a pool of NaN.

        A row of the table has as many columns as asked for, or two more than it needs. One channel
        of all keys is near `outlier`.
        """
        rng = np.random.default_rng(1)
        longest, batch = max(lengths), len(lengths)
        columns = columns or -(-longest // block_size) + 2
        table = np.zeros((batch, columns), np.int32)
        unused = rng.permutation(np.arange(1, batch * columns + 1)).tolist()
        plain = rng.standard_normal((2, batch, longest, heads, width)).astype(np.float32)
        plain[0, ..., -1] += outlier
        pools = np.full((2, batch * columns + 1, heads, block_size, width), np.nan, np.float32)
        for row, length in enumerate(lengths):
            for column in range(-(-length // block_size)):
                table[row, column] = unused.pop()
                tokens = slice(column * block_size, min((column + 1) * block_size, length))
                block = plain[:, row, tokens].swapaxes(1, 2)
                pools[:, table[row, column], :, : block.shape[2]] = block
        return cls(*plain, *pools, table)

    def quantised(self) -> Blocks:
        """The same sequences in an int8 pool: rounded by numpy, scales and bases NaN where unused.

        `key` and `value` of the result are what its codes stand for.
        """
        base = self.key_blocks[:, :, 0]
        offsets = {"key": base.astype(np.float64)[:, :, None], "value": 0.0}
        codes, scales, meant = {}, {}, {}
        for name, offset in offsets.items():
            rest = getattr(self, f"{name}_blocks").astype(np.float64) - offset
            scale = (np.abs(rest).max(-1) / 127).astype(np.float32)
            steps = np.rint(rest / np.where(scale == 0, 1, scale)[..., None])
            codes[name] = np.where(np.isnan(steps), 127, steps).astype(np.int8)
            scales[name] = scale
            blocks = scale.astype(np.float64)[..., None] * codes[name] + offset
            joined = blocks[self.table].swapaxes(2, 3)
            joined = joined.reshape(len(joined), -1, *joined.shape[3:])
            meant[name] = joined[:, : self.key.shape[1]]
        return Blocks(
            meant["key"],
            meant["value"],
            codes["key"],
            codes["value"],
            self.table,
            BlockScales(scales["key"], scales["value"], base),
        )

    def attend(self, q, positions, window=None, *, sinks=0, run=run):
        args = (q, self.key_blocks, self.value_blocks, self.table, positions)
        return np.asarray(run(*args, self.scales, window=window, sinks=sinks))

    def oracle(self, q, positions, window=None, sinks=0):
        """Softmax attention of one query after the other; zero at padding."""
        result, group = np.zeros(q.shape), q.shape[2] // self.key.shape[2]
        for b, t, n in np.ndindex(*q.shape[:3]):
            last = positions[b, t]
            if last < 0:
                continue
            seen = np.arange(last + 1)
            if window is not None:
                seen = seen[(seen > last - window) | (seen < sinks)]
            keys = self.key[b, seen, n // group].astype(np.float64)
            scores = keys @ q[b, t, n].astype(np.float64) / np.sqrt(q.shape[3])
            weights = np.exp(scores - scores.max())
            result[b, t, n] = weights @ self.value[b, seen, n // group] / weights.sum()
        return result


def ragged(lengths: list[int], new: list[int]) -> np.ndarray:
    """Positions of the last `new` tokens of each sequence, padded on the right with -1."""
    positions = np.full((len(lengths), max(new)), -1, np.int32)
    for row, (length, count) in enumerate(zip(lengths, new, strict=True)):
        positions[row, :count] = np.arange(length - count, length)
    return positions
