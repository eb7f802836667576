"""Put the validation of plans into docs/planning.md: the tables come from the saved documents, no number is typed.

python benchmarks/plan/render.py            fills every `<!-- validation: DEVICE -->` … `<!-- end -->` of the page
python benchmarks/plan/render.py --check    fails if the page is not what would be written
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.lab.bench.table import quantity

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "planning.md"
RESULTS = ROOT / "benchmarks" / "results"
SLOT = re.compile(r"(<!-- validation: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    before = PAGE.read_text()
    text = filled(before, RESULTS)
    if not asked.check:
        PAGE.write_text(text)
        print(PAGE.relative_to(ROOT))
    elif before != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not what the results give; run {Path(__file__).relative_to(ROOT)}")


def filled(page: str, results: Path) -> str:
    """The page with every slot filled from its device's document."""

    def fill(found: re.Match[str]) -> str:
        path = results / found[2] / "plan.json"
        body = table(json.loads(path.read_text())) if path.is_file() else "Not measured yet.\n"
        return f"{found[1]}\n{body}\n{found[3]}"

    return SLOT.sub(fill, page)


def table(saved: Mapping[str, Any]) -> str:
    """Markdown: a line for every point with memory of each phase and time, planned / measured, and the error."""
    lines = [summary(saved), "", "| point | phase | planned | measured | error | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for row in saved["rows"]:
        unit = "bytes" if row["kind"] == "memory" else "s"
        planned, measured = (quantity(row[name], unit) for name in ("planned", "measured"))
        verdict = "" if row["within"] else f"**miss** (± {row['tolerance']:.0%})"
        lines.append(
            f"| {row['point']} | {row['phase']}, {row['kind']} | {planned} | {measured} | {row['error']:+.1%} | {verdict} |"
        )
    lines += [f"| {p['name']} | {p['phase']} | | | | **failed**: {p['error']} |" for p in saved["points"] if "error" in p]
    return "\n".join(lines) + "\n"


def summary(saved: Mapping[str, Any]) -> str:
    words = []
    for kind in ("memory", "time"):
        rows = [row for row in saved["rows"] if row["kind"] == kind]
        if rows:
            good, tolerance = sum(row["within"] for row in rows), rows[0]["tolerance"]
            words.append(f"{good} of {len(rows)} figures of {kind} within {tolerance:.0%}")
    identity = saved["identity"]
    source = (identity.get("source") or {}).get("commit") or "unknown"
    device = identity["gpus"][0]["name"] if identity.get("gpus") else f"one thread of {identity['cpu']['model']}"
    torch = identity["packages"]["torch"]
    return f"{'; '.join(words)} ({device}, torch {torch}, commit {source[:7]}, {identity['started'][:10]})."


if __name__ == "__main__":
    main()
