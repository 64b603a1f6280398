"""Compile the kernels for an H200 on a machine without a GPU.

XLA compiles for a described device as far as machine code, so this finds what lowering alone does
not: too much shared memory, spilled registers. It needs the CUDA plugin and NVIDIA's assembler
beside JAX, but no driver:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12   # JAX's version
    python benchmarks/kernels/compile_h200.py [--only PART_OF_A_NAME] [--output FILE]

Prints a line a kernel. "programs" is how many of them registers and shared memory let reside on one
multiprocessor. Exits with 1 if something does not compile.
"""

from __future__ import annotations

import argparse
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

# Each has `specs.SPECS`: by name, objects with `arguments()` (shapes and dtypes) and `settings()`.
OPERATIONS = ("attention_inputs", "block_attention", "delta_rule", "flash_attention", "rms_norm")

# What an H200 says of itself.
TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
  platform_version: "Compute Capability 9.0a"
}
"""
REGISTERS, SHARED, THREADS, RESERVED = 65536, 233472, 2048, 1024


def main() -> int:
    """Compile what the arguments select and print what came out."""
    parser = argparse.ArgumentParser(description="Compile the kernels for an H200 without a GPU.")
    parser.add_argument("--only", default="", help="part of the name of the cases to compile")
    parser.add_argument("--output", type=Path, help="file to write the figures to, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as dump:
        _set_environment(Path(dump))
        figures, failures = _compile_all(args.only, Path(dump))
    if args.output is not None:
        args.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if failures or not figures else 0


def cases(only: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Name, function and arguments of each case whose name holds `only`."""
    for operation in OPERATIONS:
        run = importlib.import_module(f"pallas_kernels.{operation}.api").OPERATION
        specs = importlib.import_module(f"pallas_kernels.{operation}.specs").SPECS
        for name, spec in specs.items():
            label = f"{operation}: {name}"
            if only not in label:
                continue

            def call(*arrays: Any, run=run, spec=spec) -> Any:
                return run(*arrays, implementation="triton", **spec.settings())

            yield label, call, spec.arguments()


def _set_environment(dump: Path) -> None:
    """What XLA reads on import."""
    flags = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _compile_all(only: str, dump: Path) -> tuple[list[dict[str, Any]], int]:
    """Figures of all kernels, and the number of cases that do not compile."""
    import jax
    from jax.experimental import topologies

    from pallas_kernels import _compat

    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assembler = _assembler()
    figures, failures, known = [], 0, set()
    for label, call, arguments in cases(only):
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
        )
        try:
            with (
                _compat.targeting(_compat.H200),
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
        for kernel in _kernels(files, assembler):
            print("    " + "  ".join(f"{key} {value}" for key, value in kernel.items()), flush=True)
            figures.append({"case": label, **kernel})
    return figures, failures


def _assembler() -> Path:
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    for folder in spec.submodule_search_locations or () if spec else ():
        if (path := Path(folder) / "bin" / "ptxas").exists():
            return path
    raise SystemExit("ptxas is missing: pip install --no-deps nvidia-cuda-nvcc-cu12")


def _kernels(files: list[Path], assembler: Path) -> Iterator[dict[str, Any]]:
    """What XLA and the assembler say of each kernel of one compiled program."""
    launches = "".join(f.read_text() for f in files if f.name.endswith("thunk_sequence.txt"))
    for path in (f for f in files if f.suffix == ".ptx"):
        command = [assembler, "-v", "-arch=sm_90a", path, "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for name in re.findall(r"\.entry (\w+)", path.read_text()):
            launch = re.search(
                rf"{name} +grid: \[([\d, ]+)\] +threads: \[(\d+).*shared_memory: (\d+)", launches
            )
            if launch is None:
                continue
            own = report[report.index(f"for {name}\n") :]
            registers = int(re.findall(r"Used (\d+) registers", report)[0])
            spills = sum(map(int, re.findall(r"(\d+) bytes spill", own)[:2]))
            grid, threads, shared = launch[1], int(launch[2]), int(launch[3])
            resident = min(
                REGISTERS // (-(-registers // 8) * 8 * threads),
                SHARED // (shared + RESERVED),
                THREADS // threads,
            )
            yield {
                "kernel": name,
                "grid": grid.replace(", ", "x"),
                "threads": threads,
                "registers": registers,
                "shared": shared,
                "spills": spills,
                "programs": resident,
            }


if __name__ == "__main__":
    sys.exit(main())
