"""AdamW behind clipping of the gradient.

Kingma and Ba (arXiv 1412.6980); Loshchilov and Hutter (arXiv 1711.05101).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from ..errors import RequestError
from .parameters import Parameters

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class AdamW:
    """How parameters follow their gradients, but for the rate (see `Schedule`).

    Attributes:
        decay: weight decay of matrices; norms, biases, decays and the taps of the convolution have
            none.
        clip: largest norm of all gradients together; longer ones are shortened to it.
        momentum: of the mean of gradients.
        spread: of the mean of their squares.

    Raises:
        RequestError: a number outside its range.
    """

    decay: float = 0.1
    clip: float = 1.0
    momentum: float = 0.9
    spread: float = 0.95

    def __post_init__(self) -> None:
        accepted = {
            "decay": (0 <= self.decay < math.inf, "a number from 0 on"),
            "clip": (self.clip > 0, "a number above 0"),
            "momentum": (0 <= self.momentum < 1, "0 up to, but not, 1"),
            "spread": (0 <= self.spread < 1, "0 up to, but not, 1"),
        }
        for name, (fine, what) in accepted.items():
            if not fine:
                raise RequestError(f"{name} is {getattr(self, name)}; accepted is {what}")

    def direction(self) -> optax.GradientTransformation:
        """Gradients to what is added to the parameters at a rate of -1, over flat dicts.

        Raises:
            RequestError: optax is not installed.
        """
        try:
            import optax
        except ImportError:
            raise RequestError("training needs optax: install qwen-jax[train]") from None
        chain = optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.scale_by_adam(b1=self.momentum, b2=self.spread),
            optax.add_decayed_weights(self.decay, mask=_matrices),
        )
        return optax.GradientTransformation(chain.init, _lenient(chain.update))


def _matrices(parameters: Parameters) -> dict[str, bool]:
    return {
        name: value.ndim >= 2 and not name.endswith("conv1d.weight")
        for name, value in parameters.items()
    }


def _lenient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Optax counts on JAX's ordinary promotion of numbers, which may be switched off around it."""

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return function(*args, **named)

    return run
