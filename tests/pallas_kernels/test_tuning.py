"""The measured configurations: every entry has a meaning, and calls find it."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pallas_kernels import block_attention, delta_rule, rms_norm, tuning
from pallas_kernels._compat import H200, Target


@dataclasses.dataclass
class Kernel:
    """A kernel with measured configurations.

    Attributes:
        operation: its package.
        kind: class of its configurations.
        configuration: (target, the call's arrays) -> what the kernel would run with.
    """

    operation: ModuleType
    kind: type
    configuration: Callable[..., Any]

    @property
    def specs(self) -> list[Any]:
        """The calls in its `specs.py`."""
        module = importlib.import_module(f"{self.operation.__name__}.specs")
        return list(module.SPECS.values())

    def keys(self, monkeypatch, specs) -> list[str]:
        """The keys that calls ask for."""
        asked = []
        with monkeypatch.context() as patch:
            patch.setattr(self.operation.config, "tuned", lambda *call: asked.append(call[2]))
            for spec in specs:
                self.configuration(H200, *spec.arguments())
        return asked


KERNELS = {
    "block_attention": Kernel(
        block_attention,
        block_attention.config.Config,
        lambda target, q, keys, _, table, *rest: block_attention.config.config_for(
            target, q, keys, table
        ),
    ),
    "delta_rule decode": Kernel(
        delta_rule,
        delta_rule.config.DecodeConfig,
        lambda target, *arrays: delta_rule.config.decode_config(
            target, arrays[0].shape[0], arrays[7]
        ),
    ),
    "delta_rule pass": Kernel(
        delta_rule,
        delta_rule.config.PassConfig,
        lambda target, *arrays: delta_rule.config.pass_config(target, arrays[0], arrays[7]),
    ),
    "rms_norm": Kernel(
        rms_norm,
        rms_norm.config.Config,
        lambda target, x, *rest: rms_norm.config.config_for(target, x),
    ),
}
ENTRIES = [
    (path.stem, kernel, key, fields)
    for path in sorted((Path(tuning.__file__).parent / "tuning_data").glob("*.json"))
    for kernel, shapes in json.loads(path.read_text()).items()
    for key, fields in shapes.items()
]


@pytest.mark.parametrize(("device", "name", "key", "fields"), ENTRIES)
def test_entries_are_configurations_of_shapes_in_the_specs(monkeypatch, device, name, key, fields):
    assert device == device.lower().replace(" ", "-")
    kernel = KERNELS[name]
    kernel.kind(**fields)
    assert key in kernel.keys(monkeypatch, kernel.specs)


@pytest.mark.parametrize(("device", "name", "key", "fields"), ENTRIES)
def test_entries_differ_from_the_heuristic(monkeypatch, device, name, key, fields):
    kernel = KERNELS[name]
    specs = kernel.specs
    measured = [spec for spec in specs if kernel.keys(monkeypatch, [spec]) == [key]]
    assert measured and device == "nvidia-h200"
    monkeypatch.setattr(tuning, "table", lambda kind: {})
    for spec in measured:
        assert kernel.configuration(H200, *spec.arguments()) != kernel.kind(**fields)


@pytest.mark.parametrize("name", KERNELS)
def test_calls_use_the_entry_of_their_shape(monkeypatch, name):
    kernel = KERNELS[name]
    spec = kernel.specs[0]
    (key,) = kernel.keys(monkeypatch, [spec])
    entry = {field.name: 1024 for field in dataclasses.fields(kernel.kind)}
    monkeypatch.setattr(tuning, "table", lambda kind: {name: {key: entry}})
    assert kernel.configuration(H200, *spec.arguments()) == kernel.kind(**entry)


def test_measured_entries_are_found_and_others_are_not():
    device, kernel, key, fields = ENTRIES[0]
    assert device == "nvidia-h200"
    assert tuning.tuned(kernel, H200, key) == fields
    assert tuning.tuned(kernel, H200, f"{key} and more") is None
    assert tuning.tuned("no kernel", H200, key) is None
    assert tuning.tuned(kernel, Target("gpu", "NVIDIA A100", 108, (8, 0)), key) is None
