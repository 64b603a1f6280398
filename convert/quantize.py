"""From any folder that people have to a native one in codes of 3, 4 or 8 bits.

`quantization` holds the parts; `writing` writes, and goes on where a run was interrupted. Tensors
are made while they are written, a layer in memory at a time:

- with calibration text layer by layer, each with what the quantised ones before it give it;
- without it, and for the embedding and the multi-token prediction head, run by run by rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.keys import HEAD, MTP
from qwen_jax.checkpoint.mapping import EMBEDDING

from .outputs import outputs
from .quantization.calibrated import LayerByLayer
from .quantization.choice import WITHOUT_DATA
from .quantization.hidden_states import StateFolder
from .quantization.report import make_report
from .quantization.rounding import Rounding
from .quantization.tensors import NATIVE, Maker, output_tensors, path_of_codes
from .quantization.weights import Weights
from .quantization.written import WrittenCodes
from .quantization_plan import QuantizationPlan
from .run import check, run, source_compared
from .writing import Written, partial_folder


def quantize(
    plan: QuantizationPlan,
    destination: Path,
    *,
    max_shard_bytes: int,
    resume: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Written:
    """Writes the folder of a plan.

    Args:
        plan: what to write.
        destination: the folder to be; it must not exist. Until all is done the work is in
            folders beside it, whose names end in `.partial` and `.calibration`.
        max_shard_bytes: most bytes of tensors in a file; no file holds tensors of two layers.
        resume: whether to go on, at the first layer that is not finished, with the work of a run
            that was interrupted.
        progress: called with the bytes written since the last call.
        tell: called with a line when a layer is solved.

    Returns:
        What was written.

    Raises:
        CheckpointError: as `run.run` does, and where a weight is not finite.
    """
    check(plan, destination, resume=resume)
    weights = Weights(plan.load)
    # First of all: hours of work would be lost to a fault in the last layer.
    tell("looking for weights that are damaged or not finite")
    with source_compared(plan):
        weights.refuse_bad()
    states = StateFolder(destination, plan.identity)
    written = WrittenCodes(partial_folder(destination), plan.choice)
    makers = _Makers(plan, weights, states, written, tell)
    told = None if plan.calibration is None else plan.calibration.to_json()

    def report(remarks: Mapping[str, Any]) -> Mapping[str, Any]:
        by_path = {path_of_codes(key): remark for key, remark in remarks.items()}
        return {"made_from": plan.origin, **make_report(plan.choice, told, by_path)}

    tensors = output_tensors(
        plan.load.config,
        plan.load.mtp_layers,
        plan.choice.tree,
        plan.choice.scheme,
        kept=lambda key: makers.kept[key](),
        maker=makers.maker,
    )
    try:
        return run(
            dataclasses.replace(plan, tensors=tensors, report=report),
            destination,
            max_shard_bytes=max_shard_bytes,
            resume=resume,
            progress=progress,
            compare_source=False,
        )
    finally:
        if not partial_folder(destination).exists():
            states.clear()


class _Makers:
    """What makes each tensor."""

    def __init__(
        self,
        plan: QuantizationPlan,
        weights: Weights,
        states: StateFolder,
        written: WrittenCodes,
        tell: Callable[[str], None],
    ) -> None:
        self._choice = plan.choice
        self.kept = {tensor.key: tensor.chunks for tensor in outputs(plan.load, NATIVE)}
        self._rounding: Maker = Rounding(weights, plan.choice)
        self._layers: Maker | None = None
        if plan.calibration is not None:
            self._layers = LayerByLayer(
                plan.load, weights, plan.choice, plan.calibration, states, written, tell
            )

    def maker(self, path: str) -> Maker:
        """What makes a tensor in codes."""
        blind = path == EMBEDDING or path.startswith(MTP)
        plain_head = path == HEAD and self._choice.rules[path].method == WITHOUT_DATA
        if self._layers is None or blind or plain_head:
            return self._rounding
        return self._layers
