"""The command line `qwen-jax`: one module a verb, imported when the verb is called.

Text and JSON go to standard output, everything else to standard error. Exit code 0 is success, 1
failure, 2 wrong usage, 130 an interrupt. `measure` is what `bench` runs; it needs no terminal
library and serves `benchmarks/` too.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence

from ..errors import CacheFullError, CheckpointError, ConfigError, MemoryLimitError, RequestError
from .environment import DeviceError, prepare_environment

SUCCESS, FAILURE, USAGE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
FAILURES = (
    CheckpointError,
    ConfigError,
    MemoryLimitError,
    CacheFullError,
    DeviceError,
    FloatingPointError,
    OSError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code. Errors of users and of their files are one message on standard error; any
        other exception passes.
    """
    prepare_environment()
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    return guarded(lambda: _run(tokens))


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command; returns its exit code, and tells errors and warnings in one message each."""
    with warnings.catch_warnings():
        warnings.showwarning = _Warnings()
        try:
            code = command()
            sys.stdout.flush()
            return code or SUCCESS
        except RequestError as error:
            return _fail(error, USAGE)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            _discard_output()
            return BROKEN_PIPE
        except FAILURES as error:
            return _fail(error, FAILURE)
        except ExceptionGroup as error:
            return _fail(_refusal(error), FAILURE)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                advice = (
                    "use a shorter context, a smaller batch or prefill chunk, or dtype bfloat16"
                )
                return _fail(f"out of memory ({_first_line(error)}); {advice}", FAILURE)
            raise


def _run(tokens: list[str]) -> int | None:
    from cyclopts import CycloptsError

    from .app import app

    try:
        return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        program = " ".join(("qwen-jax", *(error.command_chain or ()), "--help"))
        raise RequestError(f"{str(error).rstrip('.')}; see {program}") from error


def _fail(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _refusal(error: ExceptionGroup) -> str:
    """What to say of an operation that no implementation takes; raises any other group again."""
    from pallas_kernels.dispatch import Refused

    if error.split(Refused)[1] is not None:
        raise error
    return (
        f"{error.message}. Leave out --implementation for the first that takes each "
        "call; inspect --kernels shows which that is"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


class _Warnings:
    """Shows each warning once, on one line: a configuration may be read more than once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        if text not in self._shown:
            self._shown.add(text)
            print(f"warning: {text}", file=sys.stderr)


def _discard_output() -> None:
    """Nobody reads standard output any more: keep the interpreter from trying again at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
