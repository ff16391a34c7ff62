"""A report as text, for a terminal."""

from __future__ import annotations

from typing import Any

from engram_load._sweep import value_text

Document = dict[str, Any]

_SHOWN = ("50", "90", "99", "99.9")


def summary(document: Document) -> str:
    """What was asked of whom, what came, and what to think of it."""
    target, load = document["target"], document["load"]
    lines = [
        f"{load['pattern']} against {target['name']} ({target['transport']}, rows as {target['format']}): "
        f"{load['text']}",
        "  " + facts_line(target),
        *(f"  {line}" for line in file_lines(target)),
    ]
    for point in document["points"]:
        lines += _point(point, document["sweep"])
    if (sweep := document["sweep"]) is not None and sweep["objective"] is not None:
        lines.append(best_text(sweep))
    elif document["objective"] is not None:
        lines.append(
            f"{document['objective']['text']}: {'met' if document['objective']['met'] else 'NOT met'}"
        )
    lines += [f"WARNING: {text}" for text in document["warnings"]]
    return "\n".join(lines)


def best_text(sweep: Document) -> str:
    """What a sweep with an objective found."""
    parameter = sweep["parameter"]
    which = "lowest" if parameter == "cache" else "highest"
    if sweep[which] is None:
        return f"no {parameter} of these meets {sweep['objective']}"
    return f"{which} {parameter} that meets {sweep['objective']}: {value_text(parameter, sweep[which])}"


def facts_line(target: Document) -> str:
    """Who answered, in one line."""
    fallback = " (a FALLBACK)" if target["backend_fallback"] else ""
    scales = {table["scales"] for table in target["tables"]}
    return (
        f"engram-server {target['server_version']}, backend {target['backend']}{fallback}: {target['backend_reason']}; "
        f"scales in {' and '.join(sorted(scales))}; cache {target['cache_bytes'] / (1 << 20):,.0f} MiB"
    )


def file_lines(target: Document) -> list[str]:
    """How and from what rows are read, in a line for each way."""
    if target["machine"] is None:
        return []
    found = []
    for file in target["machine"]["files"]:
        how = (
            f"direct, blocks of {file['alignment_bytes']} B"
            if file["direct"]
            else f"BUFFERED ({file['reason']})"
        )
        where = (
            f"{file['file_system'] or 'an unknown file system'} on {file['device'] or 'an unknown device'}"
        )
        found.append(f"reads {how}; {where}")
    return list(dict.fromkeys(found))


def _point(point: Document, sweep: Document | None) -> list[str]:
    lines = []
    if sweep is not None:
        lines.append(f"{sweep['parameter']} {value_text(sweep['parameter'], point['value'])}:")
    for name, series in point["series"].items():
        lines.append(
            f"  {series['jobs']:,} {name}s in {point['seconds']:.2f} s: {series['jobs_per_s']:,.2f} a second, "
            f"{series['rows_per_s']:,.0f} rows/s, {series['answer_bytes_per_s'] / 1e6:,.1f} MB/s"
        )
        for latency_name, found in series["latencies"].items():
            percentiles = ", ".join(f"p{key} {found['percentiles_ms'][key]:,.3f}" for key in _SHOWN)
            lines.append(
                f"    {latency_name} ms: {percentiles}, max {found['max_ms']:,.3f} (mean {found['mean_ms']:,.3f}, "
                f"{found['count']:,})"
            )
        for layer, found in series["stalls"].items():
            percentiles = ", ".join(f"p{key} {found['percentiles_ms'][key]:,.3f}" for key in _SHOWN)
            lines.append(
                f"    layer {layer} stood still ms: {percentiles}, max {found['max_ms']:,.3f} "
                f"(mean {found['mean_ms']:,.3f})"
            )
        if series["late"]["percentiles_ms"]["99"] > 1.0:
            late = series["late"]["percentiles_ms"]
            lines.append(
                f"    of that, waiting for a free thread before it was sent: p50 {late['50']:,.3f}, "
                f"p99 {late['99']:,.3f} ms"
            )
    counts, ratios = point["counts"], point["ratios"]
    lines.append(
        "  "
        + ", ".join(
            f"{name} {counts[name]:,}"
            for name in ("tokens", "rows", "distinct", "cached", "joined", "reads", "read_bytes", "groups")
        )
    )
    lines.append(
        f"  distinct rows: {_percent(ratios['distinct_in_request'])} within requests, "
        f"{_percent(ratios['distinct_in_run'])} over the run; cache hits {_percent(ratios['hit_rate'])}; "
        f"disk reads per token {_number(ratios['reads_per_token'])}; bytes read / bytes useful "
        f"{_number(ratios['bytes_read_per_useful'])}"
    )
    return lines


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
