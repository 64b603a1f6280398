"""The Triton implementation: what it takes, and the call of its kernel."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array, Float, Int, Real

from .._compat import Target, current_target, triton_call, triton_refusals
from ..attention.heads import head_refusals
from ..attention.rows import flat_rows
from ..attention.scales import BlockScales, pool_refusals
from . import reference
from .config import Config, config_for
from .kernel import Refs, Shape, work
from .reference import AttentionInputs


def refusals(target: Target, *arrays: Any, **settings: Any) -> list[str]:
    """Why the kernel does not take a call; see `dispatch.Implementation`."""
    reasons = triton_refusals(target) + reference.refusals(target, *arrays, **settings)
    q, k, v, cos, sin = arrays[:5]
    key_blocks = arrays[7] if len(arrays) > 7 else None
    dtypes = {str(x.dtype) for x in (q, k, v)}
    if key_blocks is not None and str(key_blocks.dtype) != "int8":
        dtypes.add(str(key_blocks.dtype))
    reasons += head_refusals(k.shape[-1], "queries, keys, values and blocks", sorted(dtypes))
    if str(cos.dtype) != "float32" or str(sin.dtype) != "float32":
        reasons.append(f"cosines and sines are {cos.dtype} and {sin.dtype}, not float32")
    rows = {"queries": q.shape[:3]}
    if key_blocks is not None:
        rows["the pool"] = key_blocks.shape[:3]
    for name, (first, second, third) in rows.items():
        if first * second * third >= 2**31:
            reasons.append(f"{name} have {first * second * third} rows, 2^31 or more")
    if key_blocks is not None:
        reasons += pool_refusals(key_blocks)
    return reasons


def attention_inputs(
    q: Float[Array, "B T N G"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cos: Float[Array, "B T R2"],
    sin: Float[Array, "B T R2"],
    q_weight: Float[Array, " H"] | None = None,
    k_weight: Float[Array, " H"] | None = None,
    key_blocks: Real[Array, "P K Z H"] | None = None,
    value_blocks: Real[Array, "P K Z H"] | None = None,
    block_table: Int[Array, "B W"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    scales: BlockScales | None = None,
    *,
    eps: float,
    zero_centred: bool,
    config: Config | None = None,
) -> AttentionInputs:
    """See `api.attention_inputs`; `config` is chosen by shape if None."""
    batch, length, query_heads, _ = q.shape
    _, _, kv_heads, width = k.shape
    if config is None:
        config = config_for(current_target(), q, k, key_blocks)
    shape = Shape(
        tokens=batch * length,
        length=length,
        query_heads=query_heads,
        kv_heads=kv_heads,
        width=width,
        half=cos.shape[-1],
        blocks=0 if key_blocks is None else key_blocks.shape[0],
        block_size=0 if key_blocks is None else key_blocks.shape[2],
        columns=0 if block_table is None else block_table.shape[1],
        eps=eps,
        zero_centred=zero_centred,
        tile=config.tile,
    )
    key_scale, value_scale, key_base = (None,) * 3 if scales is None else scales.rows()
    inputs = Refs(
        q=flat_rows(q),
        k=flat_rows(k),
        v=flat_rows(v),
        cos=flat_rows(cos),
        sin=flat_rows(sin),
        q_weight=q_weight,
        k_weight=k_weight,
        table=block_table,
        positions=None if positions is None else positions.reshape(-1),
        key=None if key_blocks is None else flat_rows(key_blocks),
        value=None if value_blocks is None else flat_rows(value_blocks),
        key_scale=key_scale,
        value_scale=value_scale,
        key_base=key_base,
    )
    new = _call(shape, inputs, config)
    turned = new.q.reshape(batch, length, query_heads, width)
    if key_blocks is None or value_blocks is None:
        return AttentionInputs(turned, new.key.reshape(k.shape), new.value.reshape(v.shape), None)
    if scales is not None:
        scales = BlockScales(
            new.key_scale.reshape(scales.key_scale.shape),
            new.value_scale.reshape(scales.value_scale.shape),
            new.key_base.reshape(scales.key_base.shape),
        )
    return AttentionInputs(
        turned, new.key.reshape(key_blocks.shape), new.value.reshape(value_blocks.shape), scales
    )


def _call(shape: Shape, inputs: Refs, config: Config) -> Refs:
    """What the kernel writes, in the fields of `Refs` that are written; those of pools in place."""
    given = {name: array for name, array in inputs._asdict().items() if array is not None}
    pools = [name for name in ("key", "value", "key_scale", "value_scale", "key_base")]
    pools = [name for name in pools if name in given]
    out = {"q": jax.ShapeDtypeStruct((inputs.q.shape[0], shape.width), inputs.q.dtype)}
    out |= {name: jax.ShapeDtypeStruct(given[name].shape, given[name].dtype) for name in pools}
    if not pools:
        out["key"] = jax.ShapeDtypeStruct(inputs.k.shape, inputs.k.dtype)
        out["value"] = jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype)

    def kernel(*refs: Any) -> None:
        read = dict.fromkeys(Refs._fields) | dict(zip(given, refs, strict=False))
        written = dict.fromkeys(Refs._fields) | dict(zip(out, refs[len(given) :], strict=True))
        work(shape, Refs(**read), Refs(**written))

    results = triton_call(
        kernel,
        num_warps=config.num_warps,
        num_stages=1,
        name="attention_inputs",
        grid=(-(-shape.tokens // shape.tile) * shape.slots,),
        out_shape=tuple(out.values()),
        input_output_aliases={list(given).index(name): list(out).index(name) for name in pools},
    )(*given.values())
    return Refs(**dict.fromkeys(Refs._fields) | dict(zip(out, results, strict=True)))
