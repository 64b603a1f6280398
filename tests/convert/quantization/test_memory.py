"""How much is in memory at a time: of codes no more than a layer's, of all else no more either."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from convert.quantization import calibrated, rounding
from convert.quantization.calibration import prepare_calibration
from convert.quantization.recipe_file import read_recipe
from convert.quantization.tensors import part_of
from convert.quantization_plan import plan_quantization
from convert.quantize import quantize
from qwen_jax.config import QwenConfig
from tests.convert.quantization import models
from tests.convert.quantization.peaks import LAYER_BYTES, LAYERS

ROOT = Path(__file__).parents[3]


class Watch:
    """Which codes are alive whenever further ones are made.

    Attributes:
        alive: most bytes of codes and scales that were alive at once, by the part of the model
            that was then being made, and the part that they belong to.
    """

    def __init__(self) -> None:
        self.alive: dict[tuple[str, str], int] = {}
        self._made: list[tuple[str, int, weakref.ref[np.ndarray]]] = []

    def around(self, function):
        def packed(path, solved, scheme):
            found = function(path, solved, scheme)
            arrays = [array for array in found[:4] if array is not None]
            self._made += [(part_of(path), a.nbytes, weakref.ref(a)) for a in arrays]
            alive = Counter[str]()
            for part, nbytes, array in self._made:
                alive[part] += nbytes * (array() is not None)
            for part, nbytes in alive.items():
                now = part_of(path), part
                self.alive[now] = max(nbytes, self.alive.get(now, 0))
            return found

        return packed


@pytest.mark.parametrize("calibrated_run", [False, True])
def test_codes_of_a_layer_are_gone_when_the_next_is_made(tmp_path, monkeypatch, calibrated_run):
    source, watch = models.source(tmp_path / "source", **models.CALIBRATED), Watch()
    for module in (rounding, calibrated):
        monkeypatch.setattr(module, "packed", watch.around(module.packed))
    calibration = None
    if calibrated_run:
        config = QwenConfig.from_hf(source)
        calibration = prepare_calibration(
            [models.tokens(tmp_path)],
            source,
            config,
            windows=models.WINDOWS,
            window=models.WINDOW,
        )
    recipe = read_recipe(str(models.recipe(tmp_path, models.CALIBRATED_RULES)))
    plan = plan_quantization(source, recipe, calibration=calibration)
    quantize(plan, Path(tmp_path / "codes"), max_shard_bytes=1 << 30)
    order = ["embedding", "layer 0", "layer 1", "head"]
    assert {now for now, _ in watch.alive} == set(order)
    for now, part in watch.alive:
        # What was made just before may still be on its way to the disk.
        far = order.index(now) - order.index(part)
        assert watch.alive[now, part] == 0 or far in (0, 1), (now, part)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells of peaks")
def test_peak_memory_is_that_of_few_layers(tmp_path):
    """The writer has 4 pieces of 16 MB in its queue; the rest is what pages and allocator keep."""
    program = [sys.executable, "-m", "tests.convert.quantization.peaks", str(tmp_path)]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peaks = json.loads(run.stdout)
    assert peaks.keys() == {"quantize", "load"}
    assert max(peaks.values()) < 6 * LAYER_BYTES < LAYERS * LAYER_BYTES / 2
