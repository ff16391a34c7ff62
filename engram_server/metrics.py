"""What `/metrics` shows, in the names and units of Prometheus; docs/metrics.md says what to do when one moves.

Nearly all is counted by native code in passing, and read when somebody asks. What is counted here is counted once a
request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import engram_server
from engram_kernels import _core
from engram_server.memory import Memory
from engram_server.shared_memory import SharedMemoryChannel
from engram_server.terms import Terms

_LANES = {lane: lane.name.lower() for lane in (_core.Lane.DECODE, _core.Lane.PREFILL, _core.Lane.PREFETCH)}
_FORMATS = {
    _core.Format.PACKED: "packed",
    _core.Format.PACKED_FP8: "packed-fp8",
    _core.Format.BF16: "bf16",
    _core.Format.FP32: "fp32",
}
_BOUNDS_S = tuple(bound / 1e6 for bound in _core.LATENCY_BOUNDS_US)
_TOTALS = {
    "rows": "Rows asked of the engine, zero rows included.",
    "distinct_rows": "Rows left of these after deduplication.",
    "cached_rows": "Distinct rows that were in the row cache.",
    "joined_rows": "Distinct rows that another request was already reading.",
    "row_reads": "Reads that rows took: two for a row whose scales are read apart.",
    "row_read_bytes": "Bytes of those reads, whole blocks of the device.",
    "row_groups": "Distinct row groups.",
}
"""The numbers of a batch, in its order."""


class LookupMetrics:
    """What gRPC lookups take, and how they fail."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "engram_lookup_seconds",
            "From when a lookup was taken up until its last byte was handed to gRPC.",
            ["transport", "lane", "format"],
            buckets=_BOUNDS_S,
            registry=registry,
        )
        self._failures = Counter(
            "engram_lookup_failures",
            "Lookups that were answered with an error, or given up by their client, by gRPC status.",
            ["transport", "code"],
            registry=registry,
        )

    def of(self, peer: str) -> LookupMeter:
        """For the lookups of one call; peer as gRPC names it."""
        return LookupMeter(self._seconds, self._failures, "uds" if peer.startswith("unix:") else "tcp")


class LookupMeter:
    """Lookups that came by one transport."""

    def __init__(self, seconds: Histogram, failures: Counter, transport: str) -> None:
        self._seconds = seconds
        self._failures = failures
        self._transport = transport

    def done(self, terms: Terms, format: _core.Format, began: float) -> None:
        """A lookup was answered; `began` on the clock of time.perf_counter()."""
        seconds = time.perf_counter() - began
        self._seconds.labels(self._transport, _LANES[terms.lane], _FORMATS[format]).observe(seconds)

    def failed(self, code: grpc.StatusCode) -> None:
        """A lookup was answered with an error."""
        self._failures.labels(self._transport, code.name.lower()).inc()


