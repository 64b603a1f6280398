"""What each package may import beyond the standard library, and what `import qwen_jax` may load.

The order of the layers among each other is in pyproject.toml, for import-linter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = "jax flax numpy ml_dtypes safetensors tokenizers jinja2 jaxtyping".split()
NEVER_LOADED = (
    "cyclopts rich msgspec huggingface_hub torch transformers matplotlib convert qwen_jax.cli"
).split()


def imported_names(node: ast.AST, package: list[str], *, in_functions: bool) -> Iterator[str]:
    """Yields the dotted name of each import that runs, relative ones resolved against `package`."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import():
                yield from (alias.name for alias in child.names)
            case ast.ImportFrom():
                parent = package[: len(package) + 1 - child.level] if child.level else []
                parts = [*parent, *filter(None, [child.module])]
                yield from (".".join([*parts, alias.name]) for alias in child.names)
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not in_functions:
                continue
            case _:
                yield from imported_names(child, package, in_functions=in_functions)


def violations(
    folder: str, allowed: list[str], *, in_functions: bool, skip: tuple[str, ...] = ()
) -> list[str]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT)
        if any(relative.is_relative_to(part) for part in skip):
            continue
        package = list(relative.parent.parts)
        for name in imported_names(ast.parse(path.read_text()), package, in_functions=in_functions):
            accepted = any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
            if not accepted and name.partition(".")[0] not in sys.stdlib_module_names:
                found.append(f"{relative} imports {name}")
    return found


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        # Of jaxlib, what `jax.extend.mlir` leaves out.
        ("pallas_kernels", ["pallas_kernels", "jax", "jaxlib.mlir", "numpy", "jaxtyping"]),
        ("qwen_jax/text", ["qwen_jax.text", "qwen_jax.errors", "tokenizers", "jinja2"]),
    ],
)
def test_package_stands_alone(folder, allowed):
    assert violations(folder, allowed, in_functions=True) == []


def test_modules_need_only_core_dependencies_to_be_imported():
    found = violations(
        "qwen_jax",
        ["qwen_jax", "pallas_kernels", *CORE],
        in_functions=False,
        skip=("qwen_jax/cli", "qwen_jax/serve"),
    )
    assert found == []


def test_public_names_load_no_optional_module():
    # flax itself loads rich, so what flax loads is set aside.
    program = """
import sys
import flax.nnx
already = set(sys.modules)
import qwen_jax
for name in qwen_jax.__all__:
    getattr(qwen_jax, name)
print(*set(sys.modules) - already)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert sorted(set(run.stdout.split()).intersection(NEVER_LOADED)) == []


def test_import_rule_reader_sees_each_form():
    source = """
import jax.numpy as jnp
from . import rope
from ..errors import ConfigError
from numpy import array
if TYPE_CHECKING:
    import torch
def load():
    import huggingface_hub
"""
    package = ["qwen_jax", "model"]
    at_import = list(imported_names(ast.parse(source), package, in_functions=False))
    assert at_import == [
        "jax.numpy",
        "qwen_jax.model.rope",
        "qwen_jax.errors.ConfigError",
        "numpy.array",
    ]
    everywhere = list(imported_names(ast.parse(source), package, in_functions=True))
    assert everywhere == [*at_import, "huggingface_hub"]
