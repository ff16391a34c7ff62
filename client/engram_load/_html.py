"""The report as one page that needs nothing else: pictures inside it, no script, nothing loaded."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from engram_load._measure import Latencies
from engram_load._summary import facts_line

Document = dict[str, Any]

_PERCENTS = (0, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)
_COLOURS = ("#1f6feb", "#d1570d", "#1a7f37", "#8250df", "#bf3989", "#57606a")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; } td, th { padding: .2rem .8rem .2rem 0; text-align: left;
vertical-align: top; border-bottom: 1px solid #d1d9e0; } td.n, th.n { text-align: right; }
.warning { background: #fff1e5; border-left: 4px solid #d1570d; padding: .5rem .8rem; margin: .5rem 0; }
code { font-size: .9em; overflow-wrap: anywhere; } svg { max-width: 100%; height: auto; }
"""


def page(document: Document) -> str:
    """HTML of a report."""
    load, target = document["load"], document["target"]
    title = document["label"] or f"{load['pattern']} against {target['name']}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(load['pattern'])}: {_text(load['text'])}. Measured {_text(document['began'])} with "
        f"<code>{_text(document['command'])}</code></p>",
        *(f'<p class="warning">{_text(warning)}</p>' for warning in document["warnings"]),
        _objective(document),
        "<h2>Latency</h2>",
        "<p>From when a job was to be sent until its rows were there.</p>",
        _latency_table(document),
        *_pictures(document),
        "<h2>What it cost</h2>",
        _cost_table(document),
        "<h2>What answered</h2>",
        f"<p>{_text(facts_line(target))}</p>",
        _facts_table(document),
    ]
    body = "\n".join(filter(None, parts))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _objective(document: Document) -> str:
    sweep, objective = document["sweep"], document["objective"]
    if objective is not None:
        return (
            f"<p>Objective {_text(objective['text'])}: <b>{'met' if objective['met'] else 'not met'}</b></p>"
        )
    if sweep is None or sweep["objective"] is None:
        return ""
    if sweep["highest"] is None:
        return f"<p>No {sweep['parameter']} of these meets {_text(sweep['objective'])}.</p>"
    return f"<p>Highest {sweep['parameter']} that meets {_text(sweep['objective'])}: <b>{sweep['highest']:g}</b></p>"


# -------------------------------------------------------------------------------------------------- tables


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]], text_columns: int = 1) -> str:
    def cells(kind: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{kind}{' class=n' if i >= text_columns else ''}>{_text(value)}</{kind}>"
            for i, value in enumerate(values)
        )

    lines = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    head = f"<tr>{cells('th', headings)}</tr>" if headings else ""
    return f"<table>{head}{''.join(lines)}</table>"


def _names(document: Document) -> list[tuple[str, Document]]:
    """(what it is called, point) of every point."""
    sweep = document["sweep"]
    if sweep is None:
        return [("", document["points"][0])]
    return [(f"{sweep['parameter']} {point['value']:g}", point) for point in document["points"]]


def _latency_table(document: Document) -> str:
    rows = []
    for name, point in _names(document):
        for whole, series in point["series"].items():
            for kind, found in series["latencies"].items():
                percentiles = found["percentiles_ms"]
                rate = f"{series['jobs_per_s']:,.2f}" if kind == whole else ""
                rows.append(
                    [f"{name} {kind}".strip(), f"{found['count']:,}", rate]
                    + [f"{percentiles[key]:,.3f}" for key in ("50", "90", "99", "99.9")]
                    + [f"{found['max_ms']:,.3f}"]
                )
    return _table(["ms", "count", "a second", "p50", "p90", "p99", "p99.9", "max"], rows)


def _cost_table(document: Document) -> str:
    headings = ["", *(name or "whole run" for name, _ in _names(document))]
    points = [point for _, point in _names(document)]

    def row(name: str, value: Callable[[Document], float | None], text: str) -> list[str]:
        found = [value(point) for point in points]
        return [name, *("unknown" if number is None else text.format(number) for number in found)]

    counts = ("tokens", "rows", "distinct", "cached", "joined", "reads", "read_bytes", "groups")
    return _table(
        headings,
        [
            row("disk reads per token", lambda p: p["ratios"]["reads_per_token"], "{:,.2f}"),
            row("bytes read / bytes useful", lambda p: p["ratios"]["bytes_read_per_useful"], "{:,.2f}"),
            row("cache hit rate", lambda p: p["ratios"]["hit_rate"], "{:.1%}"),
            row("joined a read under way", lambda p: p["ratios"]["joined_rate"], "{:.1%}"),
            row("distinct rows, within requests", lambda p: p["ratios"]["distinct_in_request"], "{:.1%}"),
            row("distinct rows, over the run", lambda p: p["ratios"]["distinct_in_run"], "{:.1%}"),
            *(row(name.replace("_", " "), lambda p, name=name: p["counts"][name], "{:,}") for name in counts),  # type: ignore[misc]
        ],
    )