class MemoryCollector(Collector):
    """What tables, reader, engine, cache and shared memory of one server count."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._layers = list(memory.tables)
        self._devices = _devices(memory.reader)
        self.channel: SharedMemoryChannel | None = None
        self.ready = False

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        yield from self._facts()
        yield from self._reads()
        yield from self._rows()
        yield from self._overload()
        yield from self._cache()
        yield from self._shared_memory()

    def _facts(self) -> Iterator[Metric]:
        reader = self._memory.reader
        yield InfoMetricFamily("engram_build", "Versions.", value={"version": engram_server.__version__})
        yield InfoMetricFamily(
            "engram_backend",
            "What reads, and why; fallback is true when a better one was refused by the system.",
            value={
                "backend": reader.backend,
                "fallback": str(reader.fallback).lower(),
                "reason": reader.reason,
                "registered": reader.registered,
            },
        )
        yield _gauge(
            "engram_backend_fallback",
            "1 when reads take a worse way than the system could offer.",
            int(reader.fallback),
        )
        yield _gauge(
            "engram_ready", "1 while lookups are served and every table can be trusted.", int(self.ready)
        )
        rows = GaugeMetricFamily("engram_table_rows", "Rows of a table.", labels=["layer", "kind"])
        for layer, table in self._memory.tables.items():
            rows.add_metric([str(layer), table.kind.name.lower()], table.rows)
        yield rows
        loaded, asked, _ = self._memory.load_progress() if self._memory.loads else (0, 0, "")
        yield _gauge(
            "engram_load_rows", "Rows whose scales, or which whole, are to be held in memory.", asked
        )
        yield _gauge("engram_loaded_rows", "Rows of these that are in memory.", loaded)

    def _reads(self) -> Iterator[Metric]:
        reader = self._memory.reader
        files = reader.files
        read = HistogramMetricFamily(
            "engram_read_seconds",
            "From the submission of a read until its completion, retries included.",
            labels=["layer", "file", "lane"],
        )
        for file, table, lane, counts, sum_ns in reader.read_latencies():
            layer = str(self._layers[table]) if 0 <= table < len(self._layers) else ""
            read.add_metric([layer, files[file].path, _LANES[lane]], *_buckets(counts, sum_ns))
        yield read
        queue = HistogramMetricFamily(
            "engram_queue_seconds",
            "From when a request's reads could start until each was submitted.",
            labels=["lane"],
        )
        for lane, name in _LANES.items():
            queue.add_metric([name], *_buckets(*reader.queue_latency(lane)))
        yield queue
        counters = reader.counters()
        yield _counter("engram_reads", "Reads asked of the kernel, retries included.", counters["reads"])
        yield _counter("engram_read_bytes", "Bytes that those reads asked for.", counters["read_bytes"])
        yield _counter(
            "engram_read_useful_bytes", "Bytes of these that rows consist of.", counters["needed_bytes"]
        )
        yield _counter("engram_read_retries", "Reads that were asked again.", counters["retries"])
        yield _counter(
            "engram_short_reads", "Reads that brought less than they asked for.", counters["short_reads"]
        )
        errors = CounterMetricFamily("engram_read_errors", "Reads that failed.", labels=["kind"])
        errors.add_metric(["truncated"], counters["truncated"])
        errors.add_metric(["io"], counters["errors"] - counters["truncated"])
        errors.add_metric(["checksum"], self._memory.engine.checksum_errors)
        yield errors
        in_flight = GaugeMetricFamily(
            "engram_reads_in_flight", "Reads that a device is working on.", labels=["device"]
        )
        for device, file in self._devices.items():
            in_flight.add_metric([device], reader.in_flight(file))
        yield in_flight
        yield _gauge(
            "engram_reads_in_flight_limit", "Most reads that a device is given at once.", reader.depth
        )

    def _rows(self) -> Iterator[Metric]:
        engine = self._memory.engine
        totals = {name: engine.totals(lane) for lane, name in _LANES.items()}
        for place, (what, text) in enumerate(_TOTALS.items()):
            family = CounterMetricFamily(f"engram_{what}", text, labels=["lane"])
            for name, values in totals.items():
                family.add_metric([name], values[place])
            yield family
        yield _gauge(
            "engram_budget_bytes",
            "Memory that requests in flight may take.",
            self._memory.options.budget_bytes,
        )
        yield _gauge(
            "engram_budget_used_bytes", "Memory that requests in flight take.", engine.in_flight_bytes()
        )

    def _overload(self) -> Iterator[Metric]:
        engine = self._memory.engine
        overload = CounterMetricFamily(
            "engram_overload", "Requests refused because there was no room, by the limit.", labels=["limit"]
        )
        for limit, count in engine.overloads().items():
            overload.add_metric([limit], count)
        yield overload
        yield _gauge(
            "engram_admitted_rows", "Rows that requests being worked on asked for.", engine.admitted_rows
        )
        wait = GaugeMetricFamily(
            "engram_wait_seconds",
            "What requests being worked on have still to read, at the rate of late.",
            labels=["lane"],
        )
        for lane, name in ((_core.Lane.DECODE, "decode"), (_core.Lane.PREFILL, "bulk")):
            wait.add_metric([name], engine.wait_s(lane))
        yield wait

    def _cache(self) -> Iterator[Metric]:
        stats = self._memory.cache_state()
        yield _gauge("engram_cache_bytes", "Size of the row cache, 0 without one.", stats.capacity_bytes)
        yield _gauge("engram_cache_used_bytes", "What of it holds rows.", stats.used_bytes)
        yield _counter("engram_cache_hits", "Row groups looked up and found.", stats.hits)
        yield _counter("engram_cache_misses", "Row groups looked up and not found.", stats.misses)
        yield _counter("engram_cache_joins", "Row groups looked up while somebody read them.", stats.joined)
        yield _counter("engram_cache_evictions", "Row groups that made room for others.", stats.evictions)

    def _shared_memory(self) -> Iterator[Metric]:
        if self.channel is None:
            return
        counts = self.channel.counts()
        limits = self.channel.info()
        yield _gauge("engram_shm_clients", "Clients attached to shared memory.", counts["clients"])
        yield _gauge("engram_shm_clients_limit", "Clients that may be attached at once.", limits.clients)
        yield _gauge("engram_shm_bytes", "Memory of their slots.", counts["bytes"])
        yield _counter("engram_shm_requests", "Lookups through shared memory.", counts["requests"])
        yield _counter("engram_shm_failures", "Lookups of these not answered with rows.", counts["failed"])


class ServerMetrics:
    """All that one server counts."""

    def __init__(self, memory: Memory) -> None:
        self.registry = CollectorRegistry()
        self.server = MemoryCollector(memory)
        self.registry.register(self.server)
        self.lookups = LookupMetrics(self.registry)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)


def _devices(reader: _core.Reader) -> dict[str, int]:
    """A file of each device that holds tables, by the device's numbers."""
    devices: dict[str, int] = {}
    for number, file in enumerate(reader.files):
        device = Path(file.path).stat().st_dev
        devices.setdefault(f"{os.major(device)}:{os.minor(device)}", number)
    return devices


def _buckets(counts: Sequence[int], sum_ns: int) -> tuple[list[tuple[str, float]], float]:
    """As Prometheus has them: each bucket with those below."""
    total = 0
    buckets = []
    for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, sum_ns / 1e9


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
