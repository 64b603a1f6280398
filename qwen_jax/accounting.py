"""What a model costs, from its configuration alone: parameters, bytes, operations, context.

Parameters are counted on the abstract module tree and cache bytes on the abstract cache, so these
numbers follow the code and cannot drift from it. Nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

import jax
from jaxtyping import Array

from .cache import KVBlocks, RecurrentState, init_cache
from .cache.cache import BLOCK_SIZE
from .checkpoint.mapping import EMBEDDING
from .config import QwenConfig
from .model import parameter_shapes
from .quant import Scheme
from .quant.abstract import in_codes, nbytes

FLOATS = Scheme()
EXPERTS, HEAD = ".mlp.experts.", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the parameter tree.

    Attributes:
        path: its place in the tree, which is its Hugging Face key without `model.`.
        size: number of values.
        nbytes: bytes on the device.
        active: share of it that one token uses: experts per token over experts for routed experts,
            0 for an embedding table that is only looked up, else 1.
    """

    path: str
    size: int
    nbytes: int
    active: Fraction


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameters of the text model, without multi-token prediction and vision.

    Attributes:
        total: all of them; a tied output head is counted once, as the embedding table.
        active: those that one token is multiplied with: all but the routed experts it does not
            choose and the embedding table, of which it takes one row. A table that is the output
            head too (tied) is multiplied, hence counted.
        active_with_embedding: `active`, and the whole embedding table.
    """

    total: int
    active: int
    active_with_embedding: int


@functools.lru_cache(maxsize=16)
def tensors(config: QwenConfig, scheme: Scheme = FLOATS) -> tuple[Tensor, ...]:
    """The parameter tree of a configuration, tensor by tensor, with codes as a scheme has them."""
    return tuple(_tensors(config, scheme))


def _tensors(config: QwenConfig, scheme: Scheme) -> Iterator[Tensor]:
    for path, leaf in in_codes(parameter_shapes(config), scheme).items():
        share = Fraction(1)
        if EXPERTS in path:
            share = Fraction(config.num_experts_per_tok, config.num_experts)
        elif path == EMBEDDING and not config.tie_word_embeddings:
            share = Fraction(0)
        yield Tensor(path, math.prod(leaf.shape), nbytes(leaf), share)


def count_parameters(config: QwenConfig) -> ParameterCount:
    """Total and active parameters."""
    tree = tensors(config)
    active = int(sum(tensor.size * tensor.active for tensor in tree))
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return ParameterCount(sum(tensor.size for tensor in tree), active, active + table)


def weight_bytes(config: QwenConfig, scheme: Scheme = FLOATS) -> int:
    """Bytes of all parameters on the device, in the configuration's dtype or in codes."""
    return sum(tensor.nbytes for tensor in tensors(config, scheme))


def weight_bytes_per_token(config: QwenConfig, scheme: Scheme = FLOATS) -> int:
    """Bytes of weights that one decode step at batch 1 reads, a row of the embedding included."""
    tree = tensors(config, scheme)
    row = next(t.nbytes for t in tree if t.path == EMBEDDING) // config.vocab_size
    return int(sum(tensor.nbytes * tensor.active for tensor in tree)) + row


def bytes_per_token(config: QwenConfig, context: int = 0, scheme: Scheme = FLOATS) -> int:
    """Bytes that decoding one token at batch 1 moves; see `bytes_per_step`."""
    return sum(bytes_per_step(config, 1, context, scheme).values())


