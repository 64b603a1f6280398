"""Compile the kernels for a GPU on a machine without one.

XLA compiles for a described device as far as machine code, so this finds what lowering alone does
not: too much shared memory, spilled registers. It needs the CUDA plugin and NVIDIA's assembler
beside JAX, but no driver. Of CUDA 12, or of CUDA 13, the first two of JAX's version:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
    python benchmarks/kernels/compile_for_gpu.py [--device NAME] [--only PART_OF_A_NAME]
        [--output FILE]

Prints a line a kernel. "programs" is how many of them registers and shared memory let reside on one
multiprocessor. Exits with 1 if something does not compile.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernels.devices import DEVICES, Device

# Each has `specs.SPECS`: by name, objects with `arguments()` (shapes and dtypes) and `settings()`.
OPERATIONS = (
    "attention_inputs",
    "block_attention",
    "delta_rule",
    "dequant_matmul",
    "expert_dispatch",
    "flash_attention",
    "rms_norm",
    "router",
)

KERNELS = ("triton", "mosaic_gpu")
# Label, function, and shapes and dtypes of its arguments.
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def main() -> int:
    """Compile what the arguments select and print what came out."""
    parser = argparse.ArgumentParser(description="Compile the kernels for a GPU without having it.")
    parser.add_argument("--device", choices=DEVICES, default="h200", help="default: h200")
    parser.add_argument("--only", default="", help="part of the name of the cases to compile")
    parser.add_argument("--output", type=Path, help="file to write the figures to, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as dump:
        _set_environment(Path(dump))
        selected = list(cases(args.only, DEVICES[args.device]))
        if not selected:
            parser.error(f"no case has {args.only!r} in its name")
        assembler = _assembler()
        try:
            output = None if args.output is None else args.output.open("w")
        except OSError as error:
            parser.error(f"--output {args.output}: {error.strerror}")
        figures, failures = _compile_all(selected, DEVICES[args.device], assembler, Path(dump))
    if output is not None:
        with output:
            output.write(json.dumps(figures, indent=2) + "\n")
    return 1 if failures else 0


def cases(only: str, device: Device) -> Iterator[Case]:
    """Name, function and arguments of each case whose name holds `only`, by all our kernels."""
    for operation in OPERATIONS:
        run = importlib.import_module(f"pallas_kernels.{operation}.api").OPERATION
        specs = importlib.import_module(f"pallas_kernels.{operation}.specs").SPECS
        for name, spec in specs.items():
            arguments, settings = spec.arguments(), spec.settings()
            for backend in KERNELS:
                label = f"{operation}: {name}" + ("" if backend == KERNELS[0] else f", {backend}")
                taken = functools.partial(run.choose, implementation=backend, target=device.target)
                # What Triton does not take is an error, when it is compiled.
                if only not in label or (
                    backend != KERNELS[0] and taken(*arguments, **settings).chosen is None
                ):
                    continue
                yield label, functools.partial(run, implementation=backend, **settings), arguments


def _set_environment(dump: Path) -> None:
    """What XLA reads on import."""
    flags = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ["MOSAIC_GPU_DUMP_PTX"], os.environ["MOSAIC_GPU_DUMP_TO"] = "1", str(dump)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _compile_all(
    selected: list[Case], device: Device, assembler: Path, dump: Path
) -> tuple[list[dict[str, Any]], int]:
    """Figures of all kernels, and the number of cases that do not compile."""
    import jax
    from jax.experimental import topologies

    from pallas_kernels import _compat

    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=device.text, topology="1x1x1"
        )
    except Exception as error:
        raise SystemExit(f"the CUDA plugin is missing ({error}): {_command()}") from None
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    figures, failures, known = [], 0, set()
    for label, call, arguments in selected:
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
        )
        try:
            with (
                _compat.targeting(device.target),
                _compat.deprecation_expected(),
                jax.set_mesh(mesh),
            ):
                jax.jit(call).lower(*shapes).compile()
        except Exception as error:
            print(f"{label}\n    does not compile: {error}", flush=True)
            failures += 1
            continue
        files = sorted(set(dump.iterdir()) - known)
        known.update(files)
        print(label, flush=True)
        for kernel in _kernels(files, device, assembler):
            print("    " + "  ".join(f"{key} {value}" for key, value in kernel.items()), flush=True)
            figures.append({"case": label, **kernel})
    return figures, failures


def _assembler() -> Path:
    """Of CUDA 13, whose packages share a folder, or of CUDA 12, where each has its own."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return path
    raise SystemExit(f"NVIDIA's assembler is missing: {_command()}")


def _command() -> str:
    from importlib.metadata import version

    def plugins(cuda: int) -> str:
        names = (f"jax-cuda{cuda}-{part}=={version('jax')}" for part in ("plugin", "pjrt"))
        return f"pip install --no-deps {' '.join(names)}"

    return f"{plugins(12)} nvidia-cuda-nvcc-cu12, or {plugins(13)} nvidia-cuda-nvcc nvidia-nvvm"


def _kernels(files: list[Path], device: Device, assembler: Path) -> Iterator[dict[str, Any]]:
    """What XLA and the assembler say of each kernel of one compiled program."""
    launches = "".join(f.read_text() for f in files if f.name.endswith("thunk_sequence.txt"))
    for path in (f for f in files if f.suffix == ".ptx"):
        command = [assembler, "-v", f"-arch={device.architecture}", path, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for name in re.findall(r"\.entry (\w+)", path.read_text()):
            launch = re.search(
                rf"{name} +grid: \[([\d, ]+)\] +threads: \[(\d+).*shared_memory: (\d+)", launches
            )
            grid, threads, shared = launch.groups() if launch else _of_mosaic(path, device)
            if threads is None:
                continue
            own = report[report.index(f"for {name}\n") :]
            registers = int(re.findall(r"Used (\d+) registers", own)[0])
            spills = sum(map(int, re.findall(r"(\d+) bytes spill", own)[:2]))
            # Each instruction of the tensor cores is waited for then.
            serial = re.search(rf"wgmma\S* instructions are serialized .*'{name}'", report)
            threads, shared = int(threads), int(shared)
            yield {
                "kernel": name,
                "grid": grid.replace(", ", "x"),
                "threads": threads,
                "registers": registers,
                "shared": shared,
                "spills": spills,
                "serial": bool(serial),
                "programs": device.resident(registers, shared, threads),
            }


def _of_mosaic(path: Path, device: Device) -> tuple[Any, Any, Any]:
    """Grid, threads and shared memory of a kernel that XLA does not know; None if it is none."""
    resources = path.with_suffix(".resources.txt")
    if not resources.exists():
        return None, None, None
    threads = re.findall(r"\.maxntid (\d+)", path.read_text())[0]
    shared = re.findall(r"smem_scratch_bytes=(\d+)", resources.read_text())[0]
    return str(device.target.cores), threads, shared


if __name__ == "__main__":
    sys.exit(main())
