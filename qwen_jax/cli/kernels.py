"""Which implementation runs each operation of a model: what `qwen-jax inspect --kernels` shows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import H200, Target, current_target, targeting
from pallas_kernels.dispatch import Call, recording

from ..cache import Cache, init_cache
from ..decode import decode_step, prefill
from ..decode.prompt import CHUNK_SIZE
from ..model import CausalLM, abstract_model

if TYPE_CHECKING:
    from ..config import QwenConfig
    from ..quant import Scheme

CONTEXT = 4096
DEVICES = {"h200": H200}


def kernels(
    config: QwenConfig,
    scheme: Scheme,
    batch_size: int,
    kv_cache_dtype: str | None,
    device: str | None,
) -> dict[str, Any]:
    """The operations of one prefill of a chunk and one decode step, traced on shapes alone.

    Args:
        config: the model's.
        scheme: which of its matrices are in codes.
        batch_size: sequences.
        kv_cache_dtype: see `init_cache`.
        device: "h200" for what would run there, or None for this machine's device.

    Returns:
        The device, and for each phase the distinct calls: operation, arrays, settings, how many
        layers make it, the implementation that runs it, whether it was named, and why others do
        not. A call that nothing takes has the implementation None, and ends its phase.
    """
    target = current_target() if device is None else DEVICES[device]
    model = abstract_model(config, scheme)
    cache = jax.eval_shape(
        lambda: init_cache(config, batch_size, CONTEXT, kv_cache_dtype=kv_cache_dtype)
    )
    return {
        "device": target.kind,
        "phases": {
            "prefill": _calls(model, cache, batch_size, CHUNK_SIZE, target),
            "decode": _calls(model, cache, batch_size, 1, target),
            "without a cache": _calls(model, None, batch_size, CHUNK_SIZE, target),
        },
    }


def _calls(
    model: CausalLM, cache: Cache | None, batch: int, tokens: int, target: Target
) -> list[dict[str, Any]]:
    def step(model: CausalLM, cache: Any, ids: jax.Array) -> Any:
        if cache is None:
            return model(ids)
        if tokens == 1:
            return decode_step(model, cache, ids[:, 0])
        return prefill(model, cache, ids, jnp.full((batch,), tokens, jnp.int32))

    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    with targeting(target), recording() as calls:
        try:
            jax.eval_shape(step, model, cache, ids)
        except ExceptionGroup:
            if not calls or calls[-1].choice.chosen is not None:
                raise
    return [_row(call, number) for call, number in _distinct(calls)]


def _distinct(calls: list[Call]) -> list[tuple[Call, int]]:
    """Each call once, with how often it comes."""
    count = Counter(map(repr, calls))
    first = {repr(call): call for call in reversed(calls)}
    return [(first[text], number) for text, number in count.items()]


def _row(call: Call, number: int) -> dict[str, Any]:
    return {
        "operation": call.operation,
        "calls": number,
        "implementation": call.choice.chosen,
        "named": call.named,
        "arrays": dict(call.arrays),
        "settings": {name: _plain(value) for name, value in call.settings.items()},
        "refused": {name: list(why) for name, why in call.choice.refused.items()},
    }


def _plain(value: Any) -> Any:
    """A setting as JSON holds it: dtypes by name."""
    return value if isinstance(value, int | float | None) else str(value)


def as_text(report: dict[str, Any]) -> str:
    """The report for a reader: a line a call, and one a refusal."""
    lines = []
    for phase, rows in report["phases"].items():
        lines.append(f"{phase} on {report['device']}")
        for row in rows:
            given = [f"{name} {text}" for name, text in row["arrays"].items()]
            given += [f"{name}={value}" for name, value in row["settings"].items()]
            chosen = row["implementation"] or "REFUSED, and what follows was not looked at"
            named = ", by name" if row["named"] and row["implementation"] else ""
            lines.append(f"  {row['calls']:>3} x {row['operation']:<18} {chosen}{named}")
            lines.append(f"        {', '.join(given)}")
            for name, why in row["refused"].items():
                lines.append(f"        not {name}: {'; '.join(why)}")
    return "\n".join(lines)
