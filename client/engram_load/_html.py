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
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

from engram_load._measure import Latencies
from engram_load._summary import best_text, facts_line
from engram_load._sweep import parse_objective, value_text

Document = dict[str, Any]

_PERCENTS = (0, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)
_COLOURS = ("#2f81f7", "#e0632a", "#2da44e", "#a371f7", "#d64a91", "#8b949e")
_GREY = "#848d97"
"""Of axes and words in pictures: readable on white and on black, since the page follows the reader's choice."""
_PICTURE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9, "axes.edgecolor": _GREY, "axes.labelcolor": _GREY, "text.color": _GREY,
    "xtick.color": _GREY, "ytick.color": _GREY, "grid.color": _GREY, "grid.alpha": 0.25, "axes.grid": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8,
    "lines.linewidth": 1.6, "lines.markersize": 4, "axes.titlesize": 9, "axes.titlelocation": "left",
}  # fmt: skip

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #59636e; --line: #d1d9e0; --card: #f6f8fa; --page: #fff;
  --warn: #fff1e5; --warn-line: #d1570d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --quiet: #9198a1; --line: #3d444d; --card: #151b23;
  --page: #0d1117; --warn: #2d1c0f; --warn-line: #e0632a; } }
body { font: 15px/1.5 system-ui, "Liberation Sans", Arial, sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; color: var(--ink); background: var(--page); }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
p { margin: .3rem 0; } .quiet { color: var(--quiet); }
.figures { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .9rem; }
.figure b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.figure span { color: var(--quiet); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .5rem 0; }
td, th { padding: .25rem 1.1rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); } th { font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td:last-child, th:last-child { padding-right: 0; }
.facts td:first-child { white-space: nowrap; color: var(--quiet); } .facts td { overflow-wrap: anywhere; }
.warning { background: var(--warn); border-left: 4px solid var(--warn-line); padding: .5rem .8rem; margin: .5rem 0; }
code { font-size: .9em; overflow-wrap: anywhere; } summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
svg { max-width: 100%; height: auto; display: block; margin: .5rem 0; }
svg text { font-family: system-ui, "Liberation Sans", Arial, sans-serif !important; fill: var(--quiet); }
"""


def page(document: Document) -> str:
    """HTML of a report."""
    load, target = document["load"], document["target"]
    title = document["label"] or f"{load['pattern']} against {target['name']}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="quiet">{_text(load["pattern"])}: {_text(load["text"])}. Measured {_text(document["began"])} with '
        f"<code>{_text(document['command'])}</code></p>",
        *(f'<p class="warning">{_text(warning)}</p>' for warning in document["warnings"]),
        _figures(document),
        "<h2>Latency</h2>",
        '<p class="quiet">In milliseconds, from when a job was to be sent until its rows were there.</p>',
        _latency_table(document),
        *_pictures(document),
        "<h2>What it cost</h2>",
        _cost_table(document),
        "<h2>What answered</h2>",
        f'<p class="quiet">{_text(facts_line(target))}</p>',
        _facts_table(document),
    ]
    body = "\n".join(filter(None, parts))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _figures(document: Document) -> str:
    """What most people want to know, large: of the whole run, or of the best point of a sweep."""
    sweep, objective = document["sweep"], document["objective"]
    point, found = document["points"][0], []
    if objective is not None:
        found.append((objective["text"], "met" if objective["met"] else "NOT met"))
    if sweep is not None:
        if sweep["objective"] is None:
            return ""
        best = sweep["lowest" if sweep["parameter"] == "cache" else "highest"]
        words, _, value = best_text(sweep).partition(": ")
        if best is None:
            return f'<div class="figures">{_figure(words, "none")}</div>'
        found.append((words, value))
        point = next(point for point in document["points"] if point["value"] == best)
    name = document["main"]
    series, ratios = point["series"][name], point["ratios"]
    percentiles = series["latencies"][name]["percentiles_ms"]
    found += [
        (f"{name}s a second", f"{series['jobs_per_s']:,.2f}"),
        (f"p50 of {name}s", f"{_ms(percentiles['50'])} ms"),
        (f"p99 of {name}s", f"{_ms(percentiles['99'])} ms"),
        ("disk reads per token", _or_unknown(ratios["reads_per_token"], "{:,.2f}")),
        ("cache hits", _or_unknown(ratios["hit_rate"], "{:.1%}")),
        ("distinct rows of the run", _or_unknown(ratios["distinct_in_run"], "{:.1%}")),
    ]
    return f'<div class="figures">{"".join(_figure(*pair) for pair in found)}</div>'


def _figure(words: str, value: str) -> str:
    return f'<div class="figure"><b>{_text(value)}</b><span>{_text(words)}</span></div>'


def _or_unknown(number: float | None, text: str) -> str:
    return "unknown" if number is None else text.format(number)


# -------------------------------------------------------------------------------------------------- tables


def _table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], text_columns: int = 1, kind: str = "numbers"
) -> str:
    def cells(kind: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{kind}{' class=n' if i >= text_columns else ''}>{_text(value)}</{kind}>"
            for i, value in enumerate(values)
        )

    lines = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    head = f"<tr>{cells('th', headings)}</tr>" if headings else ""
    return f'<div class="wide"><table class="{kind}">{head}{"".join(lines)}</table></div>'


def _names(document: Document) -> list[tuple[str, Document]]:
    """(what it is called, point) of every point."""
    sweep = document["sweep"]
    if sweep is None:
        return [("", document["points"][0])]
    name = sweep["parameter"]
    return [(f"{name} {value_text(name, point['value'])}", point) for point in document["points"]]


def _latency_table(document: Document) -> str:
    rows = []
    for name, point in _names(document):
        for whole, series in point["series"].items():
            for kind, found in _kinds(whole, series):
                rate = f"{series['jobs_per_s']:,.2f}" if kind == whole else ""
                rows.append(_latency_row(f"{name} {kind}", rate, found))
            for layer, found in series["stalls"].items():
                rows.append(_latency_row(f"{name} layer {layer} stood still", "", found))
    return _table(["", "count", "a second", "p50", "p90", "p99", "p99.9", "max"], rows)


def _kinds(whole: str, series: Document) -> list[tuple[str, Document]]:
    """Latencies of jobs, and of their parts where they have several: else both are about the same."""
    count = series["latencies"][whole]["count"]
    return [
        (kind, found)
        for kind, found in series["latencies"].items()
        if kind == whole or found["count"] != count
    ]


def _latency_row(name: str, rate: str, found: Document) -> list[str]:
    figures = [found["percentiles_ms"][key] for key in ("50", "90", "99", "99.9")] + [found["max_ms"]]
    return [name.strip(), f"{found['count']:,}", rate, *map(_ms, figures)]


def _ms(value: float) -> str:
    """As many digits as mean something: histograms are right to a thousandth."""
    return f"{value:,.{3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0}f}"


def _cost_table(document: Document) -> str:
    headings = ["", *(name or "whole run" for name, _ in _names(document))]
    points = [point for _, point in _names(document)]

    def row(name: str, value: Callable[[Document], float | None], text: str) -> list[str]:
        found = [value(point) for point in points]
        return [name, *(_or_unknown(number, text) for number in found)]

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
    return _table([], rows, text_columns=2, kind="facts")


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
    parts = [_svg("percentiles", 3.2, lambda figure: _draw_percentiles(figure, document))]
    if document["sweep"] is None:
        over_time = _svg("time0", 3.8, lambda figure: _draw_time(figure, document["points"][0]))
        return [*parts, "<h2>Over time</h2>", over_time]
    parts.append("<h2>Over the sweep</h2>")
    parts.append(_svg("sweep", 3.0, lambda figure: _draw_sweep(figure, document)))
    for index, (name, point) in enumerate(_names(document)):
        picture = _svg(f"time{index}", 3.8, lambda figure, point=point: _draw_time(figure, point))  # type: ignore[misc]
        parts.append(f"<details><summary>Over time: {_text(name)}</summary>{picture}</details>")
    return parts


def _svg(name: str, height: float, draw: Callable[[Figure], None]) -> str:
    """A picture as an element of the page; ids in it are its own."""
    with mpl.rc_context({"svg.hashsalt": name, **_PICTURE}):
        figure = Figure(figsize=(9, height), layout="constrained", facecolor="none")
        draw(figure)
        for axes in figure.axes:
            axes.set_facecolor("none")
        out = io.StringIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def _in_decades(axis: Any) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5 of each."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_locator(NullLocator())


def _draw_percentiles(figure: Figure, document: Document) -> None:
    """Latency over percentiles, both in decades: how long the tail is."""
    axes = figure.subplots()
    places = [1 / (1 - percent / 100) for percent in _PERCENTS]
    lines = [
        (f"{name} {kind}".strip(), found)
        for name, point in _names(document)
        for whole, series in point["series"].items()
        for kind, found in _kinds(whole, series)
        if found["count"] and (document["sweep"] is None or kind == document["main"])
    ]
    for number, (name, found) in enumerate(lines):
        latencies = Latencies(found["histogram"])
        # As far as there are enough of them to tell one percentile from the longest.
        known = [
            (place, latencies.percentile_ms(percent))
            for place, percent in zip(places, _PERCENTS, strict=True)
            if place <= max(2, found["count"]) + 1e-6
        ]
        axes.plot(*zip(*known, strict=True), ".-", label=name, color=_COLOURS[number % len(_COLOURS)])
    axes.set_xscale("log")
    axes.set_yscale("log")
    shown: tuple[float, ...] = (0, 50, 90, 99, 99.9, 99.99)
    most = max((found["count"] for _, found in lines), default=0)
    shown = tuple(percent for percent in shown if 1 / (1 - percent / 100) <= max(100, 10 * most))
    axes.set_xlim(1, 1.02 / (1 - shown[-1] / 100))
    axes.set_xticks([1 / (1 - percent / 100) for percent in shown], [f"p{percent:g}" for percent in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    if lines:
        _in_decades(axes.yaxis)
        figure.legend(loc="outside right upper")
    axes.set_ylabel("latency, ms")


def _draw_time(figure: Figure, point: Document) -> None:
    """Throughput, and latencies of what ended then."""
    upper, lower = figure.subplots(2, 1, sharex=True)
    line = point["time_line"]
    seconds = [(i + 0.5) * line["slice_s"] for i in range(len(line["jobs"]))]
    # The last slice ended with the test: what it has is not a rate.
    whole = max(1, int(point["seconds"] / line["slice_s"]))
    for number, what in enumerate(("rows", "reads")):
        rates = [found / line["slice_s"] for found in line[what][:whole]]
        upper.plot(seconds[:whole], rates, color=_COLOURS[number], label=f"{what}/s")
    for number, name in enumerate(("p50_ms", "p99_ms", "max_ms")):
        values = [value if jobs else None for value, jobs in zip(line[name], line["jobs"], strict=True)]
        lower.plot(seconds, values, ".-", color=_COLOURS[number], label=name.removesuffix("_ms"))
    upper.yaxis.set_major_formatter(EngFormatter(sep=""))
    upper.set_ylabel("a second")
    lower.set_ylabel("latency, ms")
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_sweep(figure: Figure, document: Document) -> None:
    """Latency and throughput over the parameter."""
    left, right = figure.subplots(1, 2)
    sweep = document["sweep"]
    values = [point["value"] for point in document["points"]]
    for number, name in enumerate(document["points"][0]["series"]):
        found = [point["series"][name] for point in document["points"]]
        colour = _COLOURS[number % len(_COLOURS)]
        for key, style in (("50", ":"), ("99", "-")):
            latencies = [series["latencies"][name]["percentiles_ms"][key] or None for series in found]
            left.plot(values, latencies, f"o{style}", color=colour, label=f"{name} p{key}")
        right.plot(values, [series["jobs_per_s"] for series in found], "o-", color=colour, label=name)
    left.set_yscale("log")
    _in_decades(left.yaxis)
    left.set_title("latency, ms")
    right.set_ylim(bottom=0)
    right.set_title("answered a second")
    best = sweep["lowest" if sweep["parameter"] == "cache" else "highest"]
    for axes in (left, right):
        axes.set_xlabel(sweep["parameter"])
        if sweep["parameter"] == "cache":
            axes.set_xticks(values, [value_text("cache", value) for value in values], rotation=30)
        if best is not None:
            axes.axvline(best, color=_GREY, linestyle="--", linewidth=1)
    if sweep["objective"] is not None:
        left.axhline(
            parse_objective(sweep["objective"]).limit_ms,
            color=_COLOURS[4],
            linewidth=1,
            label=sweep["objective"],
        )
    left.legend()
