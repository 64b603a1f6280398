"""A run: steps, looks at text that is held out, figures and checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RequestError
from .batch import Batch
from .checkpoint import Checkpoints, fingerprint
from .data import Data
from .metrics import MetricsFile
from .parameters import Parameters
from .schedule import Schedule
from .step import Trainer, TrainState

Figures = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run does, and when.

    Attributes:
        trainer: its steps.
        data: what they read.
        schedule: how many there are, and their rates.
        fixed: parameters that stay as they are.
        held_out: batches to look at, each of whose targets count once; none of them is trained on.
        look_every: steps between two looks; 0 for one at the end alone.
        save_every: steps between two checkpoints; 0 for one at the end alone.
        at_once: steps in one compiled program. Figures come as often.

    Raises:
        RequestError: a number below its range, steps that are no multiple of `at_once`, or a text
            with ids outside the model's vocabulary.
    """

    trainer: Trainer
    data: Data
    schedule: Schedule
    fixed: Parameters
    held_out: Sequence[Batch] = ()
    look_every: int = 0
    save_every: int = 0
    at_once: int = 1

    def __post_init__(self) -> None:
        for name in ("look_every", "save_every"):
            if (value := getattr(self, name)) < 0 or value % max(self.at_once, 1):
                raise RequestError(
                    f"{name} is {value}; accepted are 0 and multiples of {self.at_once}"
                )
        if self.at_once < 1 or self.schedule.steps % self.at_once:
            raise RequestError(
                f"at_once is {self.at_once}; accepted are divisors of {self.schedule.steps} steps"
            )
        vocabulary = self.trainer.skeleton.config.vocab_size
        least, most = int(self.data.tokens.min()), int(self.data.tokens.max())
        if least < 0 or most >= vocabulary:
            raise RequestError(
                f"the text has ids from {least} to {most}; accepted are 0 to {vocabulary - 1}: "
                "encode it with the model's tokenizer"
            )

    def identity(self, state: TrainState) -> dict[str, Any]:
        """What must be the same for a run to go on from this one's checkpoint, as JSON."""
        trainer = self.trainer
        config = dataclasses.asdict(trainer.skeleton.config)
        mesh = {} if trainer.mesh is None else dict(trainer.mesh.shape)
        return {
            "config": {name: repr(value) for name, value in config.items()},
            "training": dataclasses.asdict(trainer.training),
            "assemble": _settings(trainer.assemble),
            "schedule": dataclasses.asdict(self.schedule),
            "at_once": self.at_once,
            "data": self.data.digest,
            "trained": {name: list(value.shape) for name, value in state.trained.items()},
            "fixed": fingerprint(self.fixed),
            "mesh": mesh,
        }

    def go(
        self,
        state: TrainState,
        *,
        checkpoints: Checkpoints | None = None,
        metrics: MetricsFile | None = None,
        tell: Callable[[int, Figures], None] = lambda step, figures: None,
    ) -> TrainState:
        """Takes the steps that are left.

        Args:
            state: where to go on; it is given away.
            checkpoints: where the state is saved.
            metrics: where figures are written.
            tell: called with the steps taken and the figures of the newest, `held_out` among them
                after a look, in nats a token.

        Returns:
            The state after the last step.

        Raises:
            FloatingPointError: a loss or gradient that is no number; what is saved is from before
                it.
        """
        step = int(state.step)
        while step < self.schedule.steps:
            rates = self.schedule.rates(step, self.at_once)
            batches = self.data.batches(step, self.at_once)
            state, found = self.trainer.steps(state, self.fixed, batches, rates)
            figures = {name: np.asarray(value) for name, value in found.items()} | {"rate": rates}
            _refuse_nan(figures, step)
            step += self.at_once
            if _due(step, self.look_every, self.schedule.steps) and self.held_out:
                figures["held_out"] = np.full(self.at_once, np.nan, np.float32)
                figures["held_out"][-1] = self.look(state)
            if metrics is not None:
                metrics.write(step - self.at_once + 1, figures)
            if checkpoints is not None and _due(step, self.save_every, self.schedule.steps):
                checkpoints.save(state)
            tell(step, figures)
        return state

    def look(self, state: TrainState) -> float:
        """Mean loss of a held-out token in nats.

        Raises:
            RequestError: there is nothing held out.
        """
        if not self.held_out:
            raise RequestError("nothing is held out; give the run held_out=held_out_batches(...)")
        sums = [
            np.asarray(self.trainer.loss(state.trained, self.fixed, batch), np.float64)
            for batch in self.held_out
        ]
        total, tokens = np.sum(sums, axis=0)
        return float(total / tokens)


def _due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def _settings(assemble: Callable[..., Any]) -> dict[str, Any]:
    """Those of the dataclass that the function is a method of, such as LoRA's alpha."""
    owner = getattr(assemble, "__self__", None)
    if not dataclasses.is_dataclass(owner) or isinstance(owner, type):
        return {}
    return {type(owner).__name__: dataclasses.asdict(owner)}


def _refuse_nan(figures: Figures, step: int) -> None:
    # A finite loss may have a gradient that is not: then the state behind it is lost.
    for name, words in {"loss": "loss", "gradient_norm": "norm of the gradient"}.items():
        fine = np.isfinite(figures[name])
        if not fine.all():
            first = int(np.argmin(fine))
            raise FloatingPointError(
                f"the {words} of step {step + 1 + first} is {figures[name][first]}; give "
                "Schedule a lower rate, or AdamW a lower clip"
            )
