"""From any folder that people have to a native one: the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.keys import HEAD
from qwen_jax.checkpoint.mapping import EMBEDDING, Layout
from qwen_jax.checkpoint.native import Record, read_record
from qwen_jax.checkpoint.problems import listed
from qwen_jax.errors import CheckpointError

from .adapters import Adapter, load_adapter
from .adapters.adapter import WEIGHTS
from .inputs import Inputs
from .outputs import copies, largest_gather, outputs
from .plan import Plan, describe, gather_inputs, identity
from .side_files import side_files, written_config
from .source import SourceFolder, open_source
from .vocabulary import Vocabulary, read_added_tokens

NATIVE = Layout()


def plan_conversion(
    source: Path,
    *,
    keep_visual: bool = False,
    drop_mtp: bool = False,
    adapters: Sequence[Path] = (),
    added_tokens: Path | None = None,
) -> Plan:
    """Plans the conversion of a model folder to a native one.

    Args:
        source: a folder in any layout that is read, quantised or not; a native one too.
        keep_visual: whether the vision tower goes along, as it is.
        drop_mtp: whether the multi-token prediction head stays behind.
        adapters: PEFT folders whose LoRA matrices are merged, in this order.
        added_tokens: a file of tokens to add to the vocabulary.

    Returns:
        The plan. Headers and small files have been read, and of the weights at most a head that may
        be the embedding once more, biases that may be zero, and rows that tokens are made of.

    Raises:
        CheckpointError: the folder, an adapter or the file of tokens is damaged or not understood.
        ConfigError: the configuration is malformed or not implemented.
    """
    opened = open_source(source, mtp=not drop_mtp)
    folder, load = opened.folder, opened.load
    taken, left = side_files(source)
    merged = [load_adapter(path, load.config) for path in adapters]
    vocabulary = None
    if added_tokens is not None:
        vocabulary = read_added_tokens(added_tokens, source, load.config)
    visual = opened.vision if keep_visual else []
    _refuse_adapters(merged, keeps_vision=bool(visual))
    tensors = outputs(load, NATIVE, merged, vocabulary) + copies(folder, visual)
    before = read_record(source) or Record(layout=load.layout)
    record = describe(before, load, folder, vision=bool(visual))
    record = replace(
        record,
        adapters=(*record.adapters, *(adapter.summary for adapter in merged)),
        added_tokens=record.added_tokens + (0 if vocabulary is None else vocabulary.count),
    )
    inputs = gather_inputs(folder, taken)
    weights = {f"adapter {i}": path / WEIGHTS for i, path in enumerate(adapters, 1)}
    tokens = {} if added_tokens is None else {"added tokens": added_tokens}
    inputs = Inputs({**inputs.small, **tokens}, {**inputs.large, **weights})
    options = {
        "keep_visual": keep_visual,
        "drop_mtp": drop_mtp,
        "adapters": [adapter.identity for adapter in merged],
    }
    return Plan(
        source=source,
        load=load,
        tensors=tensors,
        native=True,
        record=record,
        before=before,
        edited={path for adapter in merged for path in adapter.paths}
        | ({EMBEDDING, HEAD} if vocabulary is not None else set()),
        config=written_config(
            opened.raw_config,
            load.config,
            vision=bool(visual),
            changes=_changes(opened.raw_config, vocabulary, drop_mtp=drop_mtp),
            dequantised=bool(folder.format_counts),
        ),
        side_files=taken,
        files_left=left,
        edit_files=None if vocabulary is None else vocabulary.write_tokenizer,
        largest_gather=largest_gather(load, NATIVE),
        remarks=[
            *_idle(opened, keep_visual=keep_visual, drop_mtp=drop_mtp),
            *(note for adapter in merged for note in adapter.notes),
            *(
                f"{adapter.summary}: one of that name was merged before; this is added to it"
                for adapter in merged
                if adapter.summary in before.adapters
            ),
            *(vocabulary.notes if vocabulary is not None else ()),
        ],
        inputs=inputs,
        identity=identity(folder, inputs, options),
    )


def _refuse_adapters(adapters: Sequence[Adapter], *, keeps_vision: bool) -> None:
    """Refuses one adapter given twice, and half an adapter beside a vision tower that is kept."""
    states = [adapter.identity for adapter in adapters]
    twice = [adapter.summary for i, adapter in enumerate(adapters) if states[i] in states[:i]]
    if twice:
        raise CheckpointError(
            f"{listed(twice)}: given twice, which would add it twice; give it once"
        )
    partly = [adapter.summary for adapter in adapters if adapter.vision]
    if keeps_vision and partly:
        raise CheckpointError(
            f"{listed(partly)}: has tensors for the vision tower, which is kept as it is; "
            "leave out --keep-visual, or merge the adapter with PEFT first"
        )


def _idle(opened: SourceFolder, *, keep_visual: bool, drop_mtp: bool) -> list[str]:
    """Says which options find nothing to act on."""
    notes = []
    if keep_visual and not opened.vision:
        notes.append("there is no vision tower to keep")
    if drop_mtp and "mtp" not in opened.load.skipped:
        notes.append("there is no MTP head to leave out")
    return notes


def _changes(
    raw: Mapping[str, Any], vocabulary: Vocabulary | None, *, drop_mtp: bool
) -> dict[str, Any]:
    """Fields of the text model's configuration that are no longer true."""
    changes = {} if vocabulary is None else dict(vocabulary.config_changes)
    if drop_mtp:
        text = raw.get("text_config") or raw
        names = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        changes |= {name: 0 for name in names if name in text}
    return changes
