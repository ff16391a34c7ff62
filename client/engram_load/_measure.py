"""What is measured: latencies, what the server says each request cost, and how both went over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hdrh.histogram import HdrHistogram

from engram_client import EngramError, Stats
from engram_load._patterns import Request

_LOWEST_NS, _HIGHEST_NS, _DIGITS = 100, 3_600_000_000_000, 3
"""0.1 µs to an hour in steps of a thousandth, or of 64 ns where these are finer."""
PERCENTILES = (50.0, 75.0, 90.0, 95.0, 99.0, 99.9, 99.99)
_SLICES_MAX = 240
"""Of the time line: more would be narrower than a picture's dots."""
_ROWS_REMEMBERED = 100_000_000
"""Of requests that are looked at again for their distinct rows: two million tokens, some seconds of hashing."""
_BYTES_REMEMBERED = 256 << 20
"""Of their keys: small decode steps, and requests that name rows, take more memory than prompts."""


class Latencies:
    """A histogram of HdrHistogram, in nanoseconds."""

    def __init__(self, encoded: str | None = None) -> None:
        if encoded is None:
            self._histogram: Any = HdrHistogram(_LOWEST_NS, _HIGHEST_NS, _DIGITS)
        else:
            self._histogram = HdrHistogram.decode(encoded)

    def add(self, ns: int) -> None:
        """Longer ones than an hour count as an hour."""
        self._histogram.record_value(min(max(ns, 0), _HIGHEST_NS))

    def merge(self, other: Latencies) -> None:
        """Take those of another one in."""
        self._histogram.add(other._histogram)

    @property
    def count(self) -> int:
        return int(self._histogram.total_count)

    def percentile_ms(self, percent: float) -> float:
        """Milliseconds that so many percent do not exceed; 0 without any."""
        return float(self._histogram.get_value_at_percentile(percent)) / 1e6 if self.count else 0.0

    @property
    def mean_ms(self) -> float:
        return float(self._histogram.get_mean_value()) / 1e6 if self.count else 0.0

    @property
    def max_ms(self) -> float:
        return float(self._histogram.get_max_value()) / 1e6 if self.count else 0.0

    def encoded(self) -> str:
        """HdrHistogram's own compressed form, base64."""
        return str(self._histogram.encode().decode())


@dataclass
class Totals:
    """What was answered, as the server counts it; sums of the statistics of every request."""

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    distinct: int = 0
    cached: int = 0
    joined: int = 0
    reads: int = 0
    read_bytes: int = 0
    groups: int = 0
    answer_bytes: int = 0

    def add(self, tokens: int, answer_bytes: int, lookups: Sequence[Stats]) -> None:
        """One request, or the lookups of a forward for the same tokens."""
        self.requests += len(lookups)
        self.tokens += tokens
        self.answer_bytes += answer_bytes
        for stats in lookups:
            self.rows += stats.rows
            self.distinct += stats.distinct
            self.cached += stats.cached
            self.joined += stats.joined
            self.reads += stats.reads
            self.read_bytes += stats.read_bytes
            self.groups += stats.groups


@dataclass
class Failures:
    """Requests that failed in one way."""

    first: str
    """What the first of them said."""
    latencies: Latencies = field(default_factory=Latencies)


class Series:
    """The jobs of one kind: prompts, decode steps."""

    def __init__(self, whole: str, part: str) -> None:
        """whole and part name a job and its requests; the same where a job is one request."""
        self.whole, self.part = whole, part
        self.latencies = {whole: Latencies(), part: Latencies()}
        self.stalls: dict[int, Latencies] = {}
        """By layer, how long forwards stood still there."""
        self.late = Latencies()
        """From when a job was to begin until it did: all of it queueing, but for the time a thread takes to wake."""
        self.totals = Totals()
        self.failures: dict[str, Failures] = {}
        self.jobs = 0
        self.unfinished = 0
        """Jobs that had arrived, and waited in vain when the test gave up; their wait so far is in the latencies."""


@dataclass
class Slice:
    """What ended in one piece of time."""

    jobs: int = 0
    tokens: int = 0
    rows: int = 0
    reads: int = 0
    failed: int = 0
    latencies: Latencies = field(default_factory=Latencies)

    def merge(self, other: Slice) -> None:
        """Take the next one in."""
        self.jobs += other.jobs
        self.tokens += other.tokens
        self.rows += other.rows
        self.reads += other.reads
        self.failed += other.failed
        self.latencies.merge(other.latencies)


