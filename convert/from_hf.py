"""From any folder that people have to a native one: the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.mapping import Layout

from .adapters import load_adapter
from .outputs import copies, largest_gather, outputs
from .plan import Plan, describe, identity
from .side_files import CONFIG, side_files, written_config
from .source import open_source
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
        The plan. Headers and small files have been read, no weights.

    Raises:
        CheckpointError: the folder, an adapter or the file of tokens is damaged or not understood.
        ConfigError: the configuration is malformed or not implemented.
    """
    opened = open_source(source, mtp=not drop_mtp)
    folder, load = opened.folder, opened.load
    merged = [load_adapter(path, load.config) for path in adapters]
    tokens = [] if added_tokens is None else [added_tokens]
    vocabulary = next((read_added_tokens(file, source, load.config) for file in tokens), None)
    visual = opened.vision if keep_visual else []
    tensors = outputs(load, NATIVE, merged, vocabulary) + copies(folder, visual)
    taken, left = side_files(source)
    record = describe(load, folder, vision=bool(visual))
    record = replace(
        record,
        adapters=(*record.adapters, *(adapter.summary for adapter in merged)),
        added_tokens=record.added_tokens + (0 if vocabulary is None else vocabulary.count),
    )
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
        config=written_config(
            opened.raw_config,
            load.config,
            vision=bool(visual),
            changes=_changes(opened.raw_config, vocabulary, drop_mtp=drop_mtp),
        ),
        side_files=taken,
        files_left=left,
        edit_files=None if vocabulary is None else vocabulary.write_tokenizer,
        largest_gather=largest_gather(load, NATIVE),
        remarks=[note for adapter in merged for note in adapter.notes]
        + list(vocabulary.notes if vocabulary is not None else ()),
        identity=identity(folder, [source / name for name in (CONFIG, *taken)] + tokens, options),
    )


def _changes(
    raw: Mapping[str, Any], vocabulary: Vocabulary | None, *, drop_mtp: bool
) -> dict[str, Any]:
    """Fields of the text model's configuration that are no longer true."""
    changes = {} if vocabulary is None else dict(vocabulary.config_changes)
    text = raw.get("text_config", raw)
    if drop_mtp:
        names = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        changes |= {name: 0 for name in names if name in text}
    return changes
