"""Folders whose codes were fitted to a float model: what is written, what is kept, and refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

import qwen_jax
from convert import distill as distilling
from convert import model_fit
from convert.calibrate import at
from convert.distill import Distilled, distill
from convert.distillation_plan import DistillationPlan, plan_distillation
from convert.quantization.calibration import prepare_calibration
from convert.quantization.recipe_file import read_recipe
from convert.quantization_plan import plan_quantization
from convert.quantize import quantize
from qwen_jax.config import QwenConfig
from qwen_jax.errors import CheckpointError, MemoryLimitError, RequestError
from tests.convert import sources
from tests.convert.quantization import models
from tests.convert.sources import Shell

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
# Three bits for what a prediction hangs on, with and without zero points.
RULES: list[dict[str, Any]] = [
    {"pattern": "*.mlp.experts.gate_up_proj", "bits": 3, "group_size": 32},
    {"pattern": "lm_head.weight", "bits": 3, "group_size": 32, "symmetric": False},
    {"pattern": "embed_tokens.weight", "bits": 3, "group_size": 32, "symmetric": False},
]
WINDOW, WINDOWS, STEPS, BATCH = 16, 400, 50, 4
LIMIT = 1 << 30
REPORT = "quantization_report.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a float model, the model in codes, and text."""
    folder = tmp_path_factory.mktemp("models")
    source = models.source(folder / "float", mtp=1, **ONE_LAYER)
    (source / "LICENSE").write_text("as you like")
    recipe = read_recipe(str(models.recipe(folder, RULES)))
    quantize(plan_quantization(source, recipe), folder / "coded", max_shard_bytes=LIMIT)
    models.tokens(folder, WINDOWS * WINDOW)
    return folder


def plan(place: Path, coded: str = "coded", teacher: str = "float") -> DistillationPlan:
    folder = place / coded
    calibration = prepare_calibration(
        [place / "tokens.npy"], folder, QwenConfig.from_hf(folder), windows=999, window=WINDOW
    )
    return plan_distillation(
        folder, place / teacher, calibration, steps=STEPS, windows_of_step=BATCH
    )


@pytest.fixture(autouse=True)
def _disk_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def at_rates(monkeypatch: pytest.MonkeyPatch, code: float, scale: float) -> None:
    monkeypatch.setattr(model_fit, "CODE_RATE", code)
    monkeypatch.setattr(model_fit, "SCALE_RATE", scale)


