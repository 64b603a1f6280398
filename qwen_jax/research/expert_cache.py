"""Recently used experts: how warm they are, a bias towards them, and what a cache would save.

Few of an offloaded model's experts are in fast memory. `ExpertHeat` counts how often each expert
was used in the last tokens of each sequence; `HeatBias` adds to router logits in proportion, within
a sequence and across those of a batch; `measure` says what that costs in loss and brings in hits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..cache import Cache, init_cache
from ..decode import DecodeState, StepOutput, decode_step
from ..decode.prompt import check_ids
from ..errors import RequestError
from ..model import Capture, CausalLM, FlatModel, Intervention, check_model, whole
from ..model.intervention import Ranged, sparse_layers
from ..pytree import pytree
from ..whole_number import check_whole
from .cached_experts import distinct_experts, lru_hits
from .interventions import END, Model, add_bias, neutral

__all__ = ["ExpertHeat", "HeatBias", "HeatReport", "measure"]


@pytree
class ExpertHeat:
    """How often each expert was used in the last N tokens of each sequence; an `Observer`.

    Attributes:
        counts: int32 [B, L, E], L being the MoE layers.
        ring: int32 [N, B, L, A], the experts of those tokens; E where there is none.
        seen: int32 [B], tokens of each sequence so far.
        capture: static.
    """

    counts: Array
    ring: Array
    seen: Array
    capture: Capture = dataclasses.field(default="ids", metadata={"static": True})

    @classmethod
    def empty(cls, model: Model, batch: int, window: int, slots: int | None = None) -> ExpertHeat:
        """Nothing seen yet.

        Args:
            model: a model or its configuration.
            batch: B.
            window: N, from 1 on.
            slots: A, the most experts a token; the model's number if None.

        Raises:
            RequestError: a window below 1, or a model without MoE layers.
        """
        config = model.config if isinstance(model, CausalLM) else model
        check_whole("window", window, 1)
        layers, experts = len(sparse_layers(config)), config.num_experts
        slots = config.num_experts_per_tok if slots is None else slots
        return cls(
            jnp.zeros((batch, layers, experts), jnp.int32),
            jnp.full((window, batch, layers, slots), experts, jnp.int32),
            jnp.zeros((batch,), jnp.int32),
        )

    @property
    def share(self) -> Float[Array, "B L E"]:
        """Share of the window's tokens that used each expert, from 0 to 1."""
        tokens = jnp.clip(self.seen, 1, self.ring.shape[0]).astype(jnp.float32)
        return self.counts.astype(jnp.float32) / tokens[:, None, None]

    def observe(self, output: StepOutput, taken: Bool[Array, " B"]) -> ExpertHeat:
        """With the tokens of a step or of a chunk of a prompt."""
        ids = jnp.stack([output.routing[i].ids for i in sorted(output.routing)], axis=2)
        experts, slots = self.counts.shape[-1], self.ring.shape[-1]
        if ids.shape[-1] > slots:
            raise RequestError(
                f"tokens have {ids.shape[-1]} slots; this heat is for {slots}: make it with slots="
            )
        empty = [(0, 0)] * 3 + [(0, slots - ids.shape[-1])]
        ids = jnp.pad(ids, empty, constant_values=experts)
        ids = jnp.where(taken[:, None, None, None], ids, experts)

        def one(heat: ExpertHeat, ids: Int[Array, "B L A"]) -> tuple[ExpertHeat, None]:
            return heat._with(ids), None

        return jax.lax.scan(one, self, jnp.moveaxis(ids, 1, 0))[0]

    def _with(self, ids: Int[Array, "B L A"]) -> ExpertHeat:
        """With one more token of those sequences that have any expert."""
        batch, layers, experts = self.counts.shape
        row, layer = (jnp.arange(n, dtype=jnp.int32) for n in (batch, layers))
        takes = jnp.any(ids < experts, axis=(1, 2))
        place = self.seen % self.ring.shape[0]
        old = self.ring[place, row]
        leaving = jnp.where(takes[:, None, None], old, experts)
        at = row[:, None, None], layer[None, :, None]
        counts = self.counts.at[*at, leaving].add(-1, mode="drop").at[*at, ids].add(1, mode="drop")
        ring = self.ring.at[place, row].set(jnp.where(takes[:, None, None], ids, old))
        seen = self.seen + takes.astype(jnp.int32)
        return dataclasses.replace(self, counts=counts, ring=ring, seen=seen)


