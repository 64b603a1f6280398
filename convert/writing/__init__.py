"""Writing a model folder: shards, a journal to go on from, and an end that is all or nothing."""

from .checksums import Mismatch, verify_folder
from .destination import check_destination, is_finished, partial_folder
from .shard import OutputTensor, plan_shards
from .writer import Written, write_folder

__all__ = [
    "Mismatch",
    "OutputTensor",
    "Written",
    "check_destination",
    "is_finished",
    "partial_folder",
    "plan_shards",
    "verify_folder",
    "write_folder",
]
