"""Folders calibrated layer by layer: what is reported, and runs that go on where others ended."""

from __future__ import annotations

import fnmatch
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.calibrate import at
from convert.quantization.calibration import Calibration, prepare_calibration
from convert.quantization.recipe_file import read_recipe
from convert.quantization_plan import QuantizationPlan, plan_quantization
from convert.quantize import quantize
from convert.teacher import fold_teacher
from convert.writing.journal import read_journal
from qwen_jax import load
from qwen_jax.config import QwenConfig
from qwen_jax.errors import CheckpointError, RequestError
from tests import compiling
from tests.convert import sources
from tests.convert.quantization import models
from tests.convert.quantization.models import WINDOW, WINDOWS
from tests.convert.writing.folders import contents

ROOT = Path(__file__).parents[3]
LIMIT = 1 << 30
PARTS = 4  # embedding, two layers, head


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    fields = models.SIZES | models.CALIBRATED
    arrays = sources.tensors(**fields)
    # A channel that is loud, and read by small weights, has another factor than the others.
    for key, array in arrays.items():
        if key.endswith(".gate_up_proj"):
            array[:, -8:] *= 16
        elif key.endswith(".experts.down_proj"):
            array[..., -8:] /= 16
    sources.write(folder / "source", arrays, **fields)
    models.recipe(folder, models.CALIBRATED_RULES)
    models.tokens(folder)
    return folder


def plan(place: Path) -> QuantizationPlan:
    return plan_quantization(
        place / "source",
        read_recipe(str(place / "mine.json")),
        calibration=calibration(place, place / "tokens.npy", fit_steps=2),
    )


def calibration(place: Path, file: Path, **settings: Any) -> Calibration:
    source = place / "source"
    settings = {"windows": WINDOWS, "window": WINDOW, **settings}
    return prepare_calibration([file], source, QwenConfig.from_hf(source), **settings)


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, bytes]:
    """The files of a run that nothing interrupts."""
    quantize(plan(place), place / "whole", max_shard_bytes=LIMIT)
    assert not list(place.glob("whole?*"))
    return comparable(place / "whole")


def comparable(folder: Path) -> dict[str, bytes]:
    """Every file by name; of the report all but the times."""
    files = contents(folder)
    report = json.loads(files["quantization_report.json"])
    assert report.pop("seconds") > 0
    return files | {"quantization_report.json": json.dumps(report).encode()}


@pytest.fixture(autouse=True)
def _disk_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_report(place, whole):
    report = json.loads(whole["quantization_report.json"])
    coded = {path for path in report["tensors"] if path != "embed_tokens.weight"}
    for path, tensor in report["tensors"].items():
        seen = path in coded
        assert (tensor["samples"] > 0) == seen, path
        assert (tensor["output_error"] is not None) == seen, path
        rule = next(r for r in models.CALIBRATED_RULES if fnmatch.fnmatchcase(path, r["pattern"]))
        assert tensor["method"] == (rule["method"] if seen else "round-to-nearest"), path
    # Two stacks and a matrix a layer, and the head.
    assert len(coded) == 2 * 3 + 1
    folded = {path for path in coded if path.endswith("down_proj")}
    for path, tensor in report["tensors"].items():
        where = None if path not in coded else "kept"
        if path in folded:
            where = path.replace("down_proj", "gate_up_proj")
        assert tensor["input_scale"] == where
    scheme = json.loads(whole["config.json"])["quantization_config"]["tensors"]
    assert {path for path, tensor in scheme.items() if tensor["input_scale"]} == coded - folded
    assert report["calibration"]["windows"] == WINDOWS
    assert report["calibration"]["window"] == WINDOW
    assert report["calibration"]["fit_steps"] == 2
    (file,) = report["calibration"]["files"]
    assert file["bytes"] == (place / "tokens.npy").stat().st_size


def test_a_teacher_is_folded_as_the_codes_are(place, whole):
    report = json.loads(whole["quantization_report.json"])
    model, teacher = (load(place / name, dtype="float32")[0] for name in ("whole", "source"))
    moved = 0
    for folded in (False, True):
        if folded:
            fold_teacher(model, teacher, report)
        for path in report["tensors"]:
            weight = np.asarray(at(teacher, path)[...])
            missed = np.asarray(at(model, path)[...].dequantise(np.float32)) - weight
            error = np.linalg.norm(missed) / np.linalg.norm(weight)
            moved += not folded and error > 0.5
            assert not folded or error < 0.35, path
    assert moved


class Stopped(Exception):
    """What ends a run."""


