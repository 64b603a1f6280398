"""The figures of a report: one row a layer, and the experts that stand out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..errors import RequestError
from ..model import RoutingTrace
from ..text import Tokenizer
from . import statistics
from .counts import RoutingCounts
from .token_classes import CLASSES, shown, token_classes

EXAMPLES = 8
EXPERTS = 20
# An expert chosen less often says little of what it is for.
LEAST_CHOICES = 30


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """How one layer routes.

    Attributes:
        layer: its number.
        entropy: of the load, in nats.
        effective_experts: equally loaded experts with that entropy.
        variation: coefficient of variation of the load.
        largest_load: of the busiest expert, over the even share.
        unused: experts that no token chose.
        balance_loss: of this layer alone.
        first_weight: mean weight of a token's first expert.
        empty_slots: share of slots without an expert.
        class_information: share of the entropy of token classes that the choice of an expert tells;
            NaN without a tokenizer.
    """

    layer: int
    entropy: float
    effective_experts: float
    variation: float
    largest_load: float
    unused: int
    balance_loss: float
    first_weight: float
    empty_slots: float
    class_information: float


@dataclasses.dataclass(frozen=True)
class ExpertFigures:
    """An expert that takes some kinds of tokens more than others.

    Attributes:
        layer: number of the layer.
        expert: number of the expert.
        load: over the even share.
        divergence: of the classes of its tokens from those of all, in nats.
        favourite: the class that adds most to the divergence.
        share: of that class among its tokens.
        share_of_all: of that class among all tokens.
        examples: tokens that stand out among its own, with how often it took each.
    """

    layer: int
    expert: int
    load: float
    divergence: float
    favourite: str
    share: float
    share_of_all: float
    examples: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of one text.

    Attributes:
        tokens: how many there were.
        pooled_balance_loss: of all layers together, as transformers defines it.
        layers: one a MoE layer.
        experts: the most specialised, at most `EXPERTS`; none without a tokenizer.
        class_shares: share of each class among the tokens; none without a tokenizer.
        loads: float64 [L, E], share of each expert among its layer's choices.
    """

    tokens: int
    pooled_balance_loss: float
    layers: tuple[LayerFigures, ...]
    experts: tuple[ExpertFigures, ...]
    class_shares: dict[str, float]
    loads: np.ndarray

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self) | {"loads": self.loads.tolist()}


def summarise(
    trace: RoutingTrace | None, counts: RoutingCounts, tokenizer: Tokenizer | None = None
) -> Summary:
    """The figures of what `trace_text` and `collect` found.

    Args:
        trace: of all tokens; logits are not read.
        counts: of the same tokens, with probabilities.
        tokenizer: tells classes of tokens; without one there are none.

    Raises:
        RequestError: no trace, counts of other tokens, or counts without probabilities.
    """
    if trace is None:
        raise RequestError('there is no trace: it was captured with "none"; capture "ids"')
    if int(counts.tokens) != len(trace) or counts.layers != trace.layers:
        raise RequestError(
            f"counts are of {int(counts.tokens)} tokens and layers {counts.layers}, the trace of "
            f"{len(trace)} and {trace.layers}; give both from one run"
        )
    classes = None if tokenizer is None else token_classes(trace.tokens, tokenizer)
    shares = {} if classes is None else class_shares(classes)
    tables = {} if classes is None else class_tables(trace, classes)
    loads = statistics.load(np.asarray(counts.chosen))
    losses = statistics.balance_losses(counts)
    known = _entropy_of(shares)
    layers = tuple(
        _layer(trace, layer, loads[i], float(losses[i]), tables.get(layer), known)
        for i, layer in enumerate(trace.layers)
    )
    experts = () if tokenizer is None else _experts(trace, tables, tokenizer)
    pooled = statistics.pooled_balance_loss(counts)
    return Summary(len(trace), pooled, layers, experts, shares, loads)


