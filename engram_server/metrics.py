"""What `/metrics` shows, in the names and units of Prometheus; docs/metrics.md says what to do when one moves.

Nearly all is counted by native code in passing, and read when somebody asks. What is counted here is counted once a
request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

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
from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server.device import DeviceConverter
from engram_server.memory import Memory
from engram_server.shared_memory import SharedMemoryChannel
from engram_server.spans import CallSpans, SpanSender, attributes_of
from engram_server.terms import Terms

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None

_LANES = {lane: lane.name.lower() for lane in (_core.Lane.DECODE, _core.Lane.PREFILL, _core.Lane.PREFETCH)}
_FORMATS = {
    _core.Format.PACKED: "packed",
    _core.Format.PACKED_FP8: "packed-fp8",
    _core.Format.BF16: "bf16",
    _core.Format.FP32: "fp32",
}
_CODES = {code.value[0]: code.name.lower() for code in grpc.StatusCode}
_LOOKUP_LABELS = ("transport", "lane", "format")
_FAILURE_LABELS = ("transport", "code")
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


class LookupMetrics(Collector):
    """What lookups take, and how they fail: counted here as they come by gRPC, and by the native server of `channel`,
    if there is one, as they come through shared memory."""

    def __init__(
        self,
        registry: CollectorRegistry,
        channel: Callable[[], SharedMemoryChannel | None] = lambda: None,
    ) -> None:
        self._channel = channel
        self.spans: SpanSender | None = None
        self._seconds = Histogram(
            "engram_lookup_seconds",
            "From when a lookup was taken up until its last byte was handed over.",
            _LOOKUP_LABELS,
            buckets=_BOUNDS_S,
            registry=None,
        )
        self._failures = Counter(
            "engram_lookup_failures",
            "Lookups that were answered with an error, or given up by their client, by gRPC status.",
            _FAILURE_LABELS,
            registry=None,
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One family each for all transports."""
        (seconds,), (failures,) = self._seconds.collect(), self._failures.collect()
        if (channel := self._channel()) is not None:
            shared = HistogramMetricFamily(seconds.name, seconds.documentation, labels=_LOOKUP_LABELS)
            for lane, format, counts, sum_ns in channel.latencies():
                shared.add_metric(["shm", _LANES[lane], _FORMATS[format]], *_buckets(counts, sum_ns))
            failed = CounterMetricFamily(failures.name, failures.documentation, labels=_FAILURE_LABELS)
            for status, count in channel.failures().items():
                failed.add_metric(["shm", _CODES[status]], count)
            seconds.samples.extend(shared.samples)
            failures.samples.extend(failed.samples)
        yield seconds
        yield failures

    def of(
        self, peer: str, method: str = "Lookup", metadata: Callable[[], Metadata] = lambda: None
    ) -> LookupMeter:
        """For the lookups of one call; its peer, method and metadata as gRPC has them."""
        transport = "uds" if peer.startswith("unix:") else "tcp"
        return LookupMeter(self._seconds, self._failures, transport, self.spans_of(peer, method, metadata))

    def spans_of(self, peer: str, method: str, metadata: Callable[[], Metadata]) -> CallSpans | None:
        """What the lookups of one call tell OpenTelemetry; None: nothing."""
        return None if self.spans is None else self.spans.call(method, peer, metadata())


class LookupMeter:
    """Lookups that came by one transport."""

    def __init__(
        self, seconds: Histogram, failures: Counter, transport: str, spans: CallSpans | None = None
    ) -> None:
        self._seconds = seconds
        self._failures = failures
        self._transport = transport
        self._spans = spans

    def done(self, terms: Terms, format: _core.Format, began: float, stats: pb.LookupStats) -> None:
        """A lookup was answered, at this cost; `began` on the clock of time.perf_counter()."""
        seconds = time.perf_counter() - began
        lane, form = _LANES[terms.lane], _FORMATS[format]
        self._seconds.labels(self._transport, lane, form).observe(seconds)
        if self._spans is not None:
            facts = {"engram.lane": lane, "engram.format": form, "engram.transport": self._transport}
            self._spans.ended(began, facts | attributes_of(stats))

    def failed(self, code: grpc.StatusCode, began: float | None = None) -> None:
        """A lookup was answered with an error; None: it had not begun."""
        self._failures.labels(self._transport, code.name.lower()).inc()
        if self._spans is not None and began is not None:
            self._spans.ended(began, {"engram.transport": self._transport}, code)


class _Opened:
    """One opening of the tables."""

    def __init__(self, memory: Memory, converter: DeviceConverter | None) -> None:
        self.memory = memory
        self.converter = converter
        self.at = time.time()
        self.layers = list(memory.tables)
        self.devices = _devices(memory)


