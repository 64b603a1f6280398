"""The decoder layer, and the whole model around it."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ..cache import LayerCache
from ..config import QwenConfig
from ..errors import RequestError
from ..pytree import pytree
from ..quant import QTensor
from .attention import Attention
from .chunk import Chunk
from .delta_net import GatedDeltaNet
from .inputs import check_lengths, check_tokens
from .intervention import Intervention
from .layers import MLP, Embedding, Linear, RMSNorm, project
from .moe import SparseMoE
from .rope import rotary
from .routing import Capture, Routing


class DecoderLayer(nnx.Module):
    """Normalise, mix, add; normalise, feed, add. The configuration says which mixer and feed.

    The residual stream is float32 whatever the model's dtype: rounding it costs a bf16 model most
    of its accuracy, since near-ties of the router then fall the other way, and keeping it costs
    next to nothing.
    """

    def __init__(self, config: QwenConfig, layer: int):
        norm: dict[str, Any] = {
            "eps": config.rms_norm_eps,
            "zero_centred": config.zero_centred_norm,
            "implementation": config.implementation,
        }
        width, dtype = config.hidden_size, config.dtype
        self.input_layernorm = RMSNorm(width, dtype, result=dtype, **norm)
        # The router reads float32.
        result = "float32" if config.is_sparse(layer) else dtype
        self.post_attention_layernorm = RMSNorm(width, dtype, result=result, **norm)
        if config.layer_types[layer] == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config, layer)
        if config.is_sparse(layer):
            self.mlp = SparseMoE(config, layer)
        else:
            hidden = config.width("intermediate_size", layer)
            self.mlp = MLP(width, hidden, dtype, implementation=config.implementation)

    def __call__(
        self, x: Float[Array, "B T D"], cache: LayerCache | None, chunk: Chunk
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, Routing | None]:
        """The layer's output, its cache with the new tokens, its routing (None if dense)."""
        mixed, cache = self.mix(self.input_layernorm(x), cache, chunk)
        x, normal = self.post_attention_layernorm.after_adding(x, mixed)
        x, routing = self.feed(x, normal, mixed, chunk)
        return x, cache, routing

    def mix(self, x: Array, cache: Any, chunk: Chunk) -> tuple[Array, Any]:
        """The mixer: full attention or the gated delta net."""
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        return mixer(x, cache, chunk)

    def feed(
        self, x: Array, normal: Array, mixed: Array, chunk: Chunk
    ) -> tuple[Array, Routing | None]:
        """Feed forward what is normal, dense or sparse, and add."""
        if isinstance(self.mlp, SparseMoE):
            return self.mlp(normal, chunk.router_context(mixed), x)
        return x + self.mlp(normal).astype(x.dtype), None


@pytree
class ModelOutput:
    """What `model(tokens)` returns.

    Attributes:
        logits: float32 [B, T, V].
        routing: layer number -> Routing, for the MoE layers alone; empty with capture "none".
        hidden_states: embedding, output of each layer but the last, and the final norm's output,
            each float32 [B, T, D] (transformers' order); None unless asked for.
    """

    logits: Array
    routing: dict[int, Routing]
    hidden_states: tuple[Array, ...] | None = None


