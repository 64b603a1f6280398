"""Write the result tables of README.md and docs from the JSON files in benchmarks/results.

python benchmarks/report.py          rewrite the tables
python benchmarks/report.py --check  exit with 1 if they are not what the results say
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
END = "<!-- end of results -->"


def results(benchmark: str) -> list[dict[str, Any]]:
    """All kept results of one benchmark."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [result for result in found if result["benchmark"] == benchmark]


def bench_table() -> str:
    """Speed of models, by device, model and batch size."""
    lines = [
        "| device | model | weights | batch | prompt + new | prefill tok/s | decode tok/s |"
        " of the limit | first token | peak memory | compiled, cold / warm | jax | commit |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for result in sorted(results("bench"), key=_work):
        request, figures = result["request"], result["figures"]
        lines.append(
            _row(
                result["device"]["kind"],
                figures["model"]["name"],
                ", ".join(_weights(figures["model"])),
                request["batch_size"],
                f"{request['prompt_tokens']} + {request['generation_tokens']}",
                f"{figures['prefill_tokens_per_second']:,.0f}",
                f"{figures['decode_tokens_per_second']:,.0f}",
                f"{figures['limit']['share']:.0%}" if "limit" in figures else "",
                f"{figures['first_token_seconds']['median'] * 1e3:.0f} ms",
                _peak(figures["peak_memory_bytes"]),
                _compiled(figures),
                result["versions"]["jax"],
                (result["commit"] or "")[:7],
            )
        )
    return "\n".join(lines)


def _peak(nbytes: int | None) -> str:
    """None is known where a case ran behind a larger one."""
    return "" if nbytes is None else _gigabytes(nbytes)


def _compiled(figures: Mapping[str, Any]) -> str:
    """Seconds; the warm ones are known where programs were there from another process.

    None are where several programs were compiled at once.
    """
    if figures["compile_seconds"] is None:
        return ""
    made = figures.get("compilation")
    if made is None:
        return f"{figures['compile_seconds']:.0f} s /"
    warm = f" {made['seconds']:.0f} s" if made["start"] == "warm" else ""
    return f"{made['cold_seconds']:.0f} s /{warm}"


def split_table() -> str:
    """Where the time of a decode step goes, by device, model and batch size."""
    profiled = [r for r in results("bench") if "step" in r["figures"].get("profile", {})]
    if not profiled:
        return "No file in `benchmarks/results` has a profile yet."
    names = list(profiled[0]["figures"]["profile"]["step"]["groups"])
    lines = [
        f"| device | model | weights | batch | prompt | step | {' | '.join(names)} | gaps |",
        "|---|---|---|---:|---:|---:|" + "---:|" * (len(names) + 1),
    ]
    for result in sorted(profiled, key=_work):
        figures, request = result["figures"], result["request"]
        step = figures["profile"]["step"]
        lines.append(
            _row(
                result["device"]["kind"],
                figures["model"]["name"],
                _weights(figures["model"])[0],
                request["batch_size"],
                request["prompt_tokens"],
                *(
                    f"{seconds * 1e3:.2f} ms"
                    for seconds in (step["seconds"], *step["groups"].values(), step["gaps"])
                ),
            )
        )
    return "\n".join(lines)


def _weights(model: Mapping[str, Any]) -> tuple[str, str]:
    recipe = model.get("recipe")
    return f"{recipe} ({model['bits']} bits)" if recipe else model["dtype"], model["weights"]


def _work(result: dict[str, Any]) -> tuple[str, str, int]:
    model = result["figures"]["model"]["name"]
    return result["device"]["kind"], model, result["request"]["batch_size"]


def conversion_table() -> str:
    """Conversion beside a plain copy of the same bytes."""
    lines = [
        "| source | read | written | plain copy | conversion | of the copy | anonymous memory |"
        " with mapped pages | commit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for result in results("conversion"):
        for layout, figures in result["figures"].items():
            lines.append(
                _row(
                    f"{layout}, {figures['layers']} layers",
                    _gigabytes(figures["bytes_read"]),
                    _gigabytes(figures["bytes_written"]),
                    f"{figures['copy_bytes_per_second'] / 1e6:,.0f} MB/s",
                    f"{figures['convert_bytes_per_second'] / 1e6:,.0f} MB/s",
                    f"{figures['share_of_copy']:.0%}",
                    _gigabytes(figures["peak_anonymous_bytes"]),
                    _gigabytes(figures["peak_resident_bytes"]),
                    (result["commit"] or "")[:7],
                )
            )
    return "\n".join(lines)


def loading_table() -> str:
    """Loading of a native folder beside other layouts."""
    lines = ["| device | folder | loaded | GB/s | commit |", "|---|---|---:|---:|---|"]
    for result in results("loading"):
        for name, figures in result["figures"].items():
            lines.append(
                _row(
                    result["device"]["kind"],
                    name,
                    f"{_gigabytes(figures['bytes'])} in {figures['median']:.2f} s",
                    f"{figures['bytes'] / figures['median'] / 1e9:.1f}",
                    (result["commit"] or "")[:7],
                )
            )
    return "\n".join(lines)


KERNELS = (
    "attention_inputs",
    "block_attention",
    "flash_attention",
    "delta_rule",
    "dequant_matmul",
    "rms_norm",
    "router",
)


def kernels_table() -> str:
    """Error and time of each kernel's cases, and what they are compared with."""
    lines = [
        "| operation | case | error | bar | time | beside it | commit |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for operation in KERNELS:
        for result in results(operation):
            for case, figures in result["figures"].items():
                if "seconds" not in figures:
                    continue
                lines.append(
                    _row(
                        operation,
                        case,
                        f"{figures['error']:.1e}",
                        f"{figures['bar']:.1e}{'' if figures['right'] else ', missed'}",
                        f"{figures['seconds'] * 1e6:,.1f} us",
                        _beside(figures),
                        (result["commit"] or "")[:7],
                    )
                )
    return "\n".join(lines)


def _beside(figures: dict[str, Any]) -> str:
    """What a kernel's time is compared with."""
    found = []
    if figures.get("of_copy", 0) >= 0.1:
        found.append(f"{figures['of_copy']:.0%} of the copy")
    if "flops" in figures:
        found.append(f"{figures['flops'] / figures['seconds'] / 1e12:.0f} TFLOP/s")
    if (xla := figures.get("xla_seconds", figures.get("reference_seconds"))) is not None:
        found.append(f"XLA {xla * 1e6:,.1f} us")
    if "made_seconds" in figures:
        found.append(f"made and multiplied by XLA {figures['made_seconds'] * 1e6:,.1f} us")
    if "norm_error_of_int8" in figures:
        found.append(f"error of int8 {figures['norm_error_of_int8']:.1%} by norm")
    return ", ".join(found)


def accuracy_table() -> str:
    """How far whole models are from the reference, and both from float32."""
    pairs = ("kernels against reference", "kernels against float32", "reference against float32")
    lines = [
        f"| device | model | case | {' | '.join(pairs)} | bar | commit |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for result in results("accuracy"):
        for model, cases in result["figures"].items():
            for case, row in cases.items():
                found, bar = _accuracy_cells(row, pairs)
                lines.append(
                    _row(
                        result["device"]["kind"],
                        model,
                        case,
                        *found,
                        f"{bar}{'' if row['right'] else ', missed'}",
                        (result["commit"] or "")[:7],
                    )
                )
    return "\n".join(lines)


def _accuracy_cells(row: Mapping[str, Any], pairs: Sequence[str]) -> tuple[list[str], str]:
    """By pair the mean KL, or the share of equal tokens; and the bar."""
    if "equal" in row:
        differ = [name for name, equal in row["equal"].items() if not equal]
        return [", ".join(differ) or "no bit differs", "", ""], "no bit differs"
    if "margin" in row:
        shares = [f"{row[pair]['same_tokens']:.1%} of {row['tokens']} tokens" for pair in pairs]
        return shares, f"all {row['clear_tokens']} of margin > {row['margin']}"
    found = [row[pair]["mean_kl"] if pair in row else None for pair in pairs]
    if "mean_kl" in row:
        found[0] = row["mean_kl"]
    return ["" if kl is None else f"{kl:.1e}" for kl in found], f"{row['bar']:.1e}"


TABLES = {
    "README.md": {"bench": bench_table, "conversion": conversion_table, "loading": loading_table},
    "docs/kernels.md": {
        "accuracy": accuracy_table,
        "kernels": kernels_table,
        "steps": split_table,
    },
}


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def main() -> int:
    """Rewrite or check the documents."""
    current = True
    for name, tables in TABLES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        written = _filled(text, tables)
        current &= written == text
        if "--check" not in sys.argv[1:]:
            path.write_text(written, encoding="utf-8")
    return 0 if current or "--check" not in sys.argv[1:] else 1


def _filled(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    for name, table in tables.items():
        begin = f"<!-- results: {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(END), re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"no table between {begin} and {END}")
        block = f"{begin}\n{table()}\n{END}"
        text = pattern.sub(lambda _, block=block: block, text)
    return text


if __name__ == "__main__":
    sys.exit(main())
