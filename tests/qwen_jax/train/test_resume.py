"""A run that is interrupted, and one that is not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.errors import CheckpointError, RequestError
from qwen_jax.quant import QTensor
from qwen_jax.sharding import device_mesh
from qwen_jax.train import Data, NextTokens, Schedule, Trainer, Training, TrainState, split
from qwen_jax.train.checkpoint import Checkpoints, fingerprint
from qwen_jax.train.lora import Lora
from qwen_jax.train.metrics import MetricsFile
from qwen_jax.train.run import Run


@pytest.fixture(scope="module")
def run(skeleton, parameters, batch) -> Run:
    """Six steps in pairs, with random draws in each."""
    training = Training(objective=NextTokens(balance=0.01), expert_dropout=0.3, recompute=False)
    tokens = np.random.default_rng(8).integers(0, 61, 200).astype(np.int32)
    parts = split(parameters, ["*.mlp.*", "*norm*"])
    return Run(
        trainer=Trainer(skeleton, training),
        data=Data(tokens, rows=2, window=11),
        schedule=Schedule(steps=6, rate=1e-2, warmup=2),
        fixed=parts.fixed,
        held_out=[batch],
        look_every=2,
        save_every=2,
        at_once=2,
    )


def test_only_what_is_trained_is_in_the_state(run, beginning):
    trained = beginning().trained
    assert set(trained) | set(run.fixed) == {name for name, *_ in run.trainer.skeleton.variables}
    assert not set(trained) & set(run.fixed)
    assert "layers.0.mlp.gate.weight" in trained


class Interrupted(Exception):
    """Raised in the middle of a run."""


@pytest.fixture(scope="module")
def beginning(run, parameters):
    """Makes the state before the first step."""
    trained = split(parameters, ["*.mlp.*", "*norm*"]).trained
    return lambda: run.trainer.start(trained)


def bits(state: TrainState) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def goes_on(run: Run, state: TrainState, folder: Path, stop_after: int | None = None):
    """Runs with checkpoints and figures; from the newest checkpoint if there is one."""

    def tell(step: int, figures: object) -> None:
        if step == stop_after:
            raise Interrupted

    with Checkpoints(folder / "checkpoints", run.identity(state)) as checkpoints:
        if checkpoints.latest is not None:
            state = checkpoints.restore(state)
        metrics = MetricsFile(folder / "metrics.jsonl", int(state.step))
        try:
            return run.go(state, checkpoints=checkpoints, metrics=metrics, tell=tell)
        finally:
            metrics.close()


@pytest.fixture(scope="module")
def whole(run, beginning, tmp_path_factory):
    """The uninterrupted run: its folder and its last state."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, goes_on(run, beginning(), folder)


def test_an_interrupted_run_ends_bit_for_bit_where_the_other_did(run, beginning, whole, tmp_path):
    with pytest.raises(Interrupted):
        goes_on(run, beginning(), tmp_path, stop_after=2)
    # Two steps more, of which nothing is saved: they are taken again.
    with pytest.raises(Interrupted):
        goes_on(dataclasses.replace(run, save_every=6), beginning(), tmp_path, stop_after=4)
    state = goes_on(run, beginning(), tmp_path)
    assert int(state.step) == 6
    assert bits(state) == bits(whole[1])
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert lines == (whole[0] / "metrics.jsonl").read_text()
    figures = [json.loads(line) for line in lines.splitlines()]
    assert [line["step"] for line in figures] == [1, 2, 3, 4, 5, 6]
    assert [line["held_out"] is None for line in figures] == [True, False] * 3
    assert {"loss", "balance", "gradient_norm", "rate"} <= figures[0].keys()
    assert figures[-1]["held_out"] < figures[1]["held_out"]


def test_the_newest_two_are_kept(whole):
    names = {path.name for path in (whole[0] / "checkpoints").iterdir()}
    assert {"4", "6"} <= names
    assert "2" not in names


def test_another_run_is_refused(run, skeleton, beginning, whole):
    state = beginning()
    changed = {
        "schedule.rate was 0.01, now 0.1": {"schedule": Schedule(6, 0.1, 2)},
        "data was": {"data": dataclasses.replace(run.data, seed=1)},
        "fixed was": {"fixed": {name: value + 1 for name, value in run.fixed.items()}},
        "assemble.Lora.alpha was None, now 4.0": {
            "trainer": Trainer(skeleton, run.trainer.training, Lora(rank=1, alpha=4.0).merged)
        },
        "mesh.data was None, now 1": {
            "trainer": Trainer(skeleton, run.trainer.training, mesh=device_mesh(1))
        },
    }
    for message, change in changed.items():
        other = dataclasses.replace(run, **change)
        with (
            Checkpoints(whole[0] / "checkpoints", other.identity(state)) as checkpoints,
            pytest.raises(CheckpointError, match=f"of another run: .*{message}"),
        ):
            checkpoints.restore(state)