@pytree
class HeatBias:
    """A bias towards warm experts, for loops whose observer is an `ExpertHeat`; a `Steering`.

    Attributes:
        base: what else to change, for all sequences alike or for each; it has no bias itself.
        within: float32 [], added to the logit of an expert that all tokens of the window used; in
            proportion for others.
        across: float32 [], the same of the mean over the sequences of the batch.
    """

    base: Intervention
    within: Array
    across: Array

    @classmethod
    def of(
        cls, model: Model, within: float, across: float = 0.0, base: Intervention | None = None
    ) -> HeatBias:
        """With both strengths 0, nothing changes but what `base` changes, bit by bit.

        Raises:
            RequestError: strengths that are not finite, a bias in `base`, or a model without MoE
                layers.
        """
        if not np.isfinite([within, across]).all():
            raise RequestError(f"strengths are {within} and {across}; accepted are finite numbers")
        base = neutral(model) if base is None else base
        if np.asarray(base.bias.values).any():
            raise RequestError("base has a bias itself; a HeatBias takes its place: leave it out")
        return cls(base, jnp.float32(within), jnp.float32(across))

    def in_state(self, state: DecodeState) -> Intervention:
        """Raises RequestError if the state has no `ExpertHeat` as its observer."""
        if not isinstance(state.observer, ExpertHeat):
            raise RequestError(
                f"the state's observer is a {type(state.observer).__name__}; a HeatBias needs an "
                "ExpertHeat: give init_state observer=ExpertHeat.empty(...)"
            )
        return self.at(state.observer)

    def at(self, heat: ExpertHeat) -> Intervention:
        """The intervention for the token after those that the heat has seen."""
        own = jnp.moveaxis(heat.share, 0, 1)
        mean = jnp.broadcast_to(jnp.mean(own, axis=1, keepdims=True), own.shape)
        every = jnp.zeros(own.shape, jnp.int32)
        bias = Ranged(self.within * own + self.across * mean, every, every + END)
        return dataclasses.replace(self.base, bias=bias)


@dataclasses.dataclass(frozen=True)
class HeatReport:
    """What a bias did to a text.

    Attributes:
        loss: mean negative log-likelihood of a token, nats.
        distinct: mean number of experts that so many tokens of a sequence use in a layer.
        hit_rate: share of uses whose expert was resident, over all layers; per layer one cache for
            all sequences, which turns out what was used longest ago.
        hit_rates: the same by layer number.
        heat: after the text, to start the next request with.
    """

    loss: float
    distinct: float
    hit_rate: float
    hit_rates: dict[int, float]
    heat: ExpertHeat


def measure(
    model: CausalLM,
    tokens: Int[np.ndarray, "B T"],
    *,
    within: float = 0.0,
    across: float = 0.0,
    window: int = 32,
    resident: int,
    heat: ExpertHeat | None = None,
) -> HeatReport:
    """Read a text token by token under a bias towards warm experts. Compiled once a shape.

    Args:
        model: of any routers that read an intervention's bias.
        tokens: ids; at least two of each sequence.
        within: strength of the bias from the sequence's own heat; 0 is the model as it is.
        across: strength of the bias from all sequences' heat.
        window: tokens that the heat covers, and over which distinct experts are counted.
        resident: experts of a layer that fast memory holds.
        heat: of requests before; none if None. Its window counts.

    Raises:
        RequestError: fewer than two tokens, an id outside the vocabulary, strengths that are not
            finite, resident experts or a window below 1, a model without MoE layers, or a bias
            where a router does not read it.
    """
    check_model(model)
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 2:
        raise RequestError(f"tokens have shape {tokens.shape}; accepted is [B, T] with T from 2 on")
    for row, sequence in enumerate(tokens.tolist()):
        check_ids(sequence, model.config.vocab_size, row)
    check_whole("resident", resident, 1)
    heat = ExpertHeat.empty(model, len(tokens), window) if heat is None else heat
    bias = HeatBias.of(model, within, across)
    model.check_intervention(bias.at(heat), len(tokens))
    if within or across:
        # Before the first token the bias is 0 everywhere, which every router takes.
        some = add_bias(model, dict.fromkeys(range(model.config.num_experts), 1.0))
        model.check_intervention(some, len(tokens))
    cache = init_cache(model.config, *tokens.shape)
    found = _read(FlatModel.of(model), cache, jnp.asarray(tokens, jnp.int32), bias, heat)
    losses, ids = (np.asarray(each) for each in found[:2])
    layers = sparse_layers(model.config)
    experts = model.config.num_experts
    hits = {layer: lru_hits(ids[:, i], experts, resident) for i, layer in enumerate(layers)}
    return HeatReport(
        loss=float(losses.astype(np.float64).mean()),
        distinct=distinct_experts(ids, experts, window),
        hit_rate=float(np.mean(list(hits.values()))),
        hit_rates=hits,
        heat=found[2],
    )


@jax.jit
def _read(
    model: FlatModel,
    cache: Cache,
    tokens: Int[Array, "B T"],
    bias: HeatBias,
    heat: ExpertHeat,
) -> tuple[Array, Array, ExpertHeat]:
    """Losses [T - 1, B], ids [T - 1, L, B, A] of each token but the last, and the heat behind."""

    def step(
        carry: tuple[Cache, ExpertHeat], at: tuple[Array, Array]
    ) -> tuple[tuple[Cache, ExpertHeat], tuple[Array, Array]]:
        (cache, heat), (token, following) = carry, at
        intervention = bias.at(heat)
        output, cache = decode_step(
            whole(model), cache, token, capture=heat.capture, intervention=intervention
        )
        heat = heat.observe(output, jnp.ones(token.shape, jnp.bool_))
        logprobs = jax.nn.log_softmax(output.logits, axis=-1)
        loss = -jnp.take_along_axis(logprobs, following[:, None], axis=-1)[:, 0]
        ids = jnp.stack([output.routing[i].ids[:, 0] for i in sorted(output.routing)])
        return (cache, heat), (loss, ids)

    given = tokens[:, :-1].T, tokens[:, 1:].T
    (_, heat), (losses, ids) = jax.lax.scan(step, (cache, heat), given)
    return losses, ids, heat
