"""What tuning is asked for; checked before JAX is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..errors import RequestError
from .flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneRequest:
    """What to measure.

    Attributes:
        model: a preset, a folder, "demo", or the id of a model on the Hub; its shape counts, the
            weights are random.
        batch_sizes: rows of decode steps.
        prompt_tokens: tokens of prefills of one row.
        context: tokens that each row of a decode step has before it.
        recipe: name of the recipe that puts the weights into codes.
        num_layers: of the model that is timed; so many that each kind is there if None.
        budget_seconds: nothing is begun after so many.
        output: file to write; the user's for this kind of device if None.

    Raises:
        RequestError: a value outside its range.
    """

    model: str
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: tuple[int, ...] = (512,)
    context: int = 512
    recipe: str | None = None
    num_layers: int | None = None
    budget_seconds: int = 600
    output: Path | None = None

    def __post_init__(self) -> None:
        listed = {"batch_size": self.batch_sizes, "prompt_tokens": self.prompt_tokens}
        single = {name: getattr(self, name) for name in ("context", "num_layers", "budget_seconds")}
        given = {name: (value,) for name, value in single.items() if value is not None}
        for name, values in {**listed, **given}.items():
            if any(value < 1 for value in values):
                shown = ", ".join(map(str, values))
                raise RequestError(f"{flag(name)} is {shown}; accepted are whole numbers from 1 on")
        if not (self.batch_sizes or self.prompt_tokens):
            raise RequestError("neither --batch-size nor --prompt-tokens is given; give one")
