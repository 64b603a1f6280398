"""A process that is killed in the middle of a save loses nothing that was saved before."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qwen_jax.train import TrainState
from qwen_jax.train.checkpoint import Checkpoints

SIZE = 50_000_000
PROGRAM = f"""
import sys
from pathlib import Path
import jax.numpy as jnp
from qwen_jax.train import TrainState
from qwen_jax.train.checkpoint import Checkpoints

checkpoints = Checkpoints(Path(sys.argv[1]), {{"run": 1}})
for step in (1, 2):
    value = jnp.arange({SIZE}, dtype=jnp.float32) * jnp.float32(step)
    checkpoints.save(TrainState(jnp.int32(step), {{"w": value}}, ()))
    print("saved", step, flush=True)
"""


def size(folder: Path) -> int:
    found = 0
    for file in folder.rglob("*"):
        try:
            found += file.stat().st_size
        except FileNotFoundError:  # renamed meanwhile
            continue
    return found


@pytest.mark.slow
def test_a_killed_save_loses_nothing(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "saved")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "saved 1\n"
    whole = size(tmp_path / "saved")
    deadline = time.monotonic() + 60
    # Some of the second one is there, and not all of it.
    while size(tmp_path / "saved") < 1.1 * whole and time.monotonic() < deadline:
        time.sleep(0.001)
    child.kill()
    assert "saved 2" not in child.communicate()[0]
    with Checkpoints(tmp_path / "saved", {"run": 1}) as checkpoints:
        assert checkpoints.latest == 1
        state = TrainState(jnp.int32(0), {"w": jnp.zeros(SIZE)}, ())
        found = checkpoints.restore(state)
        np.testing.assert_array_equal(found.trained["w"], np.arange(SIZE, dtype=np.float32))
        checkpoints.save(TrainState(jnp.int32(2), {"w": jnp.ones(SIZE)}, ()))
        assert float(checkpoints.restore(state).trained["w"][0]) == 1.0
