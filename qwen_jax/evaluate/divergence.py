"""How far one model's predictions are from another's: KL divergence and what goes with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .perplexity import Perplexity, nll, standard_error
from .scores import Scores


@dataclasses.dataclass(frozen=True)
class Divergence:
    """KL(base || other) over the scored tokens, in nats, and agreement.

    Attributes:
        tokens: scored tokens.
        mean_kl: mean over them.
        standard_error: of `mean_kl`, as if tokens were independent.
        median_kl: half of the tokens have no more.
        p99_kl: 99 % of the tokens have no more.
        max_kl: the largest.
        top1_agreement: share of the tokens where both models have the same most likely token.
        base: perplexity of the base.
        other: perplexity of the other.
    """

    tokens: int
    mean_kl: float
    standard_error: float
    median_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    base: Perplexity
    other: Perplexity

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the other by that of the base."""
        return math.exp(min(self.other.mean_nll - self.base.mean_nll, 709.0))


def divergence(base: Iterable[Scores], other: Iterable[Scores]) -> Divergence:
    """Compare what two models say of the same windows.

    Args:
        base: from `score`, or stored log-probabilities.
        other: from `score`, with the same windows and batch size.

    Raises:
        FloatingPointError: NaN or infinite logits; names the model and the window.
        ValueError: the two are not of the same windows and batch size.
    """
    kl, same, base_nll, other_nll = [], [], [], []
    for one, two in zip(base, other, strict=True):
        if not np.array_equal(one.numbers, two.numbers):
            raise ValueError("base and other score different windows; use one Windows for both")
        base_nll.append(nll(one, "base"))
        other_nll.append(nll(two, "other"))
        far, agree = _compare(one.log_probabilities, two.log_probabilities)
        kl.append(one.finite(far, "KL(base || other)"))
        same.append(np.asarray(agree)[: len(one.targets)])
    kl = np.concatenate(kl)
    median, p99 = np.quantile(kl, [0.5, 0.99])
    return Divergence(
        tokens=len(kl),
        mean_kl=float(kl.mean()),
        standard_error=standard_error(kl),
        median_kl=float(median),
        p99_kl=float(p99),
        max_kl=float(kl.max()),
        top1_agreement=float(np.concatenate(same).mean()),
        base=Perplexity.of(np.concatenate(base_nll)),
        other=Perplexity.of(np.concatenate(other_nll)),
    )


@jax.jit
def _compare(
    base: Float[Array, "R V"], other: Float[Array, "R V"]
) -> tuple[Float[Array, " R"], Bool[Array, " R"]]:
    """KL(base || other) of each row, and whether both have their largest value at one place."""
    same = jnp.argmax(base, axis=-1) == jnp.argmax(other, axis=-1)
    return jnp.sum(kl_terms(base, other), axis=-1), same


def kl_terms(base: Float[Array, "... V"], other: Float[Array, "... V"]) -> Float[Array, "... V"]:
    """Terms p log(p / q) - p + q, whose sum over the vocabulary is KL(p || q).

    Both sum to 1, so that -p + q adds nothing; but with it no term is negative, and the rounding of
    the two normalisers, some 1e-6 each, enters squared. Without it that would be the smallest KL to
    be told from 0.

    Args:
        base: log p, float32.
        other: log q, float32.
    """
    p, q, distance = jnp.exp(base), jnp.exp(other), base - other
    # For close values the difference of p and q cancels, and p (e^-d - 1) does not.
    close = jnp.abs(distance) < 1
    near = p * (distance + jnp.expm1(jnp.where(close, -distance, 0.0)))
    return jnp.where(close, near, p * distance - p + q)
