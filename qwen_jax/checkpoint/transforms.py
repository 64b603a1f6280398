"""How rows of the tensors in files become rows of the tensors in the tree, and back.

Every layout in use differs from the tree's in one way only: which rows (first axis) of which
stored tensor are which rows of which tree tensor. A `Piece` says that for one run of rows;
`gather` follows it from file to tree, `scatter` back.

- concatenation: gate_up = [gate | up] is two pieces, each all rows of its stored tensor;
- stack of experts: the tree tensor has one more axis in front, and a piece fills one expert;
- interleaving: in_proj_qkvz comes in one block a key head, [q k v z] in each, and the q rows of
  all blocks are the q rows of in_proj_qkv.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Equates rows of one stored tensor with rows of one tree tensor.

    Attributes:
        path: tree path.
        key: key of the stored tensor.
        blocks: number of equal blocks in which the stored rows come.
        stored_start: first row inside each block.
        rows: rows in each block; `blocks * rows` rows in the tree.
        tree_start: first row in the tree tensor.
        expert: index along the tree tensor's leading expert axis, which the stored tensor lacks;
            None for no such axis.
    """

    path: str
    key: str
    blocks: int
    stored_start: int
    rows: int
    tree_start: int
    expert: int | None = None

    def gather(self, tree: np.ndarray, stored: np.ndarray) -> None:
        """Writes this piece of `stored` into `tree`, cast to its dtype."""
        tree_rows, stored_rows = self._views(tree, stored)
        tree_rows[...] = stored_rows

    def scatter(self, stored: np.ndarray, tree: np.ndarray) -> None:
        """Writes this piece of `tree` into `stored`, cast to its dtype: the inverse of `gather`."""
        tree_rows, stored_rows = self._views(tree, stored)
        stored_rows[...] = tree_rows

    def _views(self, tree: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Views [blocks, rows, ...] of both sides; to split the first axis never copies."""
        whole = tree if self.expert is None else tree[self.expert]
        run = whole[self.tree_start : self.tree_start + self.blocks * self.rows]
        tree_rows = run.reshape(self.blocks, self.rows, *run.shape[1:])
        blocked = stored.reshape(self.blocks, -1, *stored.shape[1:])
        return tree_rows, blocked[:, self.stored_start : self.stored_start + self.rows]
