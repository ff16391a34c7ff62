"""Draws the dashboard's panels from a Prometheus' answers to their queries: a picture for where Grafana is not.

    python scripts/panels.py http://127.0.0.1:9090 --minutes 5 --output docs/images/dashboard.png

What Grafana would show at that moment, drawn with matplotlib; the picture says so.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, MultipleLocator
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "engram-server.json"
LABEL = "drawn from the queries' results by matplotlib, not a screenshot of Grafana"
CELL_PX, WIDTH_PX, TOP_PX, DPI = 31, 1640, 46, 100
SHADES = {"red": "#d1495b", "orange": "#e08e45", "green": "#4c9f70", "transparent": "none"}
STEPS = 120

Series = list[tuple[str, np.ndarray]]
"""Legend, and values at each step."""


def main() -> int:
    """Draw one picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prometheus", metavar="URL", help="such as http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=15, help="shown (15)")
    parser.add_argument("--end", type=float, help="seconds since 1970 (now)")
    parser.add_argument("--scrape-s", type=float, default=15, help="its scrape interval (15)")
    parser.add_argument("--output", type=Path, required=True, help="a .png file")
    options = parser.parse_args()
    end = options.end or time.time()
    draw(Source(options.prometheus, end - options.minutes * 60, end, options.scrape_s), options.output)
    return 0


class Source:
    """A Prometheus, and the time to show."""

    def __init__(self, url: str, begin: float, end: float, scrape_s: float) -> None:
        self._url = url.rstrip("/")
        self._window = f"{4 * scrape_s:g}s"  # as Grafana chooses $__rate_interval
        self._range = f"{end - begin:.0f}s"
        self.times = np.linspace(begin, end, STEPS + 1)

    def series(self, target: dict[str, Any]) -> Series:
        """What a query of a panel returns over that time."""
        times = {"start": self.times[0], "end": self.times[-1], "step": self.times[1] - self.times[0]}
        found: Series = []
        for one in self._ask("query_range", target, times):
            values = np.full(len(self.times), np.nan)
            for at, value in one["values"]:
                values[round((at - self.times[0]) / times["step"])] = float(value)
            found.append((legend(target, one["metric"]), values))
        return found

    def now(self, target: dict[str, Any]) -> list[tuple[str, float]]:
        """What it returns at the end."""
        found = self._ask("query", target, {"time": self.times[-1]})
        return [(legend(target, one["metric"]), float(one["value"][1])) for one in found]

    def _ask(self, path: str, target: dict[str, Any], parameters: dict[str, float]) -> list[dict[str, Any]]:
        text = target["expr"].replace("$job", ".+").replace("$instance", ".+")
        text = text.replace("$__rate_interval", self._window).replace("$__range", self._range)
        query = urllib.parse.urlencode({"query": text, **parameters})
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as reply:
            result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return result


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    """The words of a series."""
    text = re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), target["legendFormat"])
    return Path(text).name if text.startswith("/") else text.strip()


# ------------------------------------------------------------------------------------------------- drawing


def draw(source: Source, output: Path) -> None:
    """All panels, where the dashboard has them."""
    document = json.loads(DASHBOARD.read_text())
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in document["panels"])
    height_px = TOP_PX + rows * CELL_PX
    figure = Figure(figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI, facecolor="#f4f5f5")
    figure.text(0.008, 1 - 14 / height_px, document["title"], size=15, weight="bold", va="top")
    shown = f"{hour(source.times[0])} to {hour(source.times[-1])} UTC; {LABEL}"
    figure.text(0.992, 1 - 18 / height_px, shown, size=10, ha="right", va="top")
    with rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        for panel in document["panels"]:
            at = panel["gridPos"]
            top = TOP_PX + at["y"] * CELL_PX
            if panel["type"] == "row":
                figure.text(0.008, 1 - (top + 22) / height_px, panel["title"], size=12, weight="bold")
                continue
            below = top + at["h"] * CELL_PX - 4
            size = at["w"] / 24 - 0.006, (at["h"] * CELL_PX - 8) / height_px
            DRAWN[panel["type"]](figure, (at["x"] / 24 + 0.003, 1 - below / height_px, *size), panel, source)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    # Few colours: a third of the bytes.
    Image.open(output).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(output, optimize=True)