class CausalLM(nnx.Module):
    """The text model: embedding, decoder layers, final norm, head.

    A new instance holds shapes only; see `initialise` and `qwen_jax.load`. The tree is Hugging
    Face's without the leading `model.`: `model.layers[3].self_attn.q_proj.weight`.
    """

    def __init__(self, config: QwenConfig):
        self.config = config
        width = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, width, config.dtype)
        self.layers = nnx.List([DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(
            width,
            config.dtype,
            eps=config.rms_norm_eps,
            zero_centred=config.zero_centred_norm,
            implementation=config.implementation,
        )
        tied, run = config.tie_word_embeddings, config.implementation
        head = (width, config.vocab_size, config.dtype)
        self.lm_head = None if tied else Linear(*head, implementation=run)

    def __call__(
        self,
        tokens: Int[Array, "B T"] | np.ndarray,
        lengths: Int[Array, " B"] | np.ndarray | None = None,
        *,
        capture: Capture = "full",
        output_hidden_states: bool = False,
        intervention: Intervention | None = None,
    ) -> ModelOutput:
        """Logits of every position, without a cache. Compiled once a shape.

        Args:
            tokens: int32 ids.
            lengths: real tokens of each row, padding on the right; all of them if None.
            capture: how much of the routing to return.
            output_hidden_states: return the hidden states too.
            intervention: what to change in the routing; see `qwen_jax.research.interventions`.

        Raises:
            RequestError: an id outside the vocabulary, no token, lengths outside 0 to T, a wrong
                shape or dtype, or an intervention that is not for this model or its routers.
        """
        tokens = check_tokens(tokens, self.config.vocab_size)
        lengths = check_lengths(lengths, tokens.shape)
        if intervention is not None:
            self.check_intervention(intervention, tokens.shape[0])
        return _forward(self, tokens, lengths, capture, output_hidden_states, intervention)

    def forward(
        self,
        tokens: Int[Array, "B T"],
        caches: tuple[LayerCache, ...] | None,
        start: Int[Array, " B"],
        lengths: Int[Array, " B"],
        block_table: Int[Array, "B W"] | None = None,
        intervention: Intervention | None = None,
    ) -> "ForwardOutput":
        """Run the layers over new tokens; the states of all layers go in and come out."""
        if intervention is not None:
            self.check_intervention(intervention, tokens.shape[0])
        offset = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
        positions = jnp.where(offset < lengths[:, None], start[:, None] + offset, -1)
        tokens = jnp.where(positions >= 0, tokens, 0)
        tables = rotary(self.config, positions)
        change = None if intervention is None else intervention.over(positions)
        chunk = Chunk(start, lengths, positions, tables, block_table, tokens, change)
        x = self.embed_tokens(tokens)
        inputs, updated, routing = [], [], {}
        for i, layer in enumerate(self.layers):
            inputs.append(x)
            chunk = dataclasses.replace(chunk, layer=i)
            x, cache, choice = layer(x, None if caches is None else caches[i], chunk)
            updated.append(cache)
            if choice is not None:
                routing[i] = choice
        updated = None if caches is None else tuple(updated)
        return ForwardOutput(tuple(inputs), x, self.norm, updated, routing)

    def check_intervention(self, intervention: Intervention, rows: int) -> None:
        """Refuse an intervention that is not for this model, its routers and so many rows.

        Raises:
            RequestError: says what does not fit.
        """
        if not isinstance(intervention, Intervention):
            raise RequestError(
                f"the intervention is of type {type(intervention).__name__}; accepted is what "
                "qwen_jax.research.interventions makes; several go through combine, or "
                "per_sequence for one each"
            )
        routers = self.routers()
        intervention.check_fits(self.config, routers, rows)
        intervention.check_routers(self.config, routers)

    def routers(self) -> dict[int, Any]:
        """Of the MoE layers, by number."""
        mlps = {i: layer.mlp for i, layer in enumerate(self.layers)}
        return {i: mlp.gate for i, mlp in mlps.items() if isinstance(mlp, SparseMoE)}

    def next_logits(self, residual: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Final norm and head, on the residual stream behind the last layer; float32.

        Equal to `logits(norm(residual))`, but the norm itself rounds to what the product reads.
        """
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        weight = head.weight[...]
        scaled = isinstance(weight, QTensor) and weight.input_scale is not None
        dtype = "float32" if scaled else self.config.dtype
        return self.logits(self.norm(residual, dtype))

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The head on final hidden states; float32."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return project(
            hidden,
            head.weight[...],
            dtype=self.config.dtype,
            result="float32",
            implementation=self.config.implementation,
        )


def check_model(model: object) -> None:
    """Raise `RequestError` for what is no model, such as the path of one."""
    if not isinstance(model, CausalLM):
        raise RequestError(
            f"the model is of type {type(model).__name__}; accepted is what qwen_jax.load returns: "
            "model, tokenizer = qwen_jax.load(path)"
        )


@dataclasses.dataclass(frozen=True)
class ForwardOutput:
    """Result of `CausalLM.forward`; unused parts cost nothing under jit.

    Attributes:
        layer_inputs: float32 [B, T, D], what each layer read.
        residual: float32 [B, T, D], what the last layer gave, in front of the final norm.
        norm: the final norm.
        caches: of each layer, with the new tokens; None without caches.
        routing: see `ModelOutput`.
    """

    layer_inputs: tuple[Array, ...]
    residual: Array
    norm: RMSNorm
    caches: tuple[LayerCache, ...] | None
    routing: dict[int, Routing]

    @property
    def hidden_states(self) -> tuple[Array, ...]:
        """See `ModelOutput`; the final norm runs at each look."""
        return (*self.layer_inputs, self.norm(self.residual))

    def captured(self, capture: Capture) -> dict[int, Routing]:
        """The routing, as much of it as asked for."""
        if capture not in get_args(Capture):
            raise RequestError(f"capture is {capture!r}; accepted are {get_args(Capture)}")
        if capture == "none":
            return {}
        return {layer: choice.captured(capture) for layer, choice in self.routing.items()}


@jax.jit(static_argnames=("capture", "output_hidden_states"))
def _forward(
    model: CausalLM,
    tokens: Array,
    lengths: Array,
    capture: Capture,
    output_hidden_states: bool,
    intervention: Intervention | None,
) -> ModelOutput:
    start = jnp.zeros_like(lengths)
    output = model.forward(tokens, None, start, lengths, intervention=intervention)
    states = output.hidden_states
    return ModelOutput(
        model.logits(states[-1]),
        output.captured(capture),
        states if output_hidden_states else None,
    )
