"""The report as data: what `--json` writes, and everything else is made of. docs/load.md lists its fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from engram_client import CacheFacts, Description
from engram_load._measure import PERCENTILES, Latencies, Measurement, Series, TimeLine, Totals
from engram_load._model import DistinctRows, RowIds

_REPETITIVE = 0.3
"""Distinct rows of those asked for, within a request of real text: code has a half or more, prose three quarters."""
_FEW_TOKENS = 256
"""Requests with fewer say little about their text."""

Document = dict[str, Any]


def measured_document(
    measured: Measurement, description: Description, ids: RowIds, before: CacheFacts, after: CacheFacts | None
) -> Document:
    """One point of a report; after: None when the target did not say any more."""
    totals = measured.totals
    seconds = measured.seconds
    distinct = _distinct_rows(measured, description, ids)
    return {
        "seconds": seconds,
        "interrupted": measured.interrupted,
        "series": {name: _series(series, seconds) for name, series in measured.series.items()},
        "counts": vars(totals),
        "ratios": _ratios(totals, description, distinct),
        "distinct_rows": distinct,
        "cache": {"before": vars(before), "after": None if after is None else vars(after)},
        "time_line": _time_line(measured.time_line),
    }


def _series(series: Series, seconds: float) -> Document:
    return {
        "jobs": series.jobs,
        "jobs_per_s": series.jobs / seconds,
        "unfinished": series.unfinished,
        "counts": vars(series.totals),
        "rows_per_s": series.totals.rows / seconds,
        "answer_bytes_per_s": series.totals.answer_bytes / seconds,
        "latencies": {name: _latencies(found) for name, found in series.latencies.items()},
        "stalls": {str(layer): _latencies(found) for layer, found in sorted(series.stalls.items())},
        "late": _latencies(series.late),
        "failures": {
            kind: {
                "count": found.latencies.count,
                "first": found.first,
                "latencies": _latencies(found.latencies),
            }
            for kind, found in series.failures.items()
        },
    }


def _latencies(found: Latencies) -> Document:
    return {
        "count": found.count,
        "mean_ms": found.mean_ms,
        "max_ms": found.max_ms,
        "percentiles_ms": {f"{percent:g}": found.percentile_ms(percent) for percent in PERCENTILES},
        "histogram": found.encoded(),
    }


def _ratios(totals: Totals, description: Description, distinct: Document | None) -> Document:
    widths = {table.row_bytes for table in description.tables.values()}
    missed = totals.distinct - totals.cached - totals.joined
    useful = missed * widths.pop() if len(widths) == 1 else 0
    return {
        "distinct_in_request": _ratio(totals.distinct, totals.rows),
        "distinct_in_run": None if distinct is None else _ratio(distinct["distinct"], distinct["rows"]),
        "hit_rate": _ratio(totals.cached, totals.distinct),
        "joined_rate": _ratio(totals.joined, totals.distinct),
        "reads_per_token": _ratio(totals.reads, totals.tokens),
        "bytes_read_per_useful": _ratio(totals.read_bytes, useful),
    }


def _ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to compare with."""
    return part / whole if whole else None


def _distinct_rows(measured: Measurement, description: Description, ids: RowIds) -> Document | None:
    """Rows asked for over the whole run, and different ones among them. None: there is no hash to tell."""
    counted = DistinctRows(description)
    for request in measured.requests:
        found = ids.of(request)
        if found is None:
            return None
        for layer, rows in found:
            counted.add(layer, rows)
    return {"rows": counted.rows, "distinct": counted.distinct, "whole_run": not measured.forgot}


def _time_line(line: TimeLine) -> Document:
    def column(values: list[float]) -> list[float]:
        return [float(np.round(value, 6)) for value in values]

    return {
        "slice_s": line.slice_s,
        "jobs": [entry.jobs for entry in line.slices],
        "failed": [entry.failed for entry in line.slices],
        "tokens": [entry.tokens for entry in line.slices],
        "rows": [entry.rows for entry in line.slices],
        "reads": [entry.reads for entry in line.slices],
        "p50_ms": column([entry.latencies.percentile_ms(50) for entry in line.slices]),
        "p99_ms": column([entry.latencies.percentile_ms(99) for entry in line.slices]),
        "max_ms": column([entry.latencies.max_ms for entry in line.slices]),
    }


def warnings_of(pattern: str, point: Document, wraps: int) -> list[str]:
    """What makes the figures of a point less than they seem."""
    found = []
    counts, ratios = point["counts"], point["ratios"]
    per_request = counts["tokens"] / max(1, counts["requests"])
    if pattern == "repeat":
        found.append(
            "NOT REPRESENTATIVE: one token over and over asks for a few rows again and again; no text does"
        )
    elif (
        pattern in ("prefill", "replay")
        and per_request >= _FEW_TOKENS
        and (share := ratios["distinct_in_request"]) is not None
        and share < _REPETITIVE
    ):
        found.append(
            f"the text is unnaturally repetitive: {100 * share:.0f} % of a request's rows are different ones, where "
            "code has half and prose three quarters; caches look better than they are"
        )
    if wraps and pattern == "uniform":
        found.append(
            f"the rows of a table were used up and begun again {wraps} time(s): a cache may know them; give larger "
            "tables, or a shorter test"
        )
    elif wraps:
        found.append(
            f"the text was used up and begun again {wraps} time(s): prompts repeat, and the cache knows them; give "
            "more text, or a shorter test"
        )
    if point["interrupted"]:
        found.append("interrupted: this is what had been measured until then")
    for name, series in point["series"].items():
        if failed := sum(entry["count"] for entry in series["failures"].values()):
            kinds = ", ".join(f"{entry['count']:,} {kind}" for kind, entry in series["failures"].items())
            found.append(
                f"{failed:,} of {failed + series['jobs']:,} {name}s failed ({kinds}); latencies are of the others"
            )
        if series["unfinished"]:
            found.append(
                f"{series['unfinished']:,} {name}s had arrived and were given up: they stand in the latencies with the "
                "time they had waited, and would have taken longer"
            )
    return found


def nothing_answered(points: list[Document]) -> str:
    """Why a report would be empty, in a sentence."""
    if any(point["interrupted"] for point in points):
        return "interrupted before anything was answered"
    for point in points:
        for name, series in point["series"].items():
            for kind, failures in series["failures"].items():
                return (
                    f"not one {name} was answered; {failures['count']:,} failed ({kind}): {failures['first']}"
                )
            if series["unfinished"]:
                return f"not one {name} was answered in all this time, of {series['unfinished']:,} that had arrived"
    return "nothing was measured: give a longer --duration, a larger --count or a shorter --warmup"