def class_shares(classes: np.ndarray) -> dict[str, float]:
    """The share of each class that occurs among the tokens, by name."""
    counts = np.bincount(classes, minlength=len(CLASSES)) / max(len(classes), 1)
    return {name: float(share) for name, share in zip(CLASSES, counts, strict=True) if share > 0}


def class_tables(trace: RoutingTrace, classes: np.ndarray) -> dict[int, np.ndarray]:
    """`statistics.by_class` of each layer."""
    return {i: statistics.by_class(trace[i].ids, classes, trace.experts) for i in trace.layers}


def _layer(
    trace: RoutingTrace,
    layer: int,
    load: np.ndarray,
    loss: float,
    table: np.ndarray | None,
    class_entropy: float,
) -> LayerFigures:
    routing = trace[layer]
    information = math.nan
    if table is not None and class_entropy > 0:
        information = statistics.specialisation(table)[1] / class_entropy
    entropy = float(statistics.entropy(load))
    return LayerFigures(
        layer=layer,
        entropy=entropy,
        effective_experts=math.exp(entropy),
        variation=float(statistics.variation(load)),
        largest_load=float(load.max() * trace.experts),
        unused=int((load == 0).sum()),
        balance_loss=loss,
        first_weight=float(np.asarray(routing.weights, np.float64).max(-1).mean()),
        empty_slots=float(statistics.drop_rates(routing.ids, trace.experts)[0]),
        class_information=information,
    )


def _experts(
    trace: RoutingTrace, tables: dict[int, np.ndarray], tokenizer: Tokenizer
) -> tuple[ExpertFigures, ...]:
    ranked = []
    for layer, table in tables.items():
        divergence, _ = statistics.specialisation(table)
        often = table.sum(0) >= LEAST_CHOICES
        ranked += [(float(divergence[e]), layer, int(e)) for e in np.flatnonzero(often)]
    ranked.sort(reverse=True)
    return tuple(
        _expert(trace, layer, expert, tables[layer], divergence, tokenizer)
        for divergence, layer, expert in ranked[:EXPERTS]
    )


def _expert(
    trace: RoutingTrace,
    layer: int,
    expert: int,
    table: np.ndarray,
    divergence: float,
    tokenizer: Tokenizer,
) -> ExpertFigures:
    within = table[:, expert] / table[:, expert].sum()
    overall = table.sum(1) / table.sum()
    favourite = int(np.argmax(_excess(within, overall)))
    return ExpertFigures(
        layer=layer,
        expert=expert,
        load=float(table[:, expert].sum() / table.sum() * trace.experts),
        divergence=divergence,
        favourite=CLASSES[favourite],
        share=float(within[favourite]),
        share_of_all=float(overall[favourite]),
        examples=tuple(
            (shown(token, tokenizer), count) for token, count in examples(trace, layer, expert)
        ),
    )


def examples(
    trace: RoutingTrace, layer: int, expert: int, most: int = EXAMPLES
) -> list[tuple[int, int]]:
    """Tokens that stand out among those that an expert took, and how often it took each.

    Each stands for its share of the divergence of the expert's tokens from all tokens, so that
    neither rare nor omnipresent ones come first.
    """
    tokens, inverse = np.unique(trace.tokens, return_inverse=True)
    took = (trace[layer].ids == expert).any(-1)
    counts = np.bincount(inverse[took], minlength=len(tokens))
    if counts.sum() == 0:
        return []
    excess = _excess(counts / counts.sum(), np.bincount(inverse) / len(trace))
    best = np.argsort(-excess, kind="stable")[:most]
    return [(int(tokens[i]), int(counts[i])) for i in best if excess[i] > 0]


def _excess(within: np.ndarray, overall: np.ndarray) -> np.ndarray:
    """Terms of the divergence of one distribution from another."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(within > 0, within * np.log(within / overall), 0.0)


def _entropy_of(shares: dict[str, float]) -> float:
    return float(statistics.entropy(np.array(list(shares.values())))) if shares else 0.0