def hour(seconds: float) -> str:
    """Time of day, UTC."""
    return time.strftime("%H:%M", time.gmtime(seconds))


Box = tuple[float, float, float, float]
"""Left, bottom, width and height, as parts of the figure's."""


def stat(figure: Figure, box: Box, panel: dict[str, Any], source: Source) -> None:
    """A word or a number on its colour."""
    defaults = panel["fieldConfig"]["defaults"]
    found = [(words, value) for words, value in source.now(panel["targets"][0]) if not math.isnan(value)]
    text = defaults.get("noValue", "no data")
    if found:
        text = "\n".join(stat_text(panel, words, value) for words, value in found[:4])
    shade = shade_of(defaults["thresholds"]["steps"], [value for _, value in found] or [-math.inf])
    axes = figure.add_axes(box, facecolor=SHADES[shade])
    bare(axes)
    axes.text(
        0.5, 0.44, text, color="white", ha="center", va="center", size=15 if text.count("\n") < 2 else 10
    )
    axes.text(0.03, 0.93, panel["title"], color="white", va="top", size=9)


def stat_text(panel: dict[str, Any], words: str, value: float) -> str:
    """One value of a stat, as its text mode has it."""
    defaults, mode = panel["fieldConfig"]["defaults"], panel["options"]["textMode"]
    mapped = {
        key: entry["text"]
        for mapping in defaults.get("mappings", ())
        for key, entry in mapping["options"].items()
    }
    shown = mapped.get(f"{value:g}", amount(value, defaults["unit"]))
    if mode == "name":
        return words
    return (
        f"{words} {shown}"
        if mode == "value_and_name" or "{{" in panel["targets"][0]["legendFormat"]
        else shown
    )


def shade_of(steps: list[dict[str, Any]], values: list[float]) -> str:
    """The worst colour of several: red before orange before green."""
    shades = set()
    for value in values:
        shades.add([step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1])
    return next(shade for shade in SHADES if shade in shades)


def lines(figure: Figure, box: Box, panel: dict[str, Any], source: Source) -> None:
    """Lines, or areas one on another."""
    axes = frame(figure, box, panel)
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    right = axes.twinx() if panel["fieldConfig"]["overrides"] else None
    drawn = [
        one for target in panel["targets"] for one in source.series(target) if not np.isnan(one[1]).all()
    ]
    if not drawn:
        words = defaults.get("noValue", "no data")
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color="#8a8f98")
    elif "stacking" in custom:
        areas = [np.nan_to_num(values) for _, values in drawn]
        axes.stackplot(source.times, areas, labels=[words for words, _ in drawn], alpha=0.75)
    for number, (words, values) in enumerate([] if "stacking" in custom else drawn):
        override = override_of(panel, words)
        where = axes if override is None or right is None else right
        where.plot(source.times, values, color=f"C{number % 10}", lw=1.2, label=words)
        if where is right:
            axes.plot([], [], color=f"C{number % 10}", label=words)  # for the legend
    limits(axes, defaults)
    if right is not None:
        right.set_ylim(0, 1.1 * right.get_ylim()[1])
        right.spines["right"].set_visible(True)
        unit_of(right, next(filter(None, (override_of(panel, words) for words, _ in drawn))))
    clock(axes, source)
    legend_below(axes)


def legend_below(axes: Axes) -> None:
    """What each line is."""
    handles, words = axes.get_legend_handles_labels()
    room = {"handlelength": 1.2, "columnspacing": 1.0, "labelspacing": 0.2}
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.01, -0.13)}
    axes.legend(
        handles, words, ncols=4 if len(handles) > 3 else 3, fontsize=7, frameon=False, **place, **room
    )


