"""What do recording and scraping cost, beside the reads and lookups that are recorded?

Recording is timed alone, as often as its clock needs, and set beside what it is part of: one percent of that is less
than what rounds with and without it would differ by. Of a scrape the server's own CPU time is counted; cold lookups
with a scrape every second, beside as many without, are in the details.
"""

from __future__ import annotations

import re
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from bench import tables
from bench.cold import CACHE_BYTES, ColdRun, cold_rows
from bench.pairs import interleaved, median_ratio
from bench.result import Bar, Result
from bench.rss import server
from bench.scale import Scale
from engram_client import EngramClient
from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server.metrics import LookupMetrics
from engram_server.terms import Terms

LIMIT = 0.01
READS_TOGETHER = 4
"""Completions that a busy ring waits for (kWaitReads): they share a look at the clock."""
SCRAPE_EVERY_S = 1.0
"""Prometheus' own default is a minute; nobody asks more often than this."""
ROWS = 480
"""Of a cold lookup: ten tokens."""


def run(scale: Scale) -> Iterator[Result]:
    """metrics_read_share, metrics_lookup_share, metrics_scrape_share."""
    store = tables.packed_store(scale)
    with tables.open_memory(store, cache_bytes=CACHE_BYTES) as memory:
        ids = tables.unseen_rows(memory, scale.pairs + 1, scale.pick(120_000, 2_000))
        cold_rows(memory, ids[scale.pairs])
        seen = interleaved(
            "recorded reads",
            scale.pairs,
            {
                "reads": lambda number: cold_rows(memory, ids[number]),
                "recording": lambda _: _core.recording_ns(scale.pick(2_000_000, 1_000), READS_TOGETHER),
            },
        )
        cold = tables.unseen_rows(memory, 3 * scale.pairs, scale.pick(96_000, ROWS))
    yield reads(seen["reads"], seen["recording"])
    address = f"127.0.0.1:{free_port()}"
    with (
        server(store, CACHE_BYTES, "--metrics", address) as (_, target),
        EngramClient(target, shared_memory="off") as client,
    ):
        yield lookups(scale, client)
        yield scrapes(scale, client, f"http://{address}/metrics", cold)


def reads(runs: list[ColdRun], recording_ns: list[float]) -> Result:
    """What is counted of a cold row, beside all of it."""
    row_ns = [1e9 / one.rows_per_s for one in runs]
    cpu_ns = [one.cpu_s_per_row * 1e9 for one in runs]
    return Result(
        name="metrics_read_share",
        what="recording a read and its latencies",
        value=statistics.median(recording_ns),
        unit="ns",
        reference=statistics.median(row_ns),
        reference_name="a cold row at full speed, packed store",
        ratio=median_ratio(recording_ns, row_ns),
        bar=Bar("<=", LIMIT),
        details={
            "alone_ns": _core.recording_ns(100_000, 1),
            "of_cpu_time_ratio": median_ratio(recording_ns, cpu_ns),
        },
    )


def lookups(scale: Scale, client: EngramClient) -> Result:
    """What Python counts of a lookup over gRPC, beside the smallest there is."""
    metrics = LookupMetrics(CollectorRegistry())

    def record() -> None:
        metrics.of("ipv4:127.0.0.1:1").done(
            Terms(_core.Lane.DECODE), _core.Format.BF16, 0.0, pb.LookupStats()
        )

    times = scale.pick(2_000, 20)
    seen = interleaved(
        "recorded lookups",
        scale.pairs,
        {
            "lookup": lambda _: seconds_each(times, lambda: client.lookup([3])),
            "recording": lambda _: seconds_each(10 * times, record),
        },
    )
    return Result(
        name="metrics_lookup_share",
        what="recording a lookup over gRPC",
        value=statistics.median(seen["recording"]) * 1e6,
        unit="µs",
        reference=statistics.median(seen["lookup"]) * 1e6,
        reference_name="a lookup of one token, hits",
        ratio=median_ratio(seen["recording"], seen["lookup"]),
        bar=Bar("<=", LIMIT),
    )


def scrapes(scale: Scale, client: EngramClient, url: str, ids: NDArray[np.int64]) -> Result:
    """CPU time of a scrape, beside the second until the next one."""
    scrape = partial(scraped, url)
    chunks = iter(ids)
    seen = interleaved(
        "scraped lookups",
        len(ids) // 2,
        {
            "scraped": lambda _: rate_while(client, next(chunks), scrape),
            "plain": lambda _: rate_while(client, next(chunks), lambda: None),
        },
    )
    times = scale.pick(200, 5)
    before = cpu_seconds(scrape())
    for _ in range(times - 1):
        scrape()
    cpu_s = (cpu_seconds(scrape()) - before) / times
    return Result(
        name="metrics_scrape_share",
        what="CPU time of a scrape",
        value=cpu_s * 1e3,
        unit="ms",
        reference=SCRAPE_EVERY_S * 1e3,
        reference_name="one core until the next scrape, every second",
        ratio=cpu_s / SCRAPE_EVERY_S,
        bar=Bar("<=", LIMIT),
        details={
            "cold_rows_per_s": statistics.median(seen["plain"]),
            "scraped_vs_plain_ratio": median_ratio(seen["scraped"], seen["plain"]),
            "scrape_bytes": len(scrape()),
        },
    )


def rate_while(client: EngramClient, ids: NDArray[np.int64], each_second: Callable[[], object]) -> float:
    """Rows per second of cold lookups, while somebody else does something at once and then every second."""
    over = threading.Event()

    def other() -> None:
        while True:
            each_second()
            if over.wait(SCRAPE_EVERY_S):
                return

    thread = threading.Thread(target=other)
    thread.start()
    try:
        begin = time.perf_counter()
        for chunk in np.split(ids, len(ids) // ROWS):
            client.lookup_rows(tables.LAYER, chunk, format="packed")
        return len(ids) / (time.perf_counter() - begin)
    finally:
        over.set()
        thread.join()


def free_port() -> int:
    """That nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def seconds_each(times: int, call: Callable[[], object]) -> float:
    """Of so many calls, one after another."""
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begin) / times


def scraped(url: str) -> bytes:
    """The text of a scrape."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        text: bytes = reply.read()
    return text


def cpu_seconds(text: bytes) -> float:
    """User and system time of the server, as it says itself."""
    found = re.search(rb"^process_cpu_seconds_total (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])
