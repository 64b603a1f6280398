"""Conversion at real scale: speed beside a plain copy of the same bytes, and memory.

Writes synthetic folders of random values in the exact layout of a part of Qwen3.6-35B-A3B (its
first layers, embedding, head and MTP head), once as released in bf16, once as the FP8 release has
them. Then copies and converts each in turn, files dropped from the page cache before every run.

python benchmarks/conversion.py --work-dir /data --output benchmarks/results/cpu/conversion.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.synthetic import PRESET, write_source
from qwen_jax.cli.console import size, table
from qwen_jax.cli.provenance import provenance

ROOT = Path(__file__).parents[1]
CHUNK = 16 << 20
# Enough layers that each folder has more than 8 GB.
LAYERS = {"bf16": 4, "fp8": 8}


def main() -> int:
    """Measure both layouts, print a table, keep the figures."""
    arguments = _parser().parse_args()
    figures = {}
    for layout in arguments.layouts:
        with tempfile.TemporaryDirectory(dir=arguments.work_dir) as folder:
            figures[layout] = _measure(layout, Path(folder), arguments.trials)
            print(table(_rows(layout, figures[layout])), flush=True)
    result = {
        "benchmark": "conversion",
        **provenance([sys.executable, *sys.argv]),
        "request": {"preset": PRESET, "trials": arguments.trials},
        "figures": figures,
    }
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure conversion beside a plain copy.")
    parser.add_argument("--work-dir", type=Path, help="where to write; the temporary folder if not")
    parser.add_argument("--layouts", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file to write the JSON result to")
    return parser


def _measure(layout: str, folder: Path, trials: int) -> dict[str, Any]:
    source = folder / "source"
    write_source(source, LAYERS[layout], "fused" if layout == "bf16" else "per_expert", layout)
    read = sum(file.stat().st_size for file in source.iterdir())
    copied, converted, written = [], [], 0
    for _ in range(trials):
        _forget(source)
        run = _convert(source, folder / "converted")
        written = sum(file.stat().st_size for file in (folder / "converted").iterdir())
        converted.append(run)
        shutil.rmtree(folder / "converted")
        _forget(source)
        copied.append(_copy(source, folder / "copy", written))
        (folder / "copy").unlink()
    seconds = statistics.median(run["seconds"] for run in converted)
    copy = statistics.median(copied)
    return {
        "layers": LAYERS[layout],
        "bytes_read": read,
        "bytes_written": written,
        "copy_seconds": copied,
        "convert": converted,
        "copy_bytes_per_second": (read + written) / copy,
        "convert_bytes_per_second": (read + written) / seconds,
        "share_of_copy": copy / seconds,
        "peak_anonymous_bytes": max(run["peak_anonymous_bytes"] for run in converted),
        "peak_resident_bytes": max(run["peak_resident_bytes"] for run in converted),
    }


def _rows(layout: str, figures: dict[str, Any]) -> dict[str, str]:
    return {
        "source": f"{layout}, {figures['layers']} layers of {PRESET}, random values",
        "read, written": f"{size(figures['bytes_read'])}, {size(figures['bytes_written'])}",
        "plain copy": f"{size(figures['copy_bytes_per_second'])}/s (read and written)",
        "conversion": f"{size(figures['convert_bytes_per_second'])}/s "
        f"= {figures['share_of_copy']:.0%} of the copy",
        "peak anonymous memory": size(figures["peak_anonymous_bytes"]),
        "peak resident memory": f"{size(figures['peak_resident_bytes'])}, mapped pages included",
    }


def _convert(source: Path, destination: Path) -> dict[str, Any]:
    """Runs the command in a process of its own, and watches its memory."""
    command = [sys.executable, "-m", "convert", str(source), str(destination), "--quiet"]
    begin = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    anonymous, usage = 0, None
    while usage is None or not usage[0]:
        anonymous = max(anonymous, _anonymous_bytes(process.pid))
        time.sleep(0.02)
        usage = os.wait4(process.pid, os.WNOHANG)
    seconds = time.perf_counter() - begin
    status = os.waitstatus_to_exitcode(usage[1])
    if status:
        raise SystemExit(f"the conversion failed with exit code {status}")
    return {
        "seconds": seconds,
        "peak_anonymous_bytes": anonymous,
        "peak_resident_bytes": usage[2].ru_maxrss * 1024,
    }


def _anonymous_bytes(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = [line for line in text.splitlines() if line.startswith("RssAnon")]
    return int(found[0].split()[1]) * 1024 if found else 0


def _copy(source: Path, target: Path, nbytes: int) -> float:
    """Reads every file and writes as many bytes as the conversion does; seconds with fsync."""
    buffer = memoryview(bytearray(CHUNK))
    begin = time.perf_counter()
    with target.open("wb", buffering=0) as writer:
        for file in sorted(source.iterdir()):
            with file.open("rb", buffering=0) as reader:
                while got := reader.readinto(buffer):
                    writer.write(buffer[: min(got, nbytes)])
                    nbytes -= min(got, nbytes)
        while nbytes > 0:
            nbytes -= writer.write(buffer[: min(len(buffer), nbytes)])
        os.fsync(writer.fileno())
    return time.perf_counter() - begin


def _forget(folder: Path) -> None:
    """Drops a folder's files from the page cache."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    sys.exit(main())