def heat(figure: Figure, box: Box, panel: dict[str, Any], source: Source) -> None:
    """Buckets over time."""
    axes = frame(figure, box, panel)
    found = sorted(
        (math.inf if le == "+Inf" else float(le), values) for le, values in source.series(panel["targets"][0])
    )
    counts = np.diff(np.nan_to_num([values for _, values in found]), axis=0, prepend=0)
    used = np.flatnonzero(counts.sum(axis=1) > counts.sum() / 1e4)
    names = [f"≤ {amount(bound, 's')}" if bound < math.inf else "more" for bound, _ in found]
    shown = slice(max(0, used.min() - 1), used.max() + 2) if used.size else slice(None)
    step = source.times[1] - source.times[0]
    edges = np.append(source.times - step / 2, source.times[-1] + step / 2)
    cells = np.ma.masked_less_equal(counts[shown], 0)
    axes.pcolormesh(edges, np.arange(len(cells) + 1), cells, cmap="Blues", vmin=0)
    axes.set_yticks(np.arange(len(cells))[::2] + 0.5, names[shown][::2], fontsize=7)
    clock(axes, source)


DRAWN = {"stat": stat, "timeseries": lines, "heatmap": heat}


def frame(figure: Figure, box: Box, panel: dict[str, Any]) -> Axes:
    """A white panel with its title, and axes in it."""
    bare(figure.add_axes(box, facecolor="white"))
    left, bottom, width, height = box
    figure.text(left + 0.005, bottom + height - 0.0022, panel["title"], size=9.5, weight="bold", va="top")
    beside = 0.041 + (
        0.039 if panel["fieldConfig"]["overrides"] else 0.008
    )  # with an axis on the right, or not
    axes = figure.add_axes((left + 0.041, bottom + height * 0.26, width - beside, height * 0.62))
    axes.grid(color="#e3e5e8", lw=0.6)
    return axes


def bare(axes: Axes) -> None:
    """No ticks, no lines."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def limits(axes: Axes, defaults: dict[str, Any]) -> None:
    """Scale, range, units and the dashed line of a threshold."""
    custom = defaults["custom"]
    if "scaleDistribution" in custom:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=defaults.get("min", 0), top=defaults.get("max"))
    for step in defaults["thresholds"]["steps"] if "thresholdsStyle" in custom else ():
        if step["value"] is not None:
            axes.axhline(step["value"], color=SHADES[step["color"]], lw=0.9, ls="--")
    unit_of(axes, defaults["unit"])


def override_of(panel: dict[str, Any], words: str) -> str | None:
    """The unit of a series that has an axis of its own, on the right."""
    for override in panel["fieldConfig"]["overrides"]:
        if re.fullmatch(override["matcher"]["options"], words):
            return str(next(one["value"] for one in override["properties"] if one["id"] == "unit"))
    return None


def unit_of(axes: Axes, unit: str) -> None:
    """Ticks in words, at round numbers."""
    top = axes.get_ylim()[1]
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    else:
        power_of_2 = 2.0 ** math.ceil(math.log2(top / 5))
        axes.yaxis.set_major_locator(MultipleLocator(power_of_2) if unit == "bytes" else MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value, unit)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def clock(axes: Axes, source: Source) -> None:
    """Times of day below."""
    axes.set_xlim(source.times[0], source.times[-1])
    ticks = [
        tick
        for tick in np.arange(source.times[0] // 60 * 60, source.times[-1] + 1, 60)
        if tick >= source.times[0]
    ]
    ticks = ticks[:: max(1, len(ticks) // 6)]
    axes.set_xticks(ticks, [hour(tick) for tick in ticks], fontsize=7)


def amount(value: float, unit: str) -> str:
    """A value as Grafana would write it, nearly."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if value >= scale or scale == 1e-6:
                return f"{value / scale:.3g} {name}"
    step, names = (1024, ("", "Ki", "Mi", "Gi")) if unit == "bytes" else (1000, ("", "k", "M", "G"))
    suffix = {"bytes": "B", "Bps": "B/s", "ops": "/s", "iops": "/s", "rowsps": "/s"}.get(unit, "")
    power = 0
    while abs(value) >= step and power < 3:
        value, power = value / step, power + 1
    return f"{value:.3g} {names[power]}{suffix}".strip()


if __name__ == "__main__":
    sys.exit(main())
