"""From a native folder, or any other, to a Hugging Face layout: the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qwen_jax.checkpoint.mapping import Experts
from qwen_jax.checkpoint.native import Record, read_record

from .outputs import copies, largest_gather, outputs, released_layout
from .plan import Plan, describe, gather_inputs, identity
from .side_files import side_files, written_config
from .source import open_source


def plan_export(source: Path, *, experts: Experts | None = None) -> Plan:
    """Plans a folder that transformers loads.

    Prefix and grouping are those that transformers expects of the model type; experts are grouped
    as the folder had them from which a native one was converted.

    Args:
        source: a native folder, or any that `plan_conversion` accepts.
        experts: "fused" or "per_expert" to group experts otherwise, those of the MTP head too.

    Returns:
        The plan; what has been read is what `plan_conversion` reads.

    Raises:
        CheckpointError: the folder is damaged or not understood.
        ConfigError: the configuration is malformed or not implemented.
    """
    opened = open_source(source)
    folder, load, visual = opened.folder, opened.load, opened.vision
    before = read_record(source) or Record(layout=load.layout)
    record = describe(before, load, folder, vision=bool(visual))
    layout = released_layout(record.layout, load.config, vision=bool(visual), experts=experts)
    taken, left = side_files(source)
    inputs = gather_inputs(folder, taken)
    return Plan(
        source=source,
        load=load,
        tensors=outputs(load, layout) + copies(folder, visual),
        native=False,
        record=replace(record, layout=layout),
        before=before,
        edited=(),
        config=written_config(
            opened.raw_config,
            load.config,
            vision=bool(visual),
            changes={},
            dequantised=bool(folder.format_counts),
        ),
        side_files=taken,
        files_left=left,
        edit_files=None,
        largest_gather=largest_gather(load, layout),
        remarks=(),
        inputs=inputs,
        identity=identity(folder, inputs, {"experts": experts}),
    )
