"""The definition in plain jax.numpy.

Cost follows the chosen experts, never the number of experts: few tokens gather the weights of their
own experts, many tokens are sorted by expert and worked through in tiles that each belong to one
expert. `jax.lax.ragged_dot` would say the same in one line, but on NVIDIA GPUs it becomes a dense
product over all experts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._compat import Target
from ..dequant_matmul.qtensor import QTensor
from .shared import SharedExpert

GATHER_TOKENS = 64
GATHER_SLOTS_AT_ONCE = 64
LARGEST_TILE = 256
SMALLEST_TILE = 16


def expert_dispatch(
    x: Float[Array, "M D"],
    ids: Int[Array, "M A"],
    weights: Float[Array, "M A"],
    gate_up_proj: Float[Array, "E F2 D"] | QTensor,
    down_proj: Float[Array, "E D F"] | QTensor,
    shared: SharedExpert | None = None,
    residual: Float[Array, "M D"] | None = None,
    *,
    inner_dtype: Any,
    dtype: Any,
) -> Float[Array, "M D"]:
    """See `api.expert_dispatch`."""
    x = x.astype(inner_dtype)
    few = x.shape[0] <= GATHER_TOKENS
    dispatch = _gather_experts if few else _sort_by_expert
    y = dispatch(x, ids, weights, gate_up_proj, down_proj)
    if shared is not None:
        y = y + _shared_expert(x, shared)
    if residual is not None:
        y = residual.astype(y.dtype) + y
    return y.astype(dtype)


def refusals(
    target: Target,
    x: Any,
    ids: Any,
    weights: Any,
    gate_up_proj: Any,
    down_proj: Any,
    shared: SharedExpert | None = None,
    residual: Any = None,
    *,
    inner_dtype: Any,
    dtype: Any,
) -> list[str]:
    """What gives a call no meaning; see `dispatch.Implementation`."""
    rows, width = gate_up_proj.shape[1], down_proj.shape[2]
    reasons = [
        f"{name}: {reason}"
        for name, weight in (("gate_up_proj", gate_up_proj), ("down_proj", down_proj))
        if isinstance(weight, QTensor)
        for reason in weight.contradictions()
    ]
    if rows != 2 * width:
        reasons.append(
            f"gate_up_proj has {rows} rows an expert; down_proj takes {width}, which needs "
            f"{2 * width}"
        )
    if shared is not None:
        reasons += shared.contradictions(*x.shape)
    for name, kind in (("inner_dtype", inner_dtype), ("dtype", dtype)):
        if not jnp.issubdtype(kind, jnp.floating):
            reasons.append(f"{name} is {kind}; accepted is floating point")
    return reasons


def _gather_experts(x, ids, weights, gate_up_proj, down_proj) -> Float[Array, "M D"]:
    """Each slot reads its own copy of its expert's weights, a bounded number of slots at a time."""
    experts = gate_up_proj.shape[0]

    def token(args: tuple[Array, Array, Array]) -> Float[Array, " D"]:
        x, ids, weights = args
        used = (ids >= 0) & (ids < experts)
        chosen = jnp.where(used, ids, 0)
        gate_up = jnp.einsum("d,afd->af", x, _some(gate_up_proj, chosen, x))
        down = jnp.einsum(
            "af,adf->ad",
            _gated(gate_up),
            _some(down_proj, chosen, x),
            preferred_element_type=jnp.float32,
        )
        return jnp.sum(jnp.where(used[:, None], down * weights[:, None], 0.0), axis=0)

    at_once = max(1, GATHER_SLOTS_AT_ONCE // ids.shape[1])
    if x.shape[0] <= at_once:
        return jax.vmap(lambda *args: token(args))(x, ids, weights)
    return jax.lax.map(token, (x, ids, weights), batch_size=at_once)


def _sort_by_expert(x, ids, weights, gate_up_proj, down_proj) -> Float[Array, "M D"]:
    """Slots sorted by expert and cut in tiles of one expert each; memory follows tokens x width."""
    tokens, slots_per_token = ids.shape
    experts = gate_up_proj.shape[0]
    slots = tokens * slots_per_token
    tile = _tile_rows(slots, experts)
    filled = (ids >= 0) & (ids < experts)
    flat = jnp.where(filled, ids, experts).reshape(slots)
    order = jnp.argsort(flat)
    counts = jnp.zeros((experts,), jnp.int32).at[flat].add(1, mode="drop")
    first_slot = jnp.cumsum(counts) - counts
    tiles_of = (counts + tile - 1) // tile
    last_tile = jnp.cumsum(tiles_of)
    tiles = slots // tile + min(experts, slots)
    number = jnp.arange(tiles, dtype=jnp.int32)
    expert = jnp.searchsorted(last_tile, number, side="right").astype(jnp.int32)
    spare = expert >= experts
    expert = jnp.minimum(expert, experts - 1)
    row = (number - (last_tile - tiles_of)[expert]) * tile
    row = row[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    used = (row < counts[expert][:, None]) & ~spare[:, None]
    slot = order.at[first_slot[expert][:, None] + row].get(mode="clip")
    strength = jnp.where(used, weights.reshape(slots)[slot], 0.0)
    token = jnp.where(used, slot // slots_per_token, tokens)

    def work(total: Array, inputs: tuple[Array, Array, Array]) -> tuple[Array, None]:
        expert, token, strength = inputs
        rows = x.at[token].get(mode="fill", fill_value=0)
        gate_up = jnp.einsum("md,fd->mf", rows, _some(gate_up_proj, expert, x))
        down = jnp.einsum(
            "mf,df->md",
            _gated(gate_up),
            _some(down_proj, expert, x),
            preferred_element_type=jnp.float32,
        )
        return total.at[token].add(down * strength[:, None], mode="drop"), None

    # Not jnp.zeros: XLA makes one constant of all layers' zeros and copies it for each of them
    # at the program's start, so that every layer's copy is alive at once. And not x * 0, since a
    # token of padding may be NaN.
    zeros = jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32) * 0.0
    total, _ = jax.lax.scan(work, zeros, (expert, token, strength))
    return total


def _shared_expert(x: Float[Array, "M D"], shared: SharedExpert) -> Float[Array, "M D"]:
    """Its output times its strength, in float32."""
    gate, up = (
        _product(x, weight).astype(x.dtype) for weight in (shared.gate_proj, shared.up_proj)
    )
    strength = jax.nn.sigmoid(shared.logits(_product(x, shared.gate)))
    y = _product(jax.nn.silu(gate) * up, shared.down_proj)
    return jnp.broadcast_to(strength, y.shape) * y


def _product(x: Float[Array, "M I"], weight: Float[Array, "O I"] | QTensor) -> Float[Array, "M O"]:
    """Rows times a matrix, in float32."""
    matrix = weight.dequantise(x.dtype) if isinstance(weight, QTensor) else weight.astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(
        "mi,oi->mo", x, matrix, precision=precision, preferred_element_type=jnp.float32
    )


def _some(
    weight: Float[Array, "E O I"] | QTensor, index: Int[Array, "..."], x: Float[Array, "..."]
) -> Float[Array, "... O I"]:
    """The matrices of some experts; codes of those alone become numbers, of x's dtype."""
    chosen = weight[index]
    return chosen.dequantise(x.dtype) if isinstance(chosen, QTensor) else chosen.astype(x.dtype)


def _gated(gate_up: Float[Array, "... F2"]) -> Float[Array, "... F"]:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _tile_rows(slots: int, experts: int) -> int:
    """Rows of a tile: about the mean load of an expert, as a power of two."""
    rows = SMALLEST_TILE
    while rows < LARGEST_TILE and rows * experts < slots:
        rows *= 2
    return rows