def test_a_save_that_was_cut_short_is_no_checkpoint(run, beginning, whole, tmp_path):
    import shutil

    folder = tmp_path / "checkpoints"
    shutil.copytree(whole[0] / "checkpoints", folder)
    for mark in (folder / "6").rglob("commit_success.txt"):
        mark.unlink()
    (folder / "6").rename(folder / "6.orbax-checkpoint-tmp")
    with Checkpoints(folder, run.identity(beginning())) as checkpoints:
        assert checkpoints.latest == 4
        assert int(checkpoints.restore(beginning()).step) == 4


def test_nothing_to_go_on_from(run, beginning, tmp_path):
    state = beginning()
    with (
        Checkpoints(tmp_path / "none", run.identity(state)) as checkpoints,
        pytest.raises(CheckpointError, match="holds no checkpoint"),
    ):
        checkpoints.restore(state)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match="file is a file; checkpoints need a folder"):
        Checkpoints(file, run.identity(state))


def test_nothing_to_look_at(run, beginning):
    with pytest.raises(RequestError, match="nothing is held out"):
        dataclasses.replace(run, held_out=()).look(beginning())


def test_a_loss_that_is_no_number_ends_the_run(run, beginning):
    state = beginning()
    broken = {name: value * np.float32("nan") for name, value in run.fixed.items()}
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        dataclasses.replace(run, fixed=broken).go(state)


def test_a_gradient_that_is_no_number_ends_the_run_before_it_is_saved(run, beginning, monkeypatch):
    state = beginning()

    def steps(*given):
        figures = {"loss": np.ones(2), "gradient_norm": np.array([1.0, np.inf])}
        return dataclasses.replace(state, step=state.step + 2), figures

    monkeypatch.setattr(run.trainer, "steps", steps)
    with pytest.raises(FloatingPointError, match="the norm of the gradient of step 2 is inf"):
        run.go(state)


def test_numbers_that_do_not_fit(run):
    with pytest.raises(RequestError, match="at_once is 4; accepted are divisors of 6"):
        dataclasses.replace(run, at_once=4, look_every=0, save_every=0)
    with pytest.raises(RequestError, match="save_every is 3; accepted are 0 and multiples of 2"):
        dataclasses.replace(run, save_every=3)
    foreign = dataclasses.replace(run.data, tokens=run.data.tokens + 1000)
    with pytest.raises(RequestError, match=r"the text has ids from 10.*encode it with"):
        dataclasses.replace(run, data=foreign)


def test_figures_of_a_file_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    metrics = MetricsFile(path, 2)
    metrics.write(3, {"loss": [1.0], "held_out": [float("nan")]})
    metrics.close()
    assert path.read_text().splitlines() == [
        '{"step": 1, "loss": 2.0}',
        '{"step": 3, "loss": 1.0, "held_out": null}',
    ]
    path.write_text('{"not": "one"}\n')
    with pytest.raises(RequestError, match="no line of a run's figures"):
        MetricsFile(path, 2)


def test_a_fingerprint_sees_every_place_of_every_array():
    """Arrays of the same numbers elsewhere have another one; so has a code's part in another's."""
    numbers = jnp.arange(12, dtype=jnp.float32).reshape(3, 4)
    codes, scale = jnp.ones((2, 1, 2), jnp.uint32), jnp.ones((2, 1), jnp.bfloat16)
    coded = QTensor(codes, scale, 3 * scale, None, inputs=8, group_size=8)
    first = {"a": numbers, "b": 2 * numbers, "c": coded}
    assert fingerprint(first) == fingerprint(dict(reversed(jax.tree.map(jnp.array, first).items())))
    others = [
        first | {"a": numbers[::-1]},
        first | {"a": numbers.at[0, 0].set(-0.0)},
        first | {"a": numbers.reshape(4, 3)},
        first | {"a": numbers.astype(jnp.bfloat16)},
        first | {"a": 2 * numbers, "b": numbers},
        {name.replace("b", "d"): value for name, value in first.items()},
        first | {"c": dataclasses.replace(coded, scale=3 * scale, zero=scale)},
        first | {"c": dataclasses.replace(coded, zero=None, input_scale=coded.zero)},
        {"a": first["a"], "b": first["b"]},
    ]
    found = [fingerprint(each) for each in (first, *others)]
    assert len(set(found)) == len(found)
    assert len(fingerprint({"step": jnp.int32(3)})) == 64
