"""Checkpoints by Orbax: a run that goes on from one is the uninterrupted run, bit for bit.

A state holds all that changes. What a step reads and draws follows from its number and from
settings, so beside the state lies what must be the same in the run that goes on from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..errors import CheckpointError, RequestError
from .parameters import Parameters
from .step import TrainState

KEPT = 2


class Checkpoints:
    """The checkpoints of one run in one folder; the newest two are kept.

    Use it as a context. A save is done when `save` returns. One that is killed leaves the older
    ones as they were, and its remains are ignored.

    Args:
        folder: made where it does not exist.
        identity: what decides the run, as JSON: configuration, settings, texts (see `identity`).

    Raises:
        RequestError: Orbax is not installed.
        CheckpointError: the folder cannot be made.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        orbax = _orbax()
        self.folder = folder.absolute()
        self.identity = json.loads(json.dumps(identity))
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{folder} is a file; checkpoints need a folder of their own")
        options = orbax.CheckpointManagerOptions(
            max_to_keep=KEPT, create=True, enable_async_checkpointing=False
        )
        try:
            self._manager = orbax.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be made: {error.strerror}") from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Steps that the newest checkpoint has taken; None if there is none."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint named by the steps taken; nothing if there is one."""
        orbax, step = _orbax(), int(state.step)
        if step in self._manager.all_steps():
            return
        parts = orbax.args.Composite(
            state=orbax.args.StandardSave(state), identity=orbax.args.JsonSave(self.identity)
        )
        self._manager.save(step, args=parts, force=True)

    def restore(self, like: TrainState) -> TrainState:
        """The newest checkpoint.

        Args:
            like: a state of the same run, or its shapes; its shardings are those of the result,
                whatever devices it was saved from. Shapes without one go to the first device.

        Raises:
            CheckpointError: there is none, it is damaged, or it is another run's.
        """
        orbax = _orbax()
        if (step := self.latest) is None:
            raise CheckpointError(f"{self.folder} holds no checkpoint; begin without --resume")
        try:
            found = self._manager.restore(
                step, args=orbax.args.Composite(identity=orbax.args.JsonRestore())
            )
            self._refuse_other(found.identity)
            abstract = jax.tree.map(_target, like)
            parts = orbax.args.Composite(state=orbax.args.StandardRestore(abstract))
            return self._manager.restore(step, args=parts).state
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self.folder}: checkpoint {step} cannot be read ({str(error)[:200]}); delete the "
                f"folder {step} there to go on from the one before"
            ) from error

    def _refuse_other(self, found: Mapping[str, Any]) -> None:
        theirs, ours = _flat(found), _flat(self.identity)
        wrong = [n for n in sorted({*theirs, *ours}) if theirs.get(n) != ours.get(n)]
        if wrong:
            listed = "; ".join(
                f"{name} was {theirs.get(name)!r}, now {ours.get(name)!r}" for name in wrong[:5]
            )
            raise CheckpointError(
                f"{self.folder} is of another run: {listed}{'; ...' * (len(wrong) > 5)}. Resume "
                "with what it was begun with, or begin in another folder"
            )


def fingerprint(parameters: Parameters) -> str:
    """SHA-256 of names, tree paths, shapes, dtypes and bytes of arrays; about a second a GB.

    Arrays come to the host one at a time.
    """
    digest = hashlib.sha256()
    for name in sorted(parameters):
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters[name]):
            array, place = np.asarray(leaf), jax.tree_util.keystr(path)
            digest.update(repr((name, place, array.shape, str(array.dtype))).encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """What Orbax is to make; told no place it takes the devices of the save, which may be gone."""
    place = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    items = (_flat(part, f"{name}.{key}" if name else key) for key, part in value.items())
    return {key: part for flat in items for key, part in flat.items()}


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError:
        raise RequestError(
            "checkpoints need Orbax: install qwen-jax[train], or train without --checkpoints"
        ) from None
    return orbax.checkpoint