class MemoryCollector(Collector):
    """What tables, reader, engine, cache and shared memory of one server count."""

    def __init__(
        self, memory: Memory, not_ready: Callable[[], str], converter: DeviceConverter | None = None
    ) -> None:
        """not_ready says in words why no lookups should come, "" = they should. converter: of rows, if not the CPU."""
        self._opened = _Opened(memory, converter)
        self._not_ready = not_ready
        self.channel: SharedMemoryChannel | None = None
        self.replaced = False
        """Whether a path was last seen to name another file than the one that is served."""

    def reopened(self, memory: Memory, converter: DeviceConverter | None = None) -> None:
        """Show these tables from now on. What native code counts begins at 0 again, as after a restart."""
        self._opened = _Opened(memory, converter)
        self.replaced = False

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        yield from self._facts()
        yield from self._reads()
        yield from self._rows()
        yield from self._conversions()
        yield from self._overload()
        yield from self._cache()
        yield from self._shared_memory()

    def _facts(self) -> Iterator[Metric]:
        opened = self._opened
        memory, reader = opened.memory, opened.memory.reader
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
            "engram_ready",
            "1 while lookups are served and every table can be trusted.",
            int(not self._not_ready()),
        )
        yield _gauge(
            "engram_opened_timestamp_seconds", "When the tables that are served were opened.", opened.at
        )
        yield _gauge(
            "engram_tables_replaced",
            "1 while a path names another file than the one that was opened and is served.",
            int(self.replaced),
        )
        rows = GaugeMetricFamily("engram_table_rows", "Rows of a table.", labels=["layer", "kind"])
        for layer, table in memory.tables.items():
            rows.add_metric([str(layer), table.kind.name.lower()], table.rows)
        yield rows
        loaded, asked, _ = memory.load_progress() if memory.loads else (0, 0, "")
        yield _gauge(
            "engram_load_rows", "Rows whose scales, or which whole, are to be held in memory.", asked
        )
        yield _gauge("engram_loaded_rows", "Rows of these that are in memory.", loaded)

    def _reads(self) -> Iterator[Metric]:
        opened = self._opened
        reader, layers = opened.memory.reader, opened.layers
        files = reader.files
        read = HistogramMetricFamily(
            "engram_read_seconds",
            "From the submission of a read until its completion, retries included.",
            labels=["layer", "file", "lane"],
        )
        for file, table, lane, counts, sum_ns in reader.read_latencies():
            layer = str(layers[table]) if 0 <= table < len(layers) else ""
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
        errors.add_metric(["checksum"], opened.memory.engine.checksum_errors)
        yield errors
        in_flight = GaugeMetricFamily(
            "engram_reads_in_flight", "Reads that a device is working on.", labels=["device"]
        )
        for device, file in opened.devices.items():
            in_flight.add_metric([device], reader.in_flight(file))
        yield in_flight
        yield _gauge(
            "engram_reads_in_flight_limit", "Most reads that a device is given at once.", reader.depth
        )

    def _rows(self) -> Iterator[Metric]:
        memory = self._opened.memory
        engine = memory.engine
        totals = {name: engine.totals(lane) for lane, name in _LANES.items()}
        for place, (what, text) in enumerate(_TOTALS.items()):
            family = CounterMetricFamily(f"engram_{what}", text, labels=["lane"])
            for name, values in totals.items():
                family.add_metric([name], values[place])
            yield family
        yield _gauge(
            "engram_budget_bytes",
            "Memory that requests in flight may take.",
            memory.options.budget_bytes,
        )
        yield _gauge(
            "engram_budget_used_bytes", "Memory that requests in flight take.", engine.in_flight_bytes()
        )

    def _conversions(self) -> Iterator[Metric]:
        opened = self._opened
        seconds = CounterMetricFamily(
            "engram_convert_seconds",
            "Time that threads spent copying and converting rows into answers of a format.",
            labels=["device", "format"],
        )
        written = CounterMetricFamily(
            "engram_convert_bytes", "Bytes of those answers.", labels=["device", "format"]
        )
        for format, name in _FORMATS.items():
            ns, bytes_ = opened.memory.engine.converted(format)
            seconds.add_metric(["cpu", name], ns / 1e9)
            written.add_metric(["cpu", name], bytes_)
        if opened.converter is not None:
            spent_s, bytes_ = opened.converter.converted()
            seconds.add_metric(["cuda", _FORMATS[_core.Format.BF16]], spent_s)
            written.add_metric(["cuda", _FORMATS[_core.Format.BF16]], bytes_)
        yield seconds
        yield written

    def _overload(self) -> Iterator[Metric]:
        engine = self._opened.memory.engine
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
        stats = self._opened.memory.cache_state()
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
        failed = sum(self.channel.failures().values())
        yield _counter("engram_shm_failures", "Lookups of these not answered with rows.", failed)


class ServerMetrics:
    """All that one server counts."""

    def __init__(
        self, memory: Memory, not_ready: Callable[[], str], converter: DeviceConverter | None = None
    ) -> None:
        """As MemoryCollector."""
        self.registry = CollectorRegistry()
        self.server = MemoryCollector(memory, not_ready, converter)
        self.registry.register(self.server)
        self.lookups = LookupMetrics(self.registry, lambda: self.server.channel)
        self.reloads = Counter(
            "engram_reloads",
            "Times that the server was told to open its files anew, by how that ended.",
            ["result"],
            registry=self.registry,
        )
        for result in ("done", "refused"):
            self.reloads.labels(result)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)


def _devices(memory: Memory) -> dict[str, int]:
    """A file of each device that holds tables, by the device's numbers. As of its opening: its name may be gone."""
    devices: dict[str, int] = {}
    for number, file in enumerate(memory.reader.files):
        device, _ = memory.names[Path(file.path)]
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
