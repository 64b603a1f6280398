"""Figures of routing: pure functions of counts and ids, in float64 on the host.

Ids are those of `RoutingTrace` and `Routing`: E, the number of experts, stands in an empty slot.
Arrays of several layers have them first, in the order of `layers`.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import RequestError
from ..model import RoutingTrace
from .counts import RoutingCounts
from .trace import refuse_other_tokens

# Float32 products of so many tokens are exact, and take 64 MB with 256 experts.
_TOKENS = 1 << 16

Ids = Int[np.ndarray, "*L N A"] | Int[Array, "*L N A"]


def counts_of(ids: Ids, experts: int) -> Int[np.ndarray, "*L E"]:
    """How often each expert was chosen, int64; the same as `RoutingCounts.chosen`."""
    return _one_hot_sum(np.asarray(ids), experts)


def load(chosen: Int[np.ndarray, "*L E"] | Int[Array, "*L E"]) -> Float[np.ndarray, "*L E"]:
    """The share of each expert among all choices of its layer; NaN where there was no choice."""
    chosen = np.asarray(chosen, np.float64)
    with np.errstate(invalid="ignore"):
        return chosen / chosen.sum(-1, keepdims=True)


def entropy(shares: Float[np.ndarray, "*L E"]) -> Float[np.ndarray, "*L"]:
    """Entropy of a load in nats, from 0 (one expert takes all) to log E (all take the same).

    Its exponential is the number of equally loaded experts with that entropy.
    """
    shares = np.asarray(shares, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(shares == 0, 0.0, -shares * np.log(shares))
    return np.asarray(terms.sum(-1))


def variation(shares: Float[np.ndarray, "*L E"]) -> Float[np.ndarray, "*L"]:
    """Coefficient of variation of a load: standard deviation over mean, 0 if all are the same."""
    shares = np.asarray(shares, np.float64)
    return np.asarray(shares.std(-1) / shares.mean(-1))


def balance_losses(counts: RoutingCounts) -> Float[np.ndarray, " L"]:
    """The load-balancing loss of each layer for itself: E times sum over e of f_e P_e.

    f_e is how often a token chose expert e, P_e the mean of its softmax probability (Fedus et al.,
    arXiv 2101.03961, with f that sum to the experts a token). About k where tokens spread evenly.

    Raises:
        RequestError: counts without probabilities, or of no token.
    """
    chosen, probability = _shares(counts)
    return chosen.shape[-1] * (chosen * probability).sum(-1)


def pooled_balance_loss(counts: RoutingCounts) -> float:
    """The load-balancing loss of all layers together, as transformers defines it.

    Layers are pooled before the product, so that layers which each load one expert may still give
    the smallest loss: see `balance_losses`. Arguments and errors are those.
    """
    chosen, probability = _shares(counts)
    return float(chosen.shape[-1] * (chosen.mean(0) * probability.mean(0)).sum())


def _shares(counts: RoutingCounts) -> tuple[np.ndarray, np.ndarray]:
    if counts.probability is None:
        raise RequestError(
            "counts have no probabilities, which the load-balancing loss needs; make them with "
            'capture "full"'
        )
    tokens = int(counts.tokens)
    if tokens == 0:
        raise RequestError("counts are of no token; add some first")
    return np.asarray(counts.chosen) / tokens, np.asarray(counts.probability, np.float64) / tokens


def co_activation(ids: Int[np.ndarray, "N A"] | Array, experts: int) -> Int[np.ndarray, "E E"]:
    """How many tokens chose both of two experts of a layer; on the diagonal, how many chose one."""
    return _joint(np.asarray(ids), np.asarray(ids), experts)


def transition(
    ids: Int[np.ndarray, "N A"] | Array, following: Int[np.ndarray, "N A2"] | Array, experts: int
) -> Int[np.ndarray, "E E"]:
    """How many tokens chose expert i in one layer and expert j in a following one: entry [i, j]."""
    ids, following = np.asarray(ids), np.asarray(following)
    if len(ids) != len(following):
        raise RequestError(
            f"layers have {len(ids)} and {len(following)} tokens; give the ids of the same tokens"
        )
    return _joint(ids, following, experts)


def lift(
    joint: Int[np.ndarray, "E E2"],
    first: Int[np.ndarray, " E"],
    second: Int[np.ndarray, " E2"],
    tokens: int,
) -> Float[np.ndarray, "E E2"]:
    """Joint counts over what they would be if both choices were independent: 1 if they are.

    Args:
        joint: from `co_activation` or `transition`.
        first: how often each expert of the rows was chosen.
        second: the same of the columns.
        tokens: N.

    Returns:
        float64; NaN where an expert was never chosen.
    """
    expected = np.outer(np.asarray(first, np.float64), second) / tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(expected > 0, joint / expected, np.nan)


def by_class(
    ids: Int[np.ndarray, "N A"] | Array, classes: Int[np.ndarray, " N"], experts: int
) -> Int[np.ndarray, "C E"]:
    """How often tokens of each class, numbered from 0, chose each expert of a layer."""
    ids, classes = np.asarray(ids), np.asarray(classes)
    if classes.shape != ids.shape[:1] or classes.min(initial=0) < 0:
        raise RequestError(
            f"classes of shape {classes.shape} from {classes.min(initial=0)} on for {len(ids)} "
            "tokens; accepted is a number from 0 on for each token"
        )
    _refuse_beyond(ids, experts)
    number = int(classes.max(initial=-1)) + 1
    cells = (classes[:, None] * (experts + 1) + ids).ravel()
    counts = np.bincount(cells, minlength=number * (experts + 1))
    return counts.reshape(number, experts + 1)[:, :experts]


def specialisation(table: Int[np.ndarray, "C E"]) -> tuple[Float[np.ndarray, " E"], float]:
    """How much the choice of an expert says of a token's class.

    Args:
        table: from `by_class`.

    Returns:
        For each expert the divergence KL(classes of its tokens || classes of all choices) in nats,
        NaN where it was never chosen; and the mutual information of expert and class in nats, which
        is their mean weighted by load: 0 if experts take all classes alike.
    """
    table = np.asarray(table, np.float64)
    total = table.sum()
    if total == 0:
        return np.full(table.shape[1], np.nan), 0.0
    overall, load = table.sum(1) / total, table.sum(0) / total
    with np.errstate(divide="ignore", invalid="ignore"):
        within = table / table.sum(0)
        terms = np.where(within == 0, 0.0, within * np.log(within / overall[:, None]))
    divergence = terms.sum(0)
    return divergence, float(np.nansum(load * divergence))


def agreement(one: RoutingTrace, other: RoutingTrace) -> Float[np.ndarray, " L"]:
    """For each layer the share of two runs' choices that tokens make in both.

    Of two models of one architecture, or of one model in two dtypes, over the same tokens. It is
    twice the choices made in both over all choices of the two, so the order of the runs does not
    matter. Where both take k experts a token, that is the share of the k in common; where one takes
    k, and the other these and more, m in all, 2 k / (k + m). 0 without any choice.

    Raises:
        RequestError: traces of other models or tokens.
    """
    refuse_other_tokens(one, other)
    kept, chosen = np.zeros(len(one.layers)), np.zeros(len(one.layers))
    for index, layer in enumerate(one.layers):
        first, second = one[layer].ids, other[layer].ids
        real = first < one.experts
        kept[index] = 2 * (real & (first[:, :, None] == second[:, None, :]).any(-1)).sum()
        chosen[index] = real.sum() + (second < other.experts).sum()
    return kept / np.maximum(chosen, 1)


def stability(shares: Float[np.ndarray, "R *L E"]) -> Float[np.ndarray, "*L"]:
    """How alike the loads of R runs are: 1 less the mean distance of two of them.

    The distance of two loads is their total variation: the share of choices that would have to move
    to make one the other.

    Raises:
        RequestError: fewer than two runs.
    """
    shares = np.asarray(shares, np.float64)
    runs = len(shares)
    if runs < 2:
        raise RequestError(f"stability is of two runs or more; got {runs}")
    first, second = np.triu_indices(runs, 1)
    return np.asarray(1 - np.abs(shares[first] - shares[second]).sum(-1).mean(0) / 2)


def drop_rates(ids: Ids, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """What a capacity left out, of a trace in which padding has no place.

    Returns:
        float64 [*L] twice: the share of slots that are empty, and that of tokens without any
        expert. Slots that a router of variable k leaves free are empty too.
    """
    empty = np.asarray(ids) >= experts
    return np.asarray(empty.mean((-2, -1))), np.asarray(empty.all(-1).mean(-1))


def _joint(first: np.ndarray, second: np.ndarray, experts: int) -> Int[np.ndarray, "E E"]:
    """Tokens that chose expert i in the first and j in the second; exact, some tokens at a time."""
    for ids in (first, second):
        _refuse_beyond(ids, experts)
    total = np.zeros((experts, experts), np.int64)
    for begin in range(0, len(first), _TOKENS):
        some = slice(begin, begin + _TOKENS)
        product = _used(first[some], experts).T @ _used(second[some], experts)
        total += product.astype(np.int64)
    return total


def _refuse_beyond(ids: np.ndarray, experts: int) -> None:
    """Raise for ids that are not of one layer of so many experts."""
    least, most = ids.min(initial=0), ids.max(initial=0)
    if ids.ndim != 2 or least < 0 or most > experts:
        raise RequestError(
            f"ids of shape {ids.shape} from {least} to {most}; accepted are those of one layer "
            f"[N, A], from 0 to {experts}: the experts, and {experts} for an empty slot"
        )


def _used(ids: np.ndarray, experts: int) -> Float[np.ndarray, "N E"]:
    """1 at the experts that a token chose."""
    used = np.zeros((len(ids), experts + 1), np.float32)
    np.put_along_axis(used, ids, 1.0, axis=1)
    return used[:, :experts]


def _one_hot_sum(ids: np.ndarray, experts: int) -> np.ndarray:
    rows = ids.reshape(-1, ids.shape[-2] * ids.shape[-1])
    counts = [np.bincount(row, minlength=experts + 1)[:experts] for row in rows]
    return np.array(counts).reshape(*ids.shape[:-2], experts)
