"""Write the result tables of README.md from the JSON files in benchmarks/results.

python benchmarks/report.py          rewrite the tables
python benchmarks/report.py --check  exit with 1 if they are not what the results say
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: bench -->", "<!-- end of results -->"


def rows() -> list[dict[str, Any]]:
    """All results of `bench`, by device, model and batch size."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*/*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    found = [result for result in found if result["benchmark"] == "bench"]
    return sorted(found, key=lambda r: (r["device"]["kind"], *_work(r)))


def _work(result: dict[str, Any]) -> tuple[str, int]:
    return result["figures"]["model"]["name"], result["request"]["batch_size"]


def table() -> str:
    """The table in Markdown."""
    lines = [
        "| device | model | weights | batch | prompt + new | prefill tok/s | decode tok/s |"
        " first token | peak memory | jax | commit |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for result in rows():
        request, figures = result["request"], result["figures"]
        cells = [
            result["device"]["kind"],
            figures["model"]["name"],
            f"{figures['model']['dtype']}, {figures['model']['weights']}",
            request["batch_size"],
            f"{request['prompt_tokens']} + {request['generation_tokens']}",
            f"{figures['prefill_tokens_per_second']:,.0f}",
            f"{figures['decode_tokens_per_second']:,.0f}",
            f"{figures['first_token_seconds']['median'] * 1e3:.0f} ms",
            f"{figures['peak_memory_bytes'] / 1e9:.1f} GB",
            result["versions"]["jax"],
            (result["commit"] or "")[:7],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    """Rewrite or check the README."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(text):
        print(f"{readme}: no table between {BEGIN} and {END}", file=sys.stderr)
        return 1
    written = pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", text)
    if "--check" in sys.argv[1:]:
        return int(written != text)
    readme.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
