"""How a run goes, while it goes: a table on the terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from engram_load._measure import Measurement


class LiveTable:
    """On stderr while it is open, and nothing where that is no terminal. A context manager."""

    def __init__(self, title: str, shown: bool) -> None:
        self._title = title
        shown = shown and sys.stderr.isatty()
        console = Console(stderr=True)
        self._live = Live(console=console, transient=True, refresh_per_second=4) if shown else None

    def update(self, measured: Measurement) -> None:
        """Show what was measured until now."""
        if self._live is not None:
            self._live.update(_table(self._title, measured))

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def _table(title: str, measured: Measurement) -> Table:
    """Narrow enough for 80 columns."""
    now_ns = time.monotonic_ns()
    seconds = max(1e-3, (now_ns - measured.began_ns) / 1e9)
    state = "warming up" if now_ns < measured.began_ns else f"{seconds:.0f} s"
    table = Table(title=f"{title} ({state}); ms", box=None, pad_edge=False, title_justify="left")
    for heading in ("", "done", "1/s", "rows/s", "hit %", "reads/token", "p50", "p99", "max", "failed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, series in measured.series.items():
        totals, latencies = series.totals, series.latencies[name]
        failed = sum(found.latencies.count for found in list(series.failures.values()))
        table.add_row(
            name,
            f"{series.jobs:,}",
            f"{series.jobs / seconds:,.1f}",
            f"{totals.rows / seconds / 1e3:,.0f}k",
            f"{100 * totals.cached / max(1, totals.distinct):.1f}",
            f"{totals.reads / max(1, totals.tokens):.2f}",
            f"{latencies.percentile_ms(50):,.2f}",
            f"{latencies.percentile_ms(99):,.2f}",
            f"{latencies.max_ms:,.2f}",
            f"{failed:,}",
        )
    return table
