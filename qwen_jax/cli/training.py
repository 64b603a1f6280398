"""Flags of `qwen-jax train`, and the parts of a run that they stand for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ..config import QwenConfig
from ..configuration.presets import PRESET_NAMES
from ..errors import RequestError
from .console import Notes, duration
from .flags import about, flag, flags_of
from .options import MaybeFloat, MaybeWhole, Texts, Whole

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..train import Schedule, Training
    from ..train.lora import Lora

WARMUP = 20
_LINES_APART = 10.0


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentFlags:
    """How the model follows its gradients.

    Attributes:
        steps: how many there are (200 by default).
        batch_size: windows of text in one step (8 by default).
        accumulate: cut each batch into so many parts, one in memory at a time.
        window: tokens of a window (512 by default).
        learning_rate: the largest, of AdamW (1e-3 by default).
        warmup: steps in which it rises from nothing (20 by default, or all if there are fewer);
            then it falls along a cosine.
        final_rate: share of it that is left at the end (0.1 by default).
        weight_decay: of matrices (0.1 by default).
        clip: longest gradient; longer ones are shortened to it (1 by default).
        seed: of first weights, order of text, and experts that are dropped.
    """

    steps: Whole = 200
    batch_size: Whole = 8
    accumulate: Whole = 1
    window: Whole = 512
    learning_rate: Annotated[float, Parameter(alias="--lr")] = 1e-3
    warmup: MaybeWhole = None
    final_rate: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: Whole = 0

    def schedule(self) -> Schedule:
        """The rates of a run.

        Raises:
            RequestError: a number outside its range.
        """
        from ..train import Schedule

        warmup = min(WARMUP, self.steps) if self.warmup is None else self.warmup
        with flags_of(steps="steps", rate="learning_rate", warmup="warmup", final="final_rate"):
            return Schedule(self.steps, self.learning_rate, warmup, self.final_rate)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterFlags:
    """What is asked of routers and experts beside the text.

    Attributes:
        balance: weight of the pooled load-balancing loss; by default the configuration's
            router_aux_loss_coef.
        layer_balance: weight of each layer's own.
        router_z: weight of the router z-loss.
        expert_dropout: probability with which an expert is left out of a step.
        gradient_routing: strength of a signal to experts that were not chosen, at most 0.01 a
            token; 0 for none.
    """

    balance: MaybeFloat = None
    layer_balance: float = 0.0
    router_z: float = 0.0
    expert_dropout: float = 0.0
    gradient_routing: float = 0.0


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScopeFlags:
    """Which parameters change; all of them by default.

    Attributes:
        only: patterns of tree paths, such as "*.mlp.gate.*" for the routers; may be repeated.
        lora_rank: train a product of this rank beside each matrix in place of the matrices.
        lora_alpha: the product counts lora_alpha / lora_rank times (16 by default).
        lora_targets: patterns of the matrices' tree paths; by default all projections and experts.
    """

    only: Texts = ()
    lora_rank: MaybeWhole = None
    lora_alpha: MaybeFloat = None
    lora_targets: Texts = ()

    def lora(self) -> Lora | None:
        """The thin matrices, if any.

        Raises:
            RequestError: flags that contradict each other, or numbers outside their range.
        """
        from ..train.lora import Lora

        if self.lora_rank is None:
            if self.lora_alpha is not None or self.lora_targets:
                raise RequestError(
                    "--lora-alpha and --lora-targets mean nothing without --lora-rank"
                )
            return None
        if self.only:
            raise RequestError("--only and --lora-rank exclude each other; give --lora-targets")
        given: dict[str, Any] = {"targets": self.lora_targets} if self.lora_targets else {}
        alpha = 16.0 if self.lora_alpha is None else self.lora_alpha
        with flags_of(rank="lora_rank", alpha="lora_alpha"):
            return Lora(rank=self.lora_rank, alpha=alpha, **given)


def training_of(
    descent: DescentFlags, routers: RouterFlags, config: QwenConfig, *, recompute: bool
) -> Training:
    """What is done in a step.

    Raises:
        RequestError: a number outside its range, or one about routers for a dense model.
    """
    from ..train import AdamW, NextTokens, Training
    from ..train.gradient_routing import GradientRouting

    named = dataclasses.asdict(routers)
    if not config.is_moe and (given := [name for name, value in named.items() if value]):
        flags = ", ".join(map(flag, given))
        raise RequestError(f"{flags}: the model is dense and has no routers; leave it out")
    balance = routers.balance
    if balance is None:
        balance = config.router_aux_loss_coef if config.is_moe else 0.0
    strength = routers.gradient_routing
    if not 0 <= routers.expert_dropout < 1:
        raise RequestError(
            f"--expert-dropout is {routers.expert_dropout}; accepted is 0 up to, but not, 1"
        )
    if descent.accumulate < 1 or descent.batch_size % descent.accumulate:
        raise RequestError(
            f"--accumulate is {descent.accumulate}; accepted is a number from 1 on that divides "
            f"--batch-size, {descent.batch_size}"
        )
    with flags_of(balance="balance", layer_balance="layer_balance", router_z="router_z"):
        objective = NextTokens(balance, routers.layer_balance, routers.router_z)
    with flags_of("seed", decay="weight_decay", clip="clip", strength="gradient_routing"):
        return Training(
            AdamW(descent.weight_decay, descent.clip),
            objective,
            parts=descent.accumulate,
            expert_dropout=routers.expert_dropout,
            gradient_routing=GradientRouting(strength) if strength else None,
            recompute=recompute,
            seed=descent.seed,
        )


def mesh_of(
    data_devices: int, expert_devices: int, config: QwenConfig, batches: Mapping[str, int]
) -> Mesh | None:
    """The devices that share the work; None for one.

    Args:
        data_devices: for the rows of batches.
        expert_devices: for the experts of a layer.
        config: of the model.
        batches: rows by the flag that they follow from.

    Raises:
        RequestError: more devices than there are, or what they cannot share evenly.
    """
    from ..sharding import device_mesh

    with about("--data-devices, --expert-devices"):
        mesh = device_mesh(data_devices, expert_devices)
    for name, rows in batches.items():
        if rows % data_devices:
            raise RequestError(
                f"--data-devices is {data_devices}, but {name} makes batches of {rows} windows; "
                "accepted is a number that divides them"
            )
    if expert_devices > 1 and (not config.is_moe or config.num_experts % expert_devices):
        has = f"{config.num_experts} experts" if config.is_moe else "no experts"
        raise RequestError(
            f"--expert-devices is {expert_devices}, but a layer has {has}; accepted is 1, or a "
            "number that divides them"
        )
    return None if data_devices * expert_devices == 1 else mesh


def shape_of(name: str) -> QwenConfig:
    """The configuration that a model with new weights is made of.

    Args:
        name: a preset, a `config.json`, a folder with one, or "demo".

    Raises:
        ConfigError: it is malformed or not implemented.
        CheckpointError: there is no such folder.
    """
    from ..loading import find_folder

    if name.lower() in PRESET_NAMES and not Path(name).exists():
        return QwenConfig.preset(name)
    return QwenConfig.from_hf(name if Path(name).is_file() else find_folder(name))


@contextmanager
def step_bar(
    notes: Notes, steps: int, done: int
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A bar that is told the steps taken and their newest figures; lines where there is no bar."""
    import sys

    if notes.quiet or not sys.stderr.isatty():
        yield _Lines(notes, steps, done).tell
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=steps, completed=done)

        def tell(step: int, figures: Mapping[str, float]) -> None:
            bar.update(task, completed=step, description=described(figures))
            if "held_out" in figures:
                notes(f"step {step}: {described(figures)}")

        yield tell


class _Lines:
    def __init__(self, notes: Notes, steps: int, done: int) -> None:
        self._notes, self._steps, self._done = notes, steps, done
        self._begin = self._last = time.monotonic()

    def tell(self, step: int, figures: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now < self._last + _LINES_APART and "held_out" not in figures and step < self._steps:
            return
        self._last = now
        left = (now - self._begin) * (self._steps - step) / max(step - self._done, 1)
        self._notes(f"step {step} of {self._steps}: {described(figures)}, {duration(left)} to go")


def described(figures: Mapping[str, float]) -> str:
    """Figures for a reader."""
    names = {"loss": "loss", "held_out": "held out", "balance": "balance"}
    return ", ".join(
        f"{text} {figures[name]:.4f}" for name, text in names.items() if name in figures
    )
