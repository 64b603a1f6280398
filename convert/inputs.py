"""The files that a result is made from, and whether they are as they were."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_jax.checkpoint.problems import listed, show
from qwen_jax.errors import CheckpointError


@dataclass(frozen=True)
class Inputs:
    """Files by a name for messages.

    Attributes:
        small: files whose content counts.
        large: files of tensors, too long to be read twice: size and time of change count.
    """

    small: Mapping[str, Path]
    large: Mapping[str, Path]

    def state(self) -> dict[str, Any]:
        """Says how the files are now; JSON.

        Raises:
            CheckpointError: a file cannot be read.
        """
        return {
            "files": {name: _digest(file) for name, file in self.small.items()},
            "shards": {name: _size_and_time(file) for name, file in self.large.items()},
        }

    def refuse_changes(self, before: Mapping[str, Any]) -> None:
        """Raises if a file is not as it was.

        Args:
            before: holds what `state` gave earlier.

        Raises:
            CheckpointError: names the files.
        """
        now = self.state()
        changed = [
            name
            for kind, states in now.items()
            for name, state in states.items()
            if before[kind][name] != state
        ]
        if changed:
            raise CheckpointError(
                f"{listed(changed)} changed while the conversion was going on, so that the result "
                "would be a mixture; convert again when nothing writes to the source any more"
            )


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{show(file)} cannot be read: {error.strerror}") from error


def _size_and_time(file: Path) -> str:
    try:
        state = file.stat()
    except OSError as error:
        raise CheckpointError(f"{show(file)} cannot be read: {error.strerror}") from error
    return f"{state.st_size} bytes, last changed at {state.st_mtime_ns / 1e9:.6f}"