@pytest.fixture(scope="module")
def fitted(place: Path) -> Distilled:
    """What became of a fit at rates for tens of steps in place of hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        at_rates(patch, 0.02, 0.01)
        return distill(plan(place), place / "fitted", max_shard_bytes=LIMIT)


def held_out_logits(place: Path, folder: str) -> np.ndarray:
    """Logits of the windows that are held out, by plain calls."""
    _, held_out = model_fit.divided(plan(place).calibration.tokens, STEPS, BATCH)
    model, _ = qwen_jax.load(place / folder, dtype="float32")
    for path, tensor in model_fit.tensors_in_codes(model).items():
        # All models share what is compiled.
        parent, name = path.rsplit(".", 1)
        setattr(at(model, parent), name, nnx.Param(tensor.dequantise(np.float32)))
    parts = [model(held_out[i : i + 4], capture="none").logits for i in range(0, 32, 4)]
    return np.concatenate(parts).astype(np.float64)


def mean_kl(base: np.ndarray, other: np.ndarray) -> float:
    logs, others = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (base, other))
    return float((np.exp(logs) * (logs - others)).sum(-1).mean())


def test_the_folder_predicts_what_the_float_model_does_better_than_before(place, fitted):
    fit = fitted.fit
    assert fit.better
    assert fit.after < 0.93 * fit.before
    base, before, after = (held_out_logits(place, name) for name in ("float", "coded", "fitted"))
    assert mean_kl(base, before) == pytest.approx(fit.before, rel=1e-3)
    assert mean_kl(base, after) == pytest.approx(fit.after, rel=1e-3)


def test_codes_and_scales_are_new_and_all_else_is_as_it_was(place, fitted):
    before, after = (sources.bits(sources.read(place / name)) for name in ("coded", "fitted"))
    assert list(before) == list(after)
    for key, (dtype, shape, data) in after.items():
        assert (dtype, shape) == before[key][:2]
        moves = key.endswith((".codes", ".scale")) and not key.startswith("mtp.")
        assert (data != before[key][2]) == moves, key
    for name in ("config.json", "LICENSE"):
        assert (place / "fitted" / name).read_bytes() == (place / "coded" / name).read_bytes()


def test_the_report_says_what_was_done(place, fitted):
    before, after = (
        json.loads((place / name / REPORT).read_text()) for name in ("coded", "fitted")
    )
    (done,) = after["distillation"]
    assert (done["steps"], done["batch_windows"], done["held_out_windows"]) == (STEPS, BATCH, 32)
    assert done["held_out_kl_before"] == fitted.fit.before
    assert done["held_out_kl_after"] == fitted.fit.after
    assert done["calibration"]["files"][0]["bytes"] == (place / "tokens.npy").stat().st_size
    assert done["calibration"]["windows"] == WINDOWS
    assert before["made_from"] != after["made_from"]
    assert before["tensors"].keys() == after["tensors"].keys()
    for path, row in after["tensors"].items():
        same = row["weight_error"] == before["tensors"][path]["weight_error"]
        assert same == path.startswith("mtp."), path
        assert row["weight_error"] < 1.5 * before["tensors"][path]["weight_error"]


def test_codes_stay_where_new_ones_are_no_better(place, fitted, tmp_path, monkeypatch):
    at_rates(monkeypatch, 0.02, 30.0)
    told: list[str] = []
    done = distill(plan(place), tmp_path / "kept", max_shard_bytes=LIMIT, tell=told.append)
    assert not done.fit.better
    assert "all codes stay" in told[-1]
    assert sources.bits(sources.read(tmp_path / "kept")) == sources.bits(
        sources.read(place / "coded")
    )
    before, after = (
        json.loads((f / REPORT).read_text()) for f in (place / "coded", tmp_path / "kept")
    )
    assert after["tensors"] == before["tensors"]
    assert after["distillation"][0]["new_codes"] is False


def test_an_interrupted_run_leaves_nothing(place, fitted, tmp_path, monkeypatch):
    """Stopped while the last shard is written, with others finished."""
    monkeypatch.setattr(distilling, "fit_model", lambda *_, **__: fitted.fit)
    left = [sum(t.nbytes for t in plan(place).tensors) - 1]

    def progress(nbytes: int) -> None:
        left[0] -= nbytes
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(plan(place), tmp_path / "out", max_shard_bytes=1, progress=progress)
    assert list(tmp_path.iterdir()) == []


def edited(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def damaged(folder: Path) -> None:
    """In the multi-token prediction head, which takes no part in the fit."""
    shard = max(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("conversion.json"), "has no conversion.json"),
        (without(REPORT), f"has no {REPORT}"),
        (lambda f: edited(f, REPORT, lambda c: c["tensors"].popitem()), "not about the tensors"),
        (damaged, "the folder is damaged"),
        (
            lambda f: edited(f, "config.json", lambda c: c.pop("quantization_config")),
            "not in codes",
        ),
    ],
)
def test_codes_that_are_refused(place, tmp_path, change, words):
    shutil.copytree(place / "coded", tmp_path / "coded")
    for name in ("float", "tokens.npy"):
        (tmp_path / name).symlink_to(place / name)
    change(tmp_path / "coded")
    with pytest.raises(CheckpointError, match=words):
        distill(plan(tmp_path), tmp_path / "out", max_shard_bytes=LIMIT)
    assert not list(tmp_path.glob("out*"))


def test_teachers_that_are_refused(place, tmp_path):
    with pytest.raises(CheckpointError, match="is in codes itself"):
        plan(place, teacher="coded")
    models.source(tmp_path / "other", **ONE_LAYER, num_experts_per_tok=1)
    with pytest.raises(CheckpointError, match="num_experts_per_tok 1 there, 2 here"):
        plan(place, teacher=str(tmp_path / "other"))
    arrays = sources.read(place / "float")
    turned = {key: -array if array.ndim > 1 else array for key, array in arrays.items()}
    broken = arrays | {"model.norm.weight": arrays["model.norm.weight"] * np.nan}
    for number, (weights, words) in enumerate(
        ((turned, r"in 3 of 3 tensors, such as (1\.9|2\.0)"), (broken, r"norm.weight: \d+ NaN"))
    ):
        teacher = tmp_path / str(number)
        sources.write(teacher, weights, **models.SIZES, **ONE_LAYER, mtp_num_hidden_layers=1)
        with pytest.raises(CheckpointError, match=words):
            distill(plan(place, teacher=str(teacher)), tmp_path / "out", max_shard_bytes=LIMIT)


def test_a_device_that_is_too_small_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(distilling, "available_memory", lambda: 1_000_000)
    arrays = sources.read(place / "coded")
    codes = sum(a.size for k, a in arrays.items() if k.endswith(".codes") and "mtp." not in k)
    # Ten values a word at least.
    assert plan(place).device_memory > model_fit.BYTES_A_CODE * 10 * codes
    with pytest.raises(MemoryLimitError, match=r"GB of device memory.*quantize --fit-steps"):
        distill(plan(place), tmp_path / "out", max_shard_bytes=LIMIT)


@pytest.mark.parametrize(
    ("steps", "batch", "words"),
    [
        (0, 4, "0 steps"),
        (20, 0, "of 0 windows"),
        (20, 400, "has 400 windows of 16 tokens; a step takes 400"),
    ],
)
def test_numbers_that_are_refused(place, steps, batch, words):
    calibration = plan(place).calibration
    with pytest.raises(RequestError, match=words):
        plan_distillation(
            place / "coded", place / "float", calibration, steps=steps, windows_of_step=batch
        )


def command(place: Path, *more: object) -> list[object]:
    return [
        *("distill", place / "coded", "--teacher", place / "float"),
        *("--calibration", place / "tokens.npy", "--window", WINDOW, *more),
    ]


def test_a_dry_run(place, capsys, tmp_path):
    shell = Shell(capsys, tmp_path)
    outcome = shell.run(*command(place, "--dry-run", "--json"))
    assert (outcome.code, outcome.err) == (0, "")
    told = json.loads(outcome.out)
    assert (told["steps"], told["batch_windows"]) == (600, 16)
    assert told["device_memory_bytes"] > told["bytes_out"]
    shown = shell.run(*command(place, "--dry-run", "--steps", "3")).out
    assert "3 steps of 16 windows of 16 tokens, out of 80" in shown


def test_the_command(place, fitted, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(distilling, "fit_model", lambda *_, **__: fitted.fit)
    shell = Shell(capsys, tmp_path)
    outcome = shell.run(*command(place, tmp_path / "out", "--json", "-q"))
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out)["held_out_kl_after"] == fitted.fit.after
    assert sources.bits(sources.read(tmp_path / "out")) == sources.bits(
        sources.read(place / "fitted")
    )
    outcome = shell.run(*command(place, tmp_path / "out"))
    assert outcome.code == 1 and "exists and holds" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("distill", "a", "--teacher", "b", "--calibration", "c"), "no destination"),
        (("distill", "a", "b", "--calibration", "c"), "--teacher"),
        (("distill", "a", "b", "--teacher", "c"), "--calibration"),
        (("distill", "a", "b", "--teacher", "c", "--calibration", "d"), "d is no file"),
    ],
)
def test_wrong_usage(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    outcome = Shell(capsys, tmp_path).run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert outcome.err.count("error: ") == 1
