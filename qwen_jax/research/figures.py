"""Figures of routing, by matplotlib (the `research` extra); nothing is shown or stored here."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .summary import LayerFigures

COLOURS = "YlGnBu"
NOTHING = "0.93"
INK = "#1d4e89"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "figure.dpi": 150,
}
_LABELS = 17


def require_matplotlib() -> None:
    """Raise `RequestError` unless matplotlib can be imported."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("matplotlib is not installed; pip install 'qwen-jax[research]'")


def _styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run in the style of this file."""

    @functools.wraps(draw)
    def styled(*arguments: Any, **options: Any) -> Any:
        require_matplotlib()
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return draw(*arguments, **options)

    return styled


@_styled
def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", bbox_inches="tight", pad_inches=0.06)
    return stream.getvalue()


@_styled
def load_map(loads: np.ndarray, layers: Sequence[int]) -> Figure:
    """The load of each expert of each layer over the even share, as a heat map.

    Args:
        loads: float64 [L, E], from `statistics.load`.
        layers: numbers of the layers.
    """
    rows, experts = loads.shape
    figure, (axes,) = _canvas(1, 1, (7.2, min(1.5 + 0.24 * rows, 7.5)))
    _map(axes, loads * experts, "load / even share", most=_ceiling(loads * experts))
    _ticks(axes.yaxis, layers)
    _ticks(axes.xaxis, range(experts))
    axes.set(xlabel="expert", ylabel="layer", title="Load of each expert")
    return figure


@_styled
def layer_curves(layers: Sequence[LayerFigures], experts: int) -> Figure:
    """Effective experts, variation and balance loss of each layer."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _canvas(1, 3, (7.2, 2.2))
    numbers = [row.layer for row in layers]
    parts = (
        ("Effective experts", [row.effective_experts for row in layers], experts),
        ("Variation of load", [row.variation for row in layers], None),
        ("Balance loss", [row.balance_loss for row in layers], None),
    )
    for one, (title, values, limit) in zip(axes, parts, strict=True):
        one.plot(numbers, values, color=INK, marker="o", markersize=3, linewidth=1.2)
        if limit is not None:
            one.axhline(limit, color="0.6", linewidth=0.8, linestyle=":")
        one.set(title=title, xlabel="layer", ylim=(0, max([*values, limit or 0]) * 1.08))
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.grid(axis="y", color="0.9", linewidth=0.6)
    return figure


class PairMap(NamedTuple):
    """A lift of some experts.

    Attributes:
        lift: float64 [R, C], from `statistics.lift`; NaN is left grey.
        rows: numbers of the R experts.
        columns: numbers of the C experts.
    """

    lift: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


@_styled
def pair_maps(maps: Sequence[PairMap], titles: Sequence[str], *, rows: str, columns: str) -> Figure:
    """Up to four maps beside one another, on one scale.

    Args:
        maps: what to show.
        titles: one a map.
        rows: what stands along the vertical axes.
        columns: what stands along the horizontal axes.
    """
    figure, axes = _canvas(1, len(maps), (0.9 + 2.1 * len(maps), 2.6))
    most = max(_ceiling(part.lift) for part in maps)
    for number, (one, part, title) in enumerate(zip(axes, maps, titles, strict=True)):
        last = number == len(maps) - 1
        label = "joint choices / expected" if last else None
        _map(one, part.lift, label, most=most, aspect="equal")
        _ticks(one.xaxis, part.columns, 8)
        _ticks(one.yaxis, part.rows, 8)
        one.set(title=title, xlabel=columns, ylabel="" if number else rows)
    return figure


@_styled
def class_map(table: np.ndarray, names: Sequence[str], layer: int) -> Figure:
    """Which classes of tokens each expert of a layer takes, over what all experts take.

    Args:
        table: int64 [C, E], from `statistics.by_class`.
        names: one a row.
        layer: its number.
    """
    kept = table.sum(1) > 0
    table, names = table[kept].astype(np.float64), [names[int(i)] for i in np.flatnonzero(kept)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = (table / table.sum(0)) / (table.sum(1, keepdims=True) / table.sum())
    figure, (axes,) = _canvas(1, 1, (7.2, 1.1 + 0.24 * len(names)))
    _map(axes, ratio, "share / share of all", most=_ceiling(ratio))
    _ticks(axes.xaxis, range(table.shape[1]))
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="expert", title=f"Classes of tokens that the experts of layer {layer} take")
    return figure


def _canvas(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure that belongs to no window, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).ravel())


def _map(
    axes: Axes, values: np.ndarray, label: str | None, *, most: float, aspect: Any = "auto"
) -> None:
    """A heat map from 0 to `most`, NaN in grey, with a scale beside it if it has a label."""
    options: Any = {"cmap": COLOURS, "vmin": 0, "vmax": most, "interpolation": "nearest"}
    picture = axes.imshow(values, aspect=aspect, **options)
    axes.set_facecolor(NOTHING)
    axes.tick_params(length=2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if label is None:
        return
    above = bool((values > most).any())
    figure: Any = axes.figure
    extend = "max" if above else "neither"
    # As wide in a high figure as in a low one.
    shape: Any = {"aspect": 7 * figure.get_figheight(), "extendfrac": 0.03, "pad": 0.02}
    bar = figure.colorbar(picture, ax=axes, extend=extend, **shape)
    bar.ax.tick_params(length=2)
    bar.set_label(label)
    bar.outline.set_visible(False)


def _ceiling(values: np.ndarray) -> float:
    """Where the scale ends: a few outliers must not leave all else in one colour."""
    finite = values[np.isfinite(values)]
    return max(2.0, float(np.percentile(finite, 99))) if finite.size else 2.0


def _ticks(axis: Any, numbers: Sequence[int] | np.ndarray, most: int = _LABELS) -> None:
    """Labels of every n-th place, n a power of two, so that at most so many stand there."""
    step = 1
    while -(-len(numbers) // step) > most:
        step *= 2
    places = range(0, len(numbers), step)
    axis.set_ticks(places, [str(numbers[place]) for place in places])
