"""Training: losses, compiled steps, data, checkpoints. Needs the `train` extra."""

from .batch import Batch
from .data import Data, held_out_batches, joined
from .losses import NextTokens
from .optimiser import AdamW
from .parameters import Skeleton, Split, parameters_of, split
from .schedule import Schedule
from .step import Trainer, Training, TrainState

__all__ = [
    "AdamW",
    "Batch",
    "Data",
    "NextTokens",
    "Schedule",
    "Skeleton",
    "Split",
    "TrainState",
    "Trainer",
    "Training",
    "held_out_batches",
    "joined",
    "parameters_of",
    "split",
]
