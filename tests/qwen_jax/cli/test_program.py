"""The program around the verbs: help, version, exit codes, interrupts, environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import qwen_jax
from qwen_jax.cli import guarded
from qwen_jax.cli.environment import prepare_environment

ROOT = Path(__file__).parents[3]
VERBS = (
    "generate",
    "chat",
    "inspect",
    "bench",
    "perplexity",
    "divergence",
    "evaluate",
    "routing",
    "train",
    "tune",
)
COMMAND = (sys.executable, "-m", "qwen_jax.cli")


def start(*arguments: str, **options) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, **(pipes | options))


def test_help_names_the_verbs(run):
    outcome = run("--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert [verb for verb in VERBS if verb not in outcome.out] == []
    assert run() == outcome


@pytest.mark.parametrize("verb", VERBS)
def test_verb_has_help(run, verb):
    outcome = run(verb, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"Usage: qwen-jax {verb} ")


def test_version(run):
    assert run("--version") == (0, f"{qwen_jax.__version__}\n", "")


@pytest.mark.parametrize("arguments", [("--help",), *((verb, "--help") for verb in VERBS)])
def test_help_loads_no_jax_and_answers_within_a_second(arguments):
    program = (
        "import sys\n"
        "from qwen_jax.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "assert 'jax' not in sys.modules\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *arguments]
    # Processor time, as the machine may be busy with something else.
    before = os.times()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = os.times()
    seconds = sum(after[2:4]) - sum(before[2:4])
    assert 0 < seconds < 1, f"{arguments} took {seconds} s"


def test_exit_code_reaches_the_shell():
    done = subprocess.run(
        [*COMMAND, "inspect", "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no folder and no preset 'nothing'")


def test_device_that_is_not_there_is_a_failure():
    command = [*COMMAND, "generate", "demo", "--prompt", "a"]
    environment = os.environ | {"JAX_PLATFORMS": "nonsense"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: JAX finds no device (JAX_PLATFORMS is 'nonsense'" in done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_that_are_not_utf8_are_refused():
    command = [*COMMAND, "generate", "demo", "--prompt", b"\xff\xfe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "not valid Unicode" in done.stderr and "Traceback" not in done.stderr


def test_reader_that_leaves_is_no_error():
    process = start("inspect", "qwen3-30b-a3b")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert (process.returncode, err) == (141, b"")


def test_interrupt_ends_with_130():
    # Where tests run in the background it may be ignored, which a new process would inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = start("chat", "demo")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    for line in process.stderr:
        if b"/reset" in line:  # it waits for the first turn now
            break
    process.send_signal(signal.SIGINT)
    process.wait(60)  # `communicate` closes its input, and an end of input is no interrupt
    out, err = process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert err.strip() == b"interrupted"


def test_warning_is_one_line_and_shown_once(capsys):
    def command() -> None:
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("mind this", UserWarning, stacklevel=1)

    assert guarded(command) == 0
    assert capsys.readouterr() == ("", "warning: mind this\n")


def test_unexpected_error_passes():
    def command() -> None:
        raise RuntimeError("a fault of ours")

    with pytest.raises(RuntimeError, match="a fault of ours"):
        guarded(command)


@pytest.fixture
def environment(monkeypatch, tmp_path) -> Path:
    for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_", "TF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_compiled_programs_are_kept_in_the_users_cache(environment):
    prepare_environment()
    folder = environment / "qwen-jax" / "xla"
    assert folder.is_dir()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)


def test_users_settings_win(environment, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    prepare_environment()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert not (environment / "qwen-jax").exists()


def test_home_that_cannot_be_written_leaves_the_cache_off(environment, monkeypatch):
    blocked = environment / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    prepare_environment()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
