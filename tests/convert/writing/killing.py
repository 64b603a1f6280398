"""Kills a process that writes a folder at one point after the other, and continues its work.

A program of its own, run by `test_kill`: it forks, which a process with JAX in it must not. Points
lie in front of each change of the file system, in the middle of each write, and in the code that
makes tensors and side files. Syncing is left out: a killed process loses nothing that was written.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.writing import OutputTensor
from convert.writing.journal import JOURNAL
from qwen_jax.errors import CheckpointError
from tests.convert.writing.folders import contents, finish, random_arrays, three_shards, write

CHANGES = ("mkdir", "open", "rename", "rmdir", "unlink", "ftruncate", "fsync")


class Points:
    """Counts the points that a process passes, and kills it at one of them."""

    def __init__(self, last: int) -> None:
        self._left = last
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1

    def install(self) -> None:
        """Puts points into the functions of `os`."""
        write = os.write
        for name in CHANGES:
            setattr(os, name, self._before(getattr(os, name)))

        def halved(descriptor: int, data: memoryview) -> int:
            self()
            return write(descriptor, data[: max(1500, len(data) // 2)])

        os.write = halved

    def _before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*arguments: Any, **keywords: Any) -> Any:
            self()
            return function(*arguments, **keywords)

        return passing

    def between(self, tensor: OutputTensor) -> OutputTensor:
        """A tensor with a point in front of each chunk."""

        def chunks() -> Iterator[np.ndarray]:
            for chunk in tensor.chunks():
                self()
                yield chunk

        return OutputTensor(tensor.key, tensor.dtype, tensor.shape, chunks)


def main() -> None:
    """Try every so manieth point of a new run and of one that continues; then random sequences."""
    os.fsync = lambda descriptor: None
    folder, stride = Path(sys.argv[1]), int(sys.argv[2])
    for shards in (3, 1):
        write(folder / "whole", grouped(shards))
        whole = contents(folder / "whole")
        shutil.rmtree(folder / "whole")
        for prepare in (leave_nothing, leave_damaged):
            passed = try_points(folder, whole, shards, prepare, stride)
            print(f"{shards} shards, {prepare.__name__}: {passed} points")
        random_sequence(folder / "random", whole, shards, random.Random(shards))
        shutil.rmtree(folder / "random")


def try_points(
    folder: Path,
    whole: Mapping[str, bytes],
    shards: int,
    prepare: Callable[[Path, int], None],
    stride: int,
) -> int:
    """Kills at each point, looks at what is left, continues; gives the number of points."""
    for point in itertools.count(shards % stride, stride):
        out = folder / "try" / "out"
        prepare(out, shards)
        finished = run_killed(out, point, shards)
        check_left(out, whole)
        if not out.exists() or (out / JOURNAL).exists():
            write(out, grouped(shards), resume=True)
        check(contents(folder / "try"), {f"out/{name}": data for name, data in whole.items()})
        shutil.rmtree(folder / "try")
        if finished:
            return point
    raise AssertionError


def random_sequence(
    folder: Path, whole: Mapping[str, bytes], shards: int, rng: random.Random
) -> None:
    """Continues, and is killed again, until a run gets to the end."""
    out = folder / "out"
    while not out.exists() or (out / JOURNAL).exists():
        run_killed(out, rng.randrange(200), shards)
        check_left(out, whole)
    check(contents(folder), {f"out/{name}": data for name, data in whole.items()})


def leave_nothing(out: Path, shards: int) -> None:
    """Lets the run begin anew."""


def leave_damaged(out: Path, shards: int) -> None:
    """Leaves a run that got to the side files, with one bad shard."""
    try:
        write(out, grouped(shards), finish=fail)
    except CheckpointError:
        os.truncate(out.parent / "out.partial" / f"model-00001-of-0000{shards}.safetensors", 5000)


def fail(folder: Path, checksums: Mapping[str, str], remarks: Mapping[str, Any]) -> None:
    """Side files that cannot be made."""
    raise CheckpointError("no tokenizer")


def run_killed(out: Path, point: int, shards: int) -> bool:
    """Writes in a process that is killed at a point; whether it got to the end before."""
    child = os.fork()
    if not child:
        points = Points(point)
        points.install()

        def finish_in_steps(
            folder: Path, checksums: Mapping[str, str], remarks: Mapping[str, Any]
        ) -> None:
            finish(folder, checksums, remarks)
            points()

        tensors = [[points.between(tensor) for tensor in shard] for shard in grouped(shards)]
        status = 1
        try:
            write(out, tensors, resume=True, finish=finish_in_steps)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    check(status, 0)
    return True


def check_left(out: Path, whole: Mapping[str, bytes]) -> None:
    """What a killed run leaves is complete, or lacks the configuration without which none loads."""
    for folder in (out, out.with_name("out.partial")):
        left = contents(folder) if folder.exists() else {}
        left.pop("journal.jsonl", None)
        if (folder == out and left) or "config.json" in left:
            check(left, whole)


def grouped(shards: int) -> list[list[OutputTensor]]:
    """The usual tensors as three shards, or all in one."""
    groups = three_shards(random_arrays())
    return groups if shards == len(groups) else [list(itertools.chain(*groups))]


def check(found: object, expected: object) -> None:
    """Ends the program unless two things are equal."""
    if found != expected:
        raise SystemExit(f"found {found}\nexpected {expected}")


if __name__ == "__main__":
    main()