def stop_after(nbytes: int):
    left = [nbytes]

    def progress(advance: int) -> None:
        left[0] -= advance
        if left[0] < 0:
            raise Stopped

    return progress


def interrupted(place: Path, out: Path, nbytes: int) -> int:
    """Runs until so many bytes are written; gives the number of parts that are finished."""
    with pytest.raises(Stopped):
        quantize(plan(place), out, max_shard_bytes=LIMIT, resume=True, progress=stop_after(nbytes))
    return len(read_journal(out.with_name(out.name + ".partial")).finished)


def sizes(whole: dict[str, bytes]) -> list[int]:
    """Bytes of tensors in each shard."""
    shards = [data for name, data in sorted(whole.items()) if name.endswith(".safetensors")]
    return [len(data) - 8 - int.from_bytes(data[:8], "little") for data in shards]


@pytest.mark.parametrize("lose", ["nothing", "newest", "states"])
def test_a_run_goes_on_to_the_same_bytes(place, whole, tmp_path, lose):
    """Stopped in every part in turn; hidden states that are lost are made again."""
    out, told = tmp_path / "out", list[str]()
    for part in range(PARTS - 1):
        reached = interrupted(place, out, sum(sizes(whole)[:part]) + 1)
        assert reached == part
        states = sorted((tmp_path / "out.calibration").glob("*"))
        for file in {"nothing": [], "states": states, "newest": states[-1:]}[lose]:
            file.write_bytes(b"?")
    written = quantize(plan(place), out, max_shard_bytes=LIMIT, resume=True, tell=told.append)
    assert len(written.reused) == PARTS - 2
    assert comparable(out) == whole
    assert not list(tmp_path.glob("out?*"))


def test_a_killed_run_goes_on_to_the_same_bytes(place, whole, tmp_path):
    """Killed after a layer is solved, while it is written or before."""
    out, work = tmp_path / "out", tmp_path / "out.partial"
    program = (
        "import sys, pathlib\n"
        "from tests.compiling import emit_quickly\n"
        "emit_quickly()\n"
        "from tests.convert.quantization.test_calibrated_folders import LIMIT, plan\n"
        "from convert.quantize import quantize\n"
        "place, out = map(pathlib.Path, sys.argv[1:])\n"
        "quantize(plan(place), out, max_shard_bytes=LIMIT, tell=print)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-u", "-c", program, place, out],
        cwd=ROOT,
        # The same programs as in this process, or bytes may differ.
        env=compiling.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("layer 2 of 2"):
                break
        run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    assert not out.exists()
    assert not (work / "config.json").exists()
    written = quantize(plan(place), out, max_shard_bytes=LIMIT, resume=True)
    assert len(written.reused) in (1, 2)
    assert comparable(out) == whole
    assert not list(tmp_path.glob("out?*"))


def test_text_that_changed_is_not_gone_on_with(place, whole, tmp_path):
    out = tmp_path / "out"
    interrupted(place, out, sizes(whole)[0] + 1)
    other = models.tokens(tmp_path, top=50)
    changed = plan_quantization(
        place / "source",
        read_recipe(str(place / "mine.json")),
        calibration=calibration(place, other),
    )
    with pytest.raises(CheckpointError, match="begun by another run") as caught:
        quantize(changed, out, max_shard_bytes=LIMIT, resume=True)
    assert "tokens_sha256" in str(caught.value)


@pytest.mark.parametrize(
    ("count", "top", "settings", "words"),
    [
        (WINDOW - 1, 96, {}, ("15", "16")),
        (64, 97 + 30, {}, ("0 to 95", "another model's tokenizer")),
        (64, 96, {"windows": 0}, ("0 windows",)),
        (64, 96, {"window": 257}, ("257", "256")),
        (64, 96, {"window": 0}, ("0 tokens",)),
        (64, 96, {"fit_steps": -1}, ("-1 steps",)),
        (64, 96, {"fit_steps": 2, "windows": 1}, ("2 steps", "1 windows", "--fit-steps")),
    ],
)
def test_calibration_that_is_refused(place, tmp_path, count, top, settings, words):
    with pytest.raises(RequestError) as caught:
        calibration(place, models.tokens(tmp_path, count, top), **settings)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_tokenizer_of_another_model_is_refused(place, demo_path, tmp_path):
    """The demo's has 4096 ids, the model's embedding 96 rows; token files need no tokenizer."""
    folder = tmp_path / "model"
    models.source(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_path / name).read_bytes())
    with pytest.raises(RequestError, match=r"another model's.*\.npy"):
        prepare_calibration(
            [place / "tokens.npy"], folder, QwenConfig.from_hf(folder), windows=1, window=WINDOW
        )
