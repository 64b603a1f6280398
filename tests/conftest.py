"""Rules of every test run: CPU by default, strict numerics, checked shapes, no network."""

from __future__ import annotations

import gc
import importlib.util
import ipaddress
import os
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import compiling

SHAPE_CHECKED = (
    "qwen_jax.model",
    "qwen_jax.cache",
    "qwen_jax.decode",
    "qwen_jax.evaluate",
    "qwen_jax.research",
    "pallas_kernels",
)


def _check_shapes() -> None:
    """Checks jaxtyping annotations at each call."""
    if importlib.util.find_spec("beartype"):
        from jaxtyping import install_import_hook

        install_import_hook(SHAPE_CHECKED, "beartype.beartype")


# Here and not in pytest_configure: conftest files of subfolders may be imported before that, and
# they import what is to be checked.
_check_shapes()


def pytest_configure(config: pytest.Config) -> None:
    _set_environment(config)
    _set_hypothesis_profile()
    if not _selects_gpu(config):
        compiling.emit_quickly()

    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # JAX may have been imported already, and then has not seen the environment.
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    # A folder of its own: a key does not tell how code was emitted.
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "tests"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    # Compiling takes half the time; numbers agree to rounding, which is what tests ask of them.
    # Users' programs are optimised, as where `optimised` is asked for; what users run to the last
    # instruction is what programs that tests start run.
    jax.config.update("jax_disable_most_optimizations", not _selects_gpu(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live as long as the process: no search for garbage looks at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Tracing makes many objects, of which few refer to each other: a search for each 700 new
        # ones took an eighth of the time.
        gc.set_threshold(50_000, 20, 20)


def _selects_gpu(config: pytest.Config) -> bool:
    return "gpu" in config.getoption("markexpr").replace("not gpu", "")


def _set_environment(config: pytest.Config) -> None:
    """Sets what JAX reads on import, for the processes that tests start."""
    if not _selects_gpu(config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    # A cache of this run only: command-line tests share what they compile, and no program built
    # by another version or for another machine is ever loaded.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = tempfile.TemporaryDirectory(prefix="qwen-jax-compiled-", ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"


def _set_hypothesis_profile() -> None:
    """Same examples in every run, and no deadline: the first call of a jitted function compiles."""
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import settings

        settings.register_profile("qwen-jax", deadline=None, derandomize=True, database=None)
        settings.load_profile("qwen-jax")


def pytest_report_header() -> str:
    import jax

    return f"jax {jax.__version__} on {jax.default_backend()}: {jax.devices()[0].device_kind}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    import jax

    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip(f"needs a GPU, and JAX sees {jax.default_backend()}; select with `-m gpu`")
    if item.get_closest_marker("reference") and not importlib.util.find_spec("transformers"):
        pytest.skip("needs torch and transformers")


@pytest.fixture(scope="session", autouse=True)
def _loopback_only() -> Iterator[None]:
    """Refuses every connection but those to this machine."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def checked_connect(self: socket.socket, address: Any) -> None:
        _refuse_remote(self, address)
        connect(self, address)

    def checked_connect_ex(self: socket.socket, address: Any) -> int:
        _refuse_remote(self, address)
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", checked_connect)
        patch.setattr(socket.socket, "connect_ex", checked_connect_ex)
        yield


def _refuse_remote(connection: socket.socket, address: Any) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    host = address[0]
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        connection.close()
        raise RuntimeError(f"a test tried to connect to {host}; tests use no network")


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The folder of the model that the package brings along."""
    import qwen_jax

    return Path(qwen_jax.__path__[0]) / "demo"


@pytest.fixture(scope="session")
def tokenizer(demo_path: Path) -> Any:
    """That model's."""
    from qwen_jax.text import Tokenizer

    found = Tokenizer.from_folder(demo_path)
    assert found is not None
    return found


@pytest.fixture
def optimised() -> Iterator[None]:
    """Compile as users do: for tests of how much memory a program takes, or that compute much."""
    with compiling.optimised():
        yield
