"""Two reports side by side: what was measured, and what makes them incomparable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engram_load._sweep import value_text

Document = dict[str, Any]

_LATENCIES = ("50", "90", "99", "99.9")
_RATIOS = {
    "reads_per_token": "disk reads per token",
    "bytes_read_per_useful": "bytes read / bytes useful",
    "hit_rate": "cache hit rate",
    "distinct_in_request": "distinct rows, within requests",
    "distinct_in_run": "distinct rows, over the run",
}
_SAME: dict[str, Callable[[Document], Any]] = {
    "pattern": lambda document: document["load"]["pattern"],
    "load": lambda document: document["load"]["text"],
    "text": lambda document: document["load"]["corpus"],
    "seed": lambda document: document["load"]["seed"],
    "target": lambda document: document["target"]["name"],
    "transport": lambda document: document["target"]["transport"],
    "format": lambda document: document["target"]["format"],
    "server version": lambda document: document["target"]["server_version"],
    "backend": lambda document: document["target"]["backend"],
    "cache bytes": lambda document: document["target"]["cache_bytes"],
    "tables": lambda document: [table["digest"] for table in document["target"]["tables"]],
    "scales": lambda document: [table["scales"] for table in document["target"]["tables"]],
    "machine of the server": lambda document: document["target"].get("machine"),
    "machine of the test": lambda document: (document["client"]["cpu"], document["client"]["kernel"]),
}


def compare(a: Document, b: Document, names: tuple[str, str]) -> str:
    """A table of both, B / A where that means something, after what differs in how they were measured."""
    lines = [
        f"A: {names[0]} ({a['began']})  {a['label']}".rstrip(),
        f"B: {names[1]} ({b['began']})  {b['label']}".rstrip(),
    ]
    for what, of in _SAME.items():
        if (ours := of(a)) != (theirs := of(b)):
            lines.append(f"  differs: {what}" + (f": {ours} / {theirs}" if _short(ours, theirs) else ""))
    pairs, unpaired = _pairs(a, b)
    lines += unpaired
    for title, x, y in pairs:
        lines += (
            ["", f"{title:<34}{'A':>14}{'B':>14}{'B / A':>9}"]
            if title
            else ["", f"{'':<34}{'A':>14}{'B':>14}{'B / A':>9}"]
        )
        lines += [_line(*row) for row in _rows(x, y)]
    for name, document in (("A", a), ("B", b)):
        lines += [f"WARNING, of {name}: {text}" for text in document["warnings"]]
    return "\n".join(lines)


def _short(*values: object) -> bool:
    return all(isinstance(value, str | int) for value in values)


def _pairs(a: Document, b: Document) -> tuple[list[tuple[str, Document, Document]], list[str]]:
    """Points of the same value, and words about those without."""
    if a["sweep"] is None and b["sweep"] is None:
        return [("", a["points"][0], b["points"][0])], []
    parameters = [document["sweep"] and document["sweep"]["parameter"] for document in (a, b)]
    if parameters[0] != parameters[1]:
        words = [f"a sweep of {parameter}" if parameter else "no sweep" for parameter in parameters]
        return [], [f"  one is {words[0]}, the other {words[1]}: no point of both is the same"]
    ours = {point["value"]: point for point in a["points"]}
    theirs = {point["value"]: point for point in b["points"]}
    name = parameters[0]
    which = "lowest" if name == "cache" else "highest"
    found = [document["sweep"][which] for document in (a, b)]
    best = ["none" if value is None else value_text(name, value) for value in found]
    lines = [f"  {which} {name}: {best[0]} / {best[1]}"]
    if alone := sorted(ours.keys() ^ theirs.keys()):
        lines.append(f"  in one of them only: {', '.join(value_text(name, value) for value in alone)}")
    both = sorted(ours.keys() & theirs.keys())
    return [(f"{name} {value_text(name, value)}", ours[value], theirs[value]) for value in both], lines


def _rows(a: Document, b: Document) -> list[tuple[str, float | None, float | None]]:
    rows: list[tuple[str, float | None, float | None]] = []
    for name, ours in a["series"].items():
        theirs = b["series"].get(name)
        if theirs is None:
            continue
        rows.append((f"{name}s a second", ours["jobs_per_s"], theirs["jobs_per_s"]))
        rows.append((f"rows/s of {name}s", ours["rows_per_s"], theirs["rows_per_s"]))
        for kind, latencies in ours["latencies"].items():
            other = theirs["latencies"][kind]
            for key in _LATENCIES:
                rows.append(
                    (f"{kind} p{key} ms", latencies["percentiles_ms"][key], other["percentiles_ms"][key])
                )
            rows.append((f"{kind} max ms", latencies["max_ms"], other["max_ms"]))
        for layer, stalls in ours.get("stalls", {}).items():
            if (other := theirs.get("stalls", {}).get(layer)) is not None:
                for key in _LATENCIES:
                    found = [entry["percentiles_ms"][key] for entry in (stalls, other)]
                    rows.append((f"layer {layer} stood still, p{key} ms", found[0], found[1]))
        failed = [sum(entry["count"] for entry in series["failures"].values()) for series in (ours, theirs)]
        rows.append((f"{name}s failed", failed[0], failed[1]))
    rows += [(name, a["ratios"][key], b["ratios"][key]) for key, name in _RATIOS.items()]
    return rows


def _line(name: str, a: float | None, b: float | None) -> str:
    ratio = f"{b / a:.3f}" if a and b is not None else ""
    return f"{name:<34}{_number(a):>14}{_number(b):>14}{ratio:>9}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.3f}"
