"""What the built distributions hold, and that the wheel works where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.compiling import QUICK

ROOT = Path(__file__).parents[2]
DEMO = "qwen_jax/demo/"
REPORT = "qwen_jax/research/report.html.jinja"


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command that cannot see the checkout, and returns its standard output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(target: str, folder: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder, cwd=ROOT)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel, and its dependencies from the running environment.

    A folder named in a .pth file is searched for modules, but .pth files inside it are not read: so
    an editable install in the running environment does not lead back to the checkout.
    """
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    options = ("--python", python, "install", "--quiet", "--no-index", "--no-deps")
    run(sys.executable, "-m", "pip", *options, wheel, cwd=folder)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    return folder


def demo_sizes() -> dict[str, int]:
    files = {DEMO + path.name: path.stat().st_size for path in (ROOT / DEMO).iterdir()}
    assert any(name.endswith(".safetensors") for name in files)
    return files


def test_wheel_has_exactly_the_three_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "qwen_jax",
        "pallas_kernels",
        "convert",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }
    assert {"qwen_jax/py.typed", "pallas_kernels/py.typed"} <= set(names)


def test_wheel_has_the_demo_model(wheel):
    sizes = {entry.filename: entry.file_size for entry in zipfile.ZipFile(wheel).infolist()}
    assert {name: sizes.get(name) for name in demo_sizes()} == demo_sizes()


def test_wheel_has_the_data_files_of_its_packages(wheel):
    """Measured configurations, and the page of the routing report."""
    packages = [ROOT / name for name in ("qwen_jax", "pallas_kernels", "convert")]
    found = [path for package in packages for path in package.rglob("*.*") if path.is_file()]
    data = {
        path.relative_to(ROOT).as_posix() for path in found if path.suffix not in (".py", ".pyc")
    }
    assert {"pallas_kernels/tuning_data/nvidia-h200.json", REPORT} <= data
    assert data <= set(zipfile.ZipFile(wheel).namelist())


def test_installed_package_reads_the_measured_configurations(installed, tmp_path):
    code = (
        "import json; from pallas_kernels.tuning import packaged as p; "
        "print(len(json.loads(p('NVIDIA H200').read_text())['jax']))"
    )
    assert int(run(installed / "bin" / "python", "-c", code, cwd=tmp_path)) > 0


def test_source_distribution_has_the_demo_model_and_the_tests(tmp_path):
    sdist = build("sdist", tmp_path)
    prefix = sdist.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(sdist) as archive:
        sizes = {entry.name.removeprefix(prefix): entry.size for entry in archive}
    assert {name: sizes.get(name) for name in demo_sizes()} == demo_sizes()
    assert {"tests/conftest.py", "pyproject.toml", "LICENSE", "README.md"} <= set(sizes)


def test_installed_package_is_not_the_checkout(installed, tmp_path):
    python = installed / "bin" / "python"
    code = "import convert, pallas_kernels, qwen_jax as q; print(q.__file__, convert.__project__)"
    file, project = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed)
    assert project == "qwen-jax"


def test_installed_command_names_its_verbs(installed, tmp_path):
    assert "generate" in run(installed / "bin" / "qwen-jax", "--help", cwd=tmp_path)


def test_installed_package_generates_text(installed, tmp_path, monkeypatch):
    command = ["-m", "qwen_jax.cli", "generate", "demo"]
    options = ["--prompt", "And Moses said unto", "--max-tokens", "4"]
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    assert run(installed / "bin" / "python", *command, *options, cwd=tmp_path).strip()
