"""A report on the routing of a text: one HTML file with its pictures inside."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ..model import RoutingTrace
from ..text import Tokenizer
from . import figures, statistics
from .counts import RoutingCounts
from .summary import Summary, summarise
from .token_classes import CLASSES, token_classes

MAPS = 3
BUSIEST = 48
TEMPLATE = "report.html.jinja"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure of a report.

    Attributes:
        name: of its file, without an ending.
        caption: how to read it.
        png: the file.
    """

    name: str
    caption: str
    png: bytes

    @property
    def inline(self) -> str:
        """The picture as an address that holds it."""
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that is said of the routing of a text.

    Attributes:
        facts: what was run, in words, by name.
        summary: the figures.
        pictures: those of the figures that are shown.
    """

    facts: Mapping[str, str]
    summary: Summary
    pictures: tuple[Picture, ...]

    @classmethod
    def of(
        cls,
        trace: RoutingTrace,
        counts: RoutingCounts,
        facts: Mapping[str, str],
        tokenizer: Tokenizer | None = None,
    ) -> Report:
        """Figures and pictures of what `trace_text` and `collect` found.

        Args:
            trace: of all tokens.
            counts: of the same tokens, with probabilities.
            facts: what was run, in words, by name, for the head of the page; "model" is its title.
            tokenizer: of the model; without one there are no classes and examples of tokens.

        Raises:
            RequestError: matplotlib is not installed, or what `summarise` refuses.
        """
        figures.require_matplotlib()
        summary = summarise(trace, counts, tokenizer)
        pictures = [*_load_pictures(trace, summary), *_pair_pictures(trace)]
        if tokenizer is not None:
            pictures.append(_class_picture(trace, summary, tokenizer))
        return cls(facts, summary, tuple(pictures))

    @property
    def html(self) -> str:
        """The page. It reads no other file, and every text in it is escaped."""
        import jinja2

        source = resources.files("qwen_jax.research").joinpath(TEMPLATE).read_text("utf-8")
        page = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        pictures = {picture.name: picture for picture in self.pictures}
        return page.from_string(source).render(
            facts=self.facts, summary=self.summary, pictures=pictures
        )

    def write(self, folder: Path) -> None:
        """Write report.html, routing.json and the pictures into a folder.

        Raises:
            OSError: a file cannot be written.
        """
        (folder / "report.html").write_text(self.html, encoding="utf-8")
        content = {"facts": dict(self.facts), **self.summary.as_json()}
        text = json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False)
        (folder / "routing.json").write_text(text + "\n", encoding="utf-8")
        for picture in self.pictures:
            (folder / f"{picture.name}.png").write_bytes(picture.png)


def _load_pictures(trace: RoutingTrace, summary: Summary) -> list[Picture]:
    return [
        Picture(
            "load",
            "How often each expert is chosen, over what it would be if all were chosen alike.",
            figures.png(figures.load_map(summary.loads, trace.layers)),
        ),
        Picture(
            "layers",
            "Effective experts: as many equally loaded ones have the entropy of the load (dotted: "
            "all of them). Variation: standard deviation over mean of the load. Balance loss: of "
            "each layer alone, about the number of experts a token where the load is even.",
            figures.png(figures.layer_curves(summary.layers, trace.experts)),
        ),
    ]


def _pair_pictures(trace: RoutingTrace) -> list[Picture]:
    """Co-activation of some layers, and transitions from some layers to the next."""
    layers = _spread(trace.layers)
    together = [_pairs(trace, layer, layer) for layer in layers]
    pictures = [
        Picture(
            "co-activation",
            "Pairs of experts that tokens choose together, over what independent choices of the "
            f"same load would give: 0 never, 1 as chance has it.{_selection(trace)}",
            figures.png(
                figures.pair_maps(
                    together, [f"Layer {n}" for n in layers], rows="expert", columns="expert"
                )
            ),
        )
    ]
    steps = _spread(list(zip(trace.layers, trace.layers[1:], strict=False)))
    if steps:
        onward = figures.pair_maps(
            [_pairs(trace, *step) for step in steps],
            [f"Layer {a} to {b}" for a, b in steps],
            rows="expert",
            columns="expert of the next layer",
        )
        caption = (
            "Experts that a token chooses in one layer (down) and in the next (across), on the "
            "same kind of scale: above 1 they follow one another more often than chance has it."
        )
        pictures.append(Picture("transitions", caption, figures.png(onward)))
    return pictures


def _pairs(trace: RoutingTrace, first: int, second: int) -> figures.PairMap:
    """The lift of experts of two layers, or of one with itself, of the busiest of each."""
    ids, experts = (trace[first].ids, trace[second].ids), trace.experts
    chosen = [statistics.counts_of(part, experts) for part in ids]
    if first == second:
        joint = statistics.co_activation(ids[0], experts)
    else:
        joint = statistics.transition(*ids, experts)
    lift = statistics.lift(joint, chosen[0], chosen[1], len(trace))
    if first == second:
        np.fill_diagonal(lift, np.nan)
    rows, columns = (np.sort(np.argsort(-part, kind="stable")[:BUSIEST]) for part in chosen)
    return figures.PairMap(lift[np.ix_(rows, columns)], rows, columns)


def _selection(trace: RoutingTrace) -> str:
    return f" Shown are the {BUSIEST} busiest of each layer." if trace.experts > BUSIEST else ""


def _class_picture(trace: RoutingTrace, summary: Summary, tokenizer: Tokenizer) -> Picture:
    """Classes of tokens in the layer whose experts tell most of them."""
    best = max(summary.layers, key=lambda row: np.nan_to_num(row.class_information))
    classes = token_classes(trace.tokens, tokenizer)
    table = statistics.by_class(trace[best.layer].ids, classes, trace.experts)
    return Picture(
        "classes",
        "Share of each class among an expert's tokens, over its share among all tokens, in the "
        "layer whose experts tell most of the class.",
        figures.png(figures.class_map(table, CLASSES, best.layer)),
    )


def _spread(items: Any) -> list[Any]:
    """At most `MAPS` of them, from first to last."""
    places = np.linspace(0, len(items) - 1, min(MAPS, len(items)))
    return [items[round(float(place))] for place in places]


def _finite(value: Any) -> Any:
    """What JSON can hold: a number that it cannot is null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