def _facts_table(document: Document) -> str:
    target, client, corpus = document["target"], document["client"], document["load"]["corpus"]
    rows = [
        ["target", f"{target['name']}, {target['transport']}, rows as {target['format']}"],
        ["server version", target["server_version"]],
        ["backend", target["backend"] + (" (a fallback)" if target["backend_fallback"] else "")],
        ["why", target["backend_reason"]],
        ["scales", target["scales_reason"]],
        ["cache", f"{target['cache_bytes']:,} bytes"],
        *([f"table of layer {table['layer']}", _table_text(table)] for table in target["tables"]),
        *_machine_rows(target.get("machine")),
        ["test ran on", f"{client['cpu']} ({client['cpus']} CPUs), {client['kernel']}"],
    ]
    if corpus is not None:
        rows.append(["text", f"{corpus['source']}: {corpus['tokens']:,} tokens"])
    return _table([], rows, text_columns=2)


def _table_text(table: Document) -> str:
    return (
        f"{table['kind']}, {table['rows']:,} rows, scales {table['scales']}, digest {table['digest'][:16]}..."
    )


def _machine_rows(machine: Document | None) -> list[list[str]]:
    if machine is None:
        return [["server's machine", "unknown: the server does not say"]]
    files = [
        [
            f"file of {file['bytes']:,} bytes",
            f"{'direct' if file['direct'] else 'through the page cache'}, alignment {file['alignment_bytes']}, "
            f"{file['file_system'] or 'unknown file system'}, {file['device'] or 'unknown device'}",
        ]
        for file in machine["files"]
    ]
    return [["server's machine", f"{machine['cpu']}, {machine['kernel']}"], *files]


# ------------------------------------------------------------------------------------------------ pictures


def _pictures(document: Document) -> list[str]:
    parts = [_svg("percentiles", lambda figure: _draw_percentiles(figure, document))]
    if document["sweep"] is not None:
        parts.append(_svg("sweep", lambda figure: _draw_sweep(figure, document)))
    for index, (name, point) in enumerate(_names(document)):
        if document["sweep"] is not None:
            parts.append(f"<h2>{_text(name)}</h2>")
        parts.append(_svg(f"time{index}", lambda figure, point=point: _draw_time(figure, point)))  # type: ignore[misc]
    return parts


def _svg(name: str, draw: Callable[[Figure], None]) -> str:
    """A picture as an element of the page; ids in it are its own."""
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        draw(figure)
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def _draw_percentiles(figure: Figure, document: Document) -> None:
    """Latency over percentiles, both in decades: how long the tail is."""
    axes = figure.subplots()
    places = [1 / (1 - percent / 100) for percent in _PERCENTS]
    colour = 0
    for name, point in _names(document):
        for series in point["series"].values():
            for kind, found in series["latencies"].items():
                latencies = Latencies(found["histogram"])
                values = [latencies.percentile_ms(percent) for percent in _PERCENTS]
                axes.plot(
                    places, values, label=f"{name} {kind}".strip(), color=_COLOURS[colour % len(_COLOURS)]
                )
                colour += 1
    axes.set_xscale("log")
    axes.set_yscale("log")
    shown = (0, 50, 90, 99, 99.9, 99.99)
    axes.set_xticks([1 / (1 - percent / 100) for percent in shown], [f"p{percent:g}" for percent in shown])
    axes.minorticks_off()
    axes.set_ylabel("latency, ms")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)


def _draw_time(figure: Figure, point: Document) -> None:
    """Throughput, and latencies of what ended then."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    line = point["time_line"]
    seconds = [(i + 0.5) * line["slice_s"] for i in range(len(line["jobs"]))]
    upper.plot(seconds, [rows / line["slice_s"] for rows in line["rows"]], color=_COLOURS[0], label="rows/s")
    upper.plot(
        seconds, [reads / line["slice_s"] for reads in line["reads"]], color=_COLOURS[1], label="reads/s"
    )
    for number, figure_name in enumerate(("p50_ms", "p99_ms", "max_ms")):
        values = [
            value if jobs else None for value, jobs in zip(line[figure_name], line["jobs"], strict=True)
        ]
        lower.plot(seconds, values, ".-", color=_COLOURS[number], label=figure_name.removesuffix("_ms"))
    upper.set_ylim(bottom=0)
    lower.set_ylim(bottom=0)
    upper.legend(fontsize=7, ncols=2)
    lower.legend(fontsize=7, ncols=3)
    lower.set_ylabel("latency, ms")
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)


def _draw_sweep(figure: Figure, document: Document) -> None:
    """Latency and throughput over the parameter."""
    left, right = figure.subplots(1, 2)
    parameter = document["sweep"]["parameter"]
    values = [point["value"] for point in document["points"]]
    for number, name in enumerate(document["points"][0]["series"]):
        found = [point["series"][name] for point in document["points"]]
        for key, style in (("50", ":"), ("99", "-")):
            latencies = [series["latencies"][name]["percentiles_ms"][key] for series in found]
            left.plot(values, latencies, f"o{style}", color=_COLOURS[number], label=f"{name} p{key}")
        right.plot(
            values, [series["jobs_per_s"] for series in found], "o-", color=_COLOURS[number], label=name
        )
    left.set_yscale("log")
    left.set_ylabel("latency, ms")
    right.set_ylim(bottom=0)
    right.set_ylabel("answered a second")
    for axes in (left, right):
        axes.set_xlabel(parameter)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
        if document["sweep"]["highest"] is not None:
            axes.axvline(document["sweep"]["highest"], color="#57606a", linestyle="--", linewidth=1)