def bytes_per_step(
    config: QwenConfig,
    batch_size: int,
    context: int = 0,
    scheme: Scheme = FLOATS,
    kv_cache_dtype: str | None = None,
) -> dict[str, int]:
    """Bytes that one decode step of a batch must move, by what they are.

    Weights are read once for all rows, of the experts those of `distinct_experts`; keys and values
    of each row's context are read, within a window where layers have one; recurrent state is read
    and written.

    Args:
        config: the model's.
        batch_size: rows.
        context: tokens of each row.
        scheme: which weights are in codes.
        kv_cache_dtype: see `init_cache`.
    """
    tree = tensors(config, scheme)
    experts = sum(tensor.nbytes for tensor in tree if EXPERTS in tensor.path)
    table = next(tensor.nbytes for tensor in tree if tensor.path == EMBEDDING)
    head = sum(tensor.nbytes for tensor in tree if tensor.path == HEAD) or table
    all_bytes = sum(tensor.nbytes for tensor in tree)
    other = all_bytes - experts - head - (0 if config.tie_word_embeddings else table)
    used = distinct_experts(config, batch_size) / config.num_experts if experts else 0
    seen = [
        min(context, config.sliding_window or context) if kind == "sliding_attention" else context
        for kind in config.layer_types
        if kind != "linear_attention"
    ]
    per_token = kv_bytes_per_token(config, kv_cache_dtype) / max(1, len(seen))
    return {
        "experts": round(experts * used),
        "other weights": other,
        "head": head,
        "embedding": batch_size * (table // config.vocab_size),
        "keys and values": round(batch_size * per_token * sum(seen)),
        "recurrent state": 2 * batch_size * state_bytes_per_sequence(config),
    }


def distinct_experts(config: QwenConfig, batch_size: int) -> float:
    """How many different experts of a layer a step of so many rows is expected to use.

    If all experts are equally likely, and rows choose independently: random weights are nearly so,
    trained ones use fewer.
    """
    missed = 1 - config.num_experts_per_tok / config.num_experts
    return config.num_experts * (1 - missed**batch_size)


def flops_per_token(config: QwenConfig, context: int = 0) -> int:
    """Floating-point operations of one token's forward pass, behind `context` other tokens.

    Two for each active parameter; in an attention layer 4 N H for each token attended to (scores
    and mix); in a linear attention layer 7 Dk Dv for each value head (decay the state, read it
    twice, update it).
    """
    attended = context + 1
    sliding = min(attended, config.sliding_window or attended)
    seen = {"full_attention": attended, "sliding_attention": sliding, "linear_attention": 0}
    each = 4 * config.num_attention_heads * config.head_dim
    attention = each * sum(seen[kind] for kind in config.layer_types)
    state = (
        config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    )
    linear = 7 * state * config.layer_types.count("linear_attention")
    return 2 * count_parameters(config).active + attention + linear


def layer_kinds(config: QwenConfig) -> dict[str, int]:
    """Number of layers of each kind, by mixer and feed-forward: "linear_attention + moe"."""
    feeds = ["moe" if config.is_sparse(i) else "dense" for i in range(config.num_hidden_layers)]
    kinds = zip(config.layer_types, feeds, strict=True)
    return dict(Counter(f"{mixer} + {feed}" for mixer, feed in kinds))


def kv_bytes_per_token(config: QwenConfig, kv_cache_dtype: str | None = None) -> int:
    """Bytes of keys and values that each token of context keeps, all attention layers together.

    Those of int8, with their scales, are rounded to whole bytes.
    """
    one, two = (
        _cache_parts(config, 1, blocks * BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype)["kv"]
        for blocks in (1, 2)
    )
    return (two - one) // BLOCK_SIZE


def state_bytes_per_sequence(config: QwenConfig) -> int:
    """Bytes of recurrent state of one sequence, whatever its length: delta and convolution."""
    return delta_bytes_per_sequence(config) + conv_bytes_per_sequence(config)


def delta_bytes_per_sequence(config: QwenConfig) -> int:
    """Bytes of the delta rule's state of one sequence, all linear attention layers together."""
    return _cache_parts(config, 1, 1)["delta"]


def conv_bytes_per_sequence(config: QwenConfig) -> int:
    """Bytes of the convolution's state of one sequence, all linear attention layers together."""
    return _cache_parts(config, 1, 1)["conv"]


def cache_bytes(
    config: QwenConfig, batch_size: int, max_length: int, kv_cache_dtype: str | None = None
) -> int:
    """Bytes of `init_cache` with these arguments."""
    parts = _cache_parts(config, batch_size, max_length, kv_cache_dtype=kv_cache_dtype)
    return sum(parts.values())


def largest_context(
    config: QwenConfig,
    memory: int,
    batch_size: int = 1,
    kv_cache_dtype: str | None = None,
    scheme: Scheme = FLOATS,
) -> int:
    """Most tokens, prompt and generation together, for which weights and cache fit.

    Working memory is not counted, nor is the length that the model was made for a limit here.

    Args:
        config: the model; its dtype counts.
        memory: bytes.
        batch_size: sequences of this length at a time.
        kv_cache_dtype: of the cache, as in `init_cache`.
        scheme: which weights are in codes.

    Returns:
        Tokens of each sequence; 0 if not even the weights and one block each fit.
    """
    one, two = (
        cache_bytes(config, batch_size, blocks * BLOCK_SIZE, kv_cache_dtype) for blocks in (1, 2)
    )
    smallest = weight_bytes(config, scheme) + one
    if memory < smallest:
        return 0
    # The cache grows by the same amount with each block of every sequence.
    return (1 + (memory - smallest) // (two - one)) * BLOCK_SIZE


def _cache_parts(
    config: QwenConfig, batch_size: int, max_length: int, kv_cache_dtype: str | None = None
) -> dict[str, int]:
    """Bytes of a cache by what they hold."""

    def parts() -> dict[str, list[Array]]:
        cache = init_cache(config, batch_size, max_length, kv_cache_dtype=kv_cache_dtype)
        blocks = [layer for layer in cache.layers if isinstance(layer, KVBlocks)]
        states = [layer for layer in cache.layers if isinstance(layer, RecurrentState)]
        return {
            "kv": jax.tree.leaves(blocks),
            "delta": [state.delta for state in states],
            "conv": [state.conv for state in states],
            "table": jax.tree.leaves(cache.blocks),
        }

    abstract = jax.eval_shape(parts)
    return {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        for name, leaves in abstract.items()
    }