class TimeLine:
    """Slices of equal length from the first moment measured; they double when there are too many."""

    def __init__(self, began_ns: int, slice_s: float = 0.25) -> None:
        self._began_ns = began_ns
        self.slice_s = slice_s
        self.slices: list[Slice] = []

    def at(self, now_ns: int) -> Slice:
        """The slice of a moment."""
        while (index := int((now_ns - self._began_ns) / 1e9 / self.slice_s)) >= _SLICES_MAX:
            self._double()
        while len(self.slices) <= index:
            self.slices.append(Slice())
        return self.slices[max(0, index)]

    def _double(self) -> None:
        pairs = [self.slices[i : i + 2] for i in range(0, len(self.slices), 2)]
        for pair in pairs:
            if len(pair) == 2:
                pair[0].merge(pair[1])
        self.slices = [pair[0] for pair in pairs]
        self.slice_s *= 2


class Measurement:
    """Everything of one run. Safe to add to from many threads."""

    def __init__(self, series: Iterable[Series], began_ns: int) -> None:
        self.series = {entry.whole: entry for entry in series}
        self.began_ns = began_ns
        self.ended_ns = began_ns
        self.time_line = TimeLine(began_ns)
        self.requests: list[Request] = []
        """Some that were answered, for what is looked up about them afterwards."""
        self._remembered_rows = self._remembered_bytes = 0
        self.interrupted = False
        self.forgot = False
        """Whether there were more than that."""
        self._lock = threading.Lock()

    def answered(
        self,
        series: Series,
        request: Request,
        lookups: Sequence[Stats],
        ns: int,
        answer_bytes: int,
        stalls: Mapping[int, int],
    ) -> None:
        """One request of a job, after so many nanoseconds; stalls: those of a forward, by layer, in nanoseconds."""
        rows = sum(stats.rows for stats in lookups)
        with self._lock:
            series.totals.add(request.tokens, answer_bytes, lookups)
            if series.part != series.whole:
                series.latencies[series.part].add(ns)
            for layer, stall_ns in stalls.items():
                series.stalls.setdefault(layer, Latencies()).add(stall_ns)
            now = self.time_line.at(time.monotonic_ns())
            now.tokens += request.tokens
            now.rows += rows
            now.reads += sum(stats.reads for stats in lookups)
            if self._remembered_rows < _ROWS_REMEMBERED and self._remembered_bytes < _BYTES_REMEMBERED:
                self._remembered_rows += rows
                self._remembered_bytes += request.held_bytes
                self.requests.append(request)
            else:
                self.forgot = True

    def began(self, series: Series, late_ns: int) -> None:
        """A job left the queue."""
        with self._lock:
            series.late.add(late_ns)

    def ended(self, series: Series, ns: int) -> None:
        """A job was answered whole."""
        with self._lock:
            series.jobs += 1
            series.latencies[series.whole].add(ns)
            self.ended_ns = time.monotonic_ns()
            now = self.time_line.at(self.ended_ns)
            now.jobs += 1
            now.latencies.add(ns)

    def failed(self, series: Series, error: EngramError, ns: int) -> None:
        """A job ended with an error."""
        with self._lock:
            kind = type(error).__name__
            failures = series.failures.setdefault(kind, Failures(str(error)))
            failures.latencies.add(ns)
            self.ended_ns = time.monotonic_ns()
            self.time_line.at(self.ended_ns).failed += 1

    def gave_up(self, series: Series, ns: int) -> None:
        """A job that arrived was not begun, or not ended, in all this time."""
        with self._lock:
            series.unfinished += 1
            series.latencies[series.whole].add(ns)

    @property
    def seconds(self) -> float:
        """From the first moment measured until the last answer."""
        return max(1e-9, (self.ended_ns - self.began_ns) / 1e9)

    @property
    def totals(self) -> Totals:
        """Of all series."""
        whole = Totals()
        for series in self.series.values():
            for name, value in vars(series.totals).items():
                setattr(whole, name, getattr(whole, name) + value)
        return whole
