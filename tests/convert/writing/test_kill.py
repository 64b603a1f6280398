"""A run that is killed at any point is continued to the same bytes, and never loads before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from convert.writing import disk
from tests.convert.writing.folders import write

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_anywhere(tmp_path, stride):
    run = subprocess.run(
        [sys.executable, "-m", "tests.convert.writing.killing", str(tmp_path), str(stride)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    points = [int(count) for count in re.findall(r"(\d+) points", run.stdout)]
    assert len(points) == 4
    assert min(points) > 40


def test_order_of_what_reaches_the_disk(tmp_path, monkeypatch):
    """A loss of power forgets what was not synced; so each thing is synced before the next."""
    done: list[str] = []

    def short(path: object) -> str:
        name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        return re.sub(r"-of-0000.\.safetensors", "", name).removeprefix(str(tmp_path)).lstrip("/")

    def noted(name: str, function, paths: int):
        def noting(*arguments, **keywords):
            done.append(" ".join([name, *map(short, arguments[:paths])]))
            return function(*arguments, **keywords)

        monkeypatch.setattr(disk.os, name, noting)

    for name, paths in (("write", 1), ("fsync", 1), ("rename", 2), ("unlink", 1)):
        noted(name, getattr(os, name), paths)
    write(tmp_path / "out")

    def at(event: str, after: int = 0) -> int:
        return done.index(event, after)

    work = "out.partial"
    for number in ("00001", "00002", "00003"):
        final = f"{work}/model-{number}"
        steps = [
            at(f"fsync {final}.writing"),
            at(f"rename {final}.writing {final}"),
            at(f"fsync {work}", at(f"rename {final}.writing {final}")),
            at(f"write {work}/journal.jsonl", at(f"rename {final}.writing {final}")),
            at(f"fsync {work}/journal.jsonl", at(f"rename {final}.writing {final}")),
        ]
        assert steps == sorted(steps)
    moved = at(f"rename {work}/finish/config.json {work}/config.json")
    named = at(f"rename {work} out")
    removed = at("unlink out/journal.jsonl")
    assert all(at(f"fsync {work}/finish/{name}") < moved for name in ("config.json", "sums.json"))
    index = "model.safetensors.index.json"
    assert at(f"rename {work}/finish/{index} {work}/{index}") < moved
    assert moved < at(f"fsync {work}", moved) < named < at("fsync ", named) < removed
    assert done[-1] == "fsync out"
    writes = [event for event in done if event.startswith("write") and "writing" in event]
    assert max(map(done.index, writes)) < moved
