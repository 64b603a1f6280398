"""A decoder layer put in codes. One layer is in memory.

A caller does, for each layer in turn:

    solved = quantise_layer(layer, config, hidden, rules)
    ... write what is in `solved` ...
    hidden = advance(layer, config, hidden)

`layer` then stands for the layer in codes, and `hidden` may be saved, so that a later run goes on
from there.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from qwen_jax.config import QwenConfig
from qwen_jax.errors import RequestError
from qwen_jax.model.decoder import DecoderLayer
from qwen_jax.model.moe import Experts
from qwen_jax.quant import Rule, WeightFormat

from .calibrate import (
    ExpertInputs,
    at,
    expert_inputs,
    hessian_of_inputs,
    hessian_of_rows,
    rows_between,
    rows_of_experts,
    stages,
)
from .methods import Solution, Solved, finished, measured, solve
from .methods.activation_aware import Ties
from .quantization.folding import Fold

# Bytes of the largest array of a chunk of experts; about ten such arrays are alive at a time.
CHUNK_BYTES = 1 << 30
LEAST_ROWS = 2048


def quantise_layer(
    layer: DecoderLayer,
    config: QwenConfig,
    hidden: Float[np.ndarray, "N T D"],
    rules: Mapping[str, Rule],
    *,
    windows_at_once: int = 8,
    rows_of_each: int | None = None,
    given: Mapping[str, Solved] | None = None,
    folds: Mapping[str, Fold] | None = None,
) -> dict[str, Solved]:
    """Put the matrices of a layer in codes, in the order in which data flows through them.

    Each one's inputs come from the matrices before it in codes, in this layer and in those before.

    Args:
        layer: with all its weights. Float32 is best: what codes stand for is exact in it. The
            matrices are replaced by the numbers that their codes stand for.
        config: of the model, with the layer's dtype.
        hidden: the residual stream in front of the layer.
        rules: of the tensors that become codes, by tree path within the layer:
            "linear_attn.in_proj_qkv.weight", "mlp.experts.gate_up_proj".
        windows_at_once: windows in one forward pass; bounds device memory.
        rows_of_each: rows that each expert is calibrated with; at most all tokens. If None, twice
            as many as the router sends to an expert on average, and at least 2048.
        given: codes of all these tensors that are to be used, and reported on anew.
        folds: the matrices whose factors of inputs are made such that `fold_solved` can fold them.

    Returns:
        Codes and reports by the same paths.

    Raises:
        RequestError: a rule for a tensor that the layer does not have.
    """
    solved: dict[str, Solved] = {}
    ties = {
        path: fold.ties(at(layer, path).shape[-1], config) for path, fold in (folds or {}).items()
    }
    tokens = hidden.shape[0] * hidden.shape[1]
    for paths in stages(layer, config):
        new: dict[str, Solved] = {}
        linears = [p for p in paths if f"{p}.weight" in rules]
        if linears:
            hessian = hessian_of_inputs(
                layer, config, hidden, linears[0], windows_at_once=windows_at_once
            )
            for name in (f"{path}.weight" for path in linears):
                codes = None if given is None else given[name]
                weight, tied = at(layer, name)[...], ties.get(name)
                new[name] = _matrix(weight, hessian, rules[name], tokens, codes, tied)
        for path in paths:
            chosen = {k: rules.get(f"{path}.{k}") for k in ("gate_up_proj", "down_proj")}
            if isinstance(module := at(layer, path), Experts) and any(chosen.values()):
                data = expert_inputs(layer, config, hidden, path, windows_at_once=windows_at_once)
                rows = rows_of_each or _rows_of_each(config, tokens)
                codes = {k: None if given is None else given.get(f"{path}.{k}") for k in chosen}
                tied = ties.get(f"{path}.down_proj")
                found = _experts(module, data, chosen, min(rows, tokens), codes, tied)
                new |= {f"{path}.{key}": value for key, value in found.items()}
        for name, value in new.items():
            _replace(layer, name, value, rules[name])
        solved |= new
    if missing := sorted(rules.keys() - solved.keys()):
        raise RequestError(
            f"{', '.join(missing)}: no linear and no experts of this layer; accepted are the paths "
            "of `stages`"
        )
    return solved


def quantise_head(
    normal: Float[np.ndarray, "N T D"], weight: Float[np.ndarray, "V D"], rule: Rule
) -> Solved:
    """The head in codes, with the outputs of the final norm as calibration inputs."""
    rows = normal.reshape(-1, normal.shape[-1])
    hessian = jnp.zeros((rows.shape[1],) * 2, jnp.float32)
    for start in range(0, len(rows), 1 << 14):
        part = jnp.asarray(rows[start : start + (1 << 14)], jnp.float32)
        hessian += jnp.matmul(part.T, part, precision=jax.lax.Precision.HIGHEST)
    return _matrix(weight, hessian / float(len(rows)), rule, len(rows))


def _matrix(
    weight: Array | np.ndarray,
    hessian: Array,
    rule: Rule,
    samples: int,
    given: Solved | None = None,
    ties: Ties | None = None,
) -> Solved:
    """A matrix, as many rows at a time as device memory allows."""
    at_once = max(1, CHUNK_BYTES // (4 * weight.shape[1]))
    if rule.method == "activation-aware":
        at_once = weight.shape[0]  # all rows share an input scale
    parts = []
    for start in range(0, weight.shape[0], at_once):
        some = slice(start, start + at_once)
        parts.append(_part(weight[some], hessian, rule, given, some, ties))
    return finished(parts, rule, samples=samples, rows=True)


def _experts(
    module: Experts,
    data: ExpertInputs,
    rules: Mapping[str, Rule | None],
    rows: int,
    given: Mapping[str, Solved | None],
    ties: Ties | None,
) -> dict[str, Solved]:
    """Both products of all experts, some experts at a time."""
    gate_up, down = module.gate_up_proj[...], module.down_proj[...]
    experts, width, inputs = gate_up.shape
    largest = 4 * max(rows * inputs, inputs * inputs, width * inputs)
    at_once = max(1, min(experts, CHUNK_BYTES // largest))
    parts: dict[str, list[Solution]] = {key: [] for key in rules}
    routed: list[int] = []
    for start in range(0, experts, at_once):
        some = slice(start, min(start + at_once, experts))
        chosen = rows_of_experts(data, jnp.arange(some.start, some.stop), rows)
        routed += np.asarray(chosen.sent).tolist()
        first = gate_up[some].astype(jnp.float32)
        if (rule := rules["gate_up_proj"]) is not None:
            part = _part(first, hessian_of_rows(chosen), rule, given["gate_up_proj"], some)
            parts["gate_up_proj"].append(part)
            first = part.weight(_format(rule))
        if (rule := rules["down_proj"]) is not None:
            hessian = hessian_of_rows(rows_between(chosen, first))
            part = _part(down[some], hessian, rule, given["down_proj"], some, ties)
            parts["down_proj"].append(part)
    return {
        key: finished(parts[key], rule, samples=rows, routed=routed)
        for key, rule in rules.items()
        if rule is not None
    }


def _part(
    weight: Array | np.ndarray,
    hessian: Array,
    rule: Rule,
    given: Solved | None,
    some: slice,
    ties: Ties | None = None,
) -> Solution:
    """Rows of a matrix, or matrices of a stack: solved, or the codes that are given."""
    weight = jnp.asarray(weight)
    if given is None:
        return solve(weight, hessian, _format(rule), rule.method, ties)
    codes = jax.tree.map(lambda x: jnp.asarray(x[some]), given.codes)
    scale = given.input_scale
    if scale is not None:
        scale = jnp.asarray(scale if scale.ndim == 1 else scale[some])
    return measured(weight, hessian, codes, scale, _format(rule))


def _rows_of_each(config: QwenConfig, tokens: int) -> int:
    return max(LEAST_ROWS, 2 * tokens * config.num_experts_per_tok // config.num_experts)


def _replace(layer: DecoderLayer, path: str, solved: Solved, rule: Rule) -> None:
    parameter = at(layer, path)
    parameter.set_value(solved.weight(_format(rule)).astype(parameter[...].dtype))


def _format(rule: Rule) -> WeightFormat:
    if rule.format is None:
        raise RequestError("a rule without a format leaves its tensor as it is; leave it out")
    return rule.format
