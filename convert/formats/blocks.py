"""Which part of a matrix each of its scales covers, from the shapes of both."""

from __future__ import annotations

from typing import NamedTuple

from .quantised import Parts

Block = tuple[int, int]

DEFAULT_BLOCK: Block = (128, 128)


class BlockSettings(NamedTuple):
    """What a configuration says about scales of 8-bit matrices.

    Attributes:
        blocks: sizes [rows, columns] that one scale may cover.
        single: whether a `weight_scale_inv` may also be one scale for the whole matrix.
        exponent_bytes: whether scales of dtype U8 are powers of two, stored as E8M0.
    """

    blocks: tuple[Block, ...] = (DEFAULT_BLOCK,)
    single: bool = True
    exponent_bytes: bool = False


def scale_block(
    parts: Parts, shape: Block, scale: tuple[int, ...], settings: BlockSettings, inverse: bool
) -> Block:
    """Finds the block that one scale covers.

    Args:
        parts: the matrix, for the message.
        shape: its [rows, columns].
        scale: shape of its scales.
        settings: what the configuration allows.
        inverse: whether the scales are a `weight_scale_inv`, which come by blocks only;
            a `weight_scale` also comes as one for the matrix or one a row.

    Returns:
        Rows and columns of a block; blocks at the far edges are cut off.

    Raises:
        CheckpointError: the number of scales fits no block that is allowed.
    """
    rows, columns = shape
    accepted = {block: block_counts(shape, block) for block in settings.blocks}
    if scale in ((), (1,), (1, 1)) and (settings.single or not inverse):
        return shape
    if not inverse and scale in ((rows,), (rows, 1)):
        return 1, columns
    fits = [block for block, counts in accepted.items() if counts == scale]
    if len(set(fits)) == 1:
        return min(fits[0][0], rows), min(fits[0][1], columns)
    expected = [f"{list(counts)} (blocks of {list(b)})" for b, counts in accepted.items()]
    expected += ["[1] (one scale)"] if settings.single or not inverse else []
    expected += [] if inverse else [f"[{rows}, 1] (one a row)"]
    raise parts.fault(
        f"of shape {list(shape)} has scales of shape {list(scale)}; "
        f"expected {' or '.join(expected) or 'none'}"
    )


def block_counts(shape: Block, block: Block) -> Block:
    """Number of blocks along each side, cut-off ones included."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def check_block(value: object) -> Block | None:
    """Reads a block size from a configuration; None if it is not two positive integers."""
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    return None
