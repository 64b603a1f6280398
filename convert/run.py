"""A plan carried out: the one place that writes a folder."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.checksums import QUANTIZATION, compared, file_checksums
from qwen_jax.checkpoint.formats import declares_codes
from qwen_jax.checkpoint.json_file import read_object
from qwen_jax.checkpoint.native import FORMAT_VERSION, SHARD_METADATA, TOKENIZER_FILES
from qwen_jax.checkpoint.safetensors_io import open_folder
from qwen_jax.errors import CheckpointError

from .plan import Plan
from .side_files import CONFIG, copy_side_files, write_config, write_report
from .writing import Written, check_destination, plan_shards, write_folder

HF_METADATA = {"format": "pt"}


def check(plan: Plan, destination: Path, *, resume: bool) -> None:
    """Raises what `run` would at its start: a destination that is taken, or too full a disk."""
    if destination.resolve().is_relative_to(plan.source.resolve()):
        raise CheckpointError(
            f"{destination} is the source or inside it; give a folder outside {plan.source}"
        )
    beside = sum((plan.source / name).stat().st_size for name in plan.side_files)
    check_destination(
        destination, resume=resume, nbytes=plan.bytes_out + beside + plan.scratch_bytes
    )


def holds(plan: Plan, folder: Path) -> bool:
    """Whether a folder has the tensors and the configuration that a plan would write.

    Keys, dtypes and shapes are compared, not values; of codes, what they were made from too.

    Raises:
        CheckpointError: the folder is damaged.
    """
    if not plan.made(folder):
        return False
    found = {key: (info.dtype, info.shape) for key, info in open_folder(folder).tensors.items()}
    planned = {tensor.key: (tensor.dtype, tensor.shape) for tensor in plan.tensors}
    return found == planned and read_object(folder / CONFIG) == plan.config


def source_compared(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Compares, while the block runs, a native source with its record.

    Only what `Plan.refuse_damage` cannot compare: tensors that become others, codes above all.
    """
    folder, unchanged = open_folder(plan.source), plan.unchanged
    known = [key for key in plan.before.checksums if key in folder.tensors]
    keys = [key for key in known if key.removeprefix("model.") not in unchanged]
    if declares_codes(plan.source):
        keys = list(folder.tensors)
    return compared(folder, keys) if keys else contextlib.nullcontext()


def run(
    plan: Plan,
    destination: Path,
    *,
    max_shard_bytes: int,
    resume: bool = False,
    progress: Callable[[int], None] = lambda nbytes: None,
    compare_source: bool = True,
    keep: bool = True,
) -> Written:
    """Writes the folder of a plan.

    Args:
        plan: what to write.
        destination: the folder to be; it must not exist. Until all is done the work is in a
            folder beside it, whose name ends in `.partial`.
        max_shard_bytes: most bytes of tensors in a file.
        resume: whether to go on with the work of a run that was interrupted.
        progress: called with the bytes written since the last call.
        compare_source: whether `source_compared` is still to be done.
        keep: whether what is finished stays when this run fails, for one with `resume`.

    Returns:
        What was written.

    Raises:
        CheckpointError: the destination cannot be used, the disk is full, or the source turns out
            to be damaged, or changes meanwhile.
    """

    def finish(folder: Path, checksums: Mapping[str, str], remarks: Mapping[str, Any]) -> None:
        with source_compared(plan) if compare_source else contextlib.nullcontext():
            copy_side_files(plan.source, plan.side_files, folder)
        plan.inputs.refuse_changes(plan.identity)
        plan.refuse_damage(checksums)
        if plan.edit_files is not None:
            plan.edit_files(folder)
        write_config(plan.config, folder)
        if plan.native:
            files = file_checksums(folder, _checked_files(folder))
            dataclasses.replace(plan.record, checksums=checksums, files=files).write(folder)
        if plan.report is not None:
            write_report(plan.report(remarks), folder)

    return write_folder(
        destination,
        plan_shards(plan.tensors, max_shard_bytes),
        fingerprint={**plan.identity, "max_shard_bytes": max_shard_bytes},
        metadata=SHARD_METADATA if plan.native else HF_METADATA,
        index_metadata={"format_version": FORMAT_VERSION} if plan.native else {},
        finish=finish,
        resume=resume,
        progress=progress,
        keep=keep,
    )


def _checked_files(folder: Path) -> list[str]:
    """What is recorded of a folder with a configuration, beside tensors: nothing without codes."""
    if not declares_codes(folder):
        return []
    return [QUANTIZATION, *(name for name in TOKENIZER_FILES if (folder / name).is_file())]
