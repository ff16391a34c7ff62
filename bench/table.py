"""`python -m bench.table`: bench/results/latest.json as the table between the figures marks of README.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.__main__ import RESULTS, figure

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- figures:begin[^\n]*-->\n).*?(\n<!-- figures:end -->)", re.DOTALL)
HEAD = ("what", "figure", "beside it, same run", "ratio", "bar")


def main() -> int:
    """Rewrite the README's figures; 1 with a sentence when there are none to write."""
    try:
        document = json.loads(RESULTS.read_text())
    except FileNotFoundError:
        print(f"{RESULTS} is not there: run `make bench` first", file=sys.stderr)
        return 1
    text, found = BLOCK.subn(
        lambda match: f"{match[1]}\n{rendered(document)}\n{match[2]}", README.read_text()
    )
    if found != 1:
        print(f"{README} has {found} blocks between figures:begin and figures:end, not one", file=sys.stderr)
        return 1
    README.write_text(text)
    return 0


def rendered(document: dict[str, Any]) -> str:
    """One line of a table for each result, numbers to the right."""
    lines = [HEAD, *(row(result) for result in document["results"])]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    rule = [
        "-" * (width - 1) + ":" if column in (1, 3) else "-" * width for column, width in enumerate(widths)
    ]
    return "\n".join(
        "| " + " | ".join(_aligned(line, widths)) + " |" for line in [lines[0], rule, *lines[1:]]
    )


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one result."""
    value, unit = short(result["value"], result["unit"])
    reference, reference_unit = short(result["reference"], result["unit"])
    bar = result["bar"] or ""
    return (
        result["what"],
        f"{value} {unit}",
        f"{result['reference_name']}: {reference} {reference_unit}",
        f"{result['ratio']:.2f}",
        bar.removeprefix("ratio ") + ("" if result["met"] is not False else ", missed"),
    )


def short(value: float, unit: str) -> tuple[str, str]:
    """Three digits are all that one run can tell of a rate; counts keep theirs."""
    if "/s" not in unit or abs(value) < 1000:
        return figure(value), unit
    rounded = float(f"{value:.3g}")
    return (f"{rounded / 1e6:g}", f"M {unit}") if rounded >= 1e6 else (f"{rounded:,.0f}", unit)


def _aligned(cells: Any, widths: list[int]) -> list[str]:
    return [
        cell.rjust(width) if column in (1, 3) else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


if __name__ == "__main__":
    sys.exit(main())
