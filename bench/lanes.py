"""Does a decode step wait behind a prefill, and what does the prefill lose by letting it pass?

In process: steps of 16 tokens with cold rows every 50 ms, alone and beside a thread that looks up large blocks of cold
rows back to back in the prefill lane, and that prefill alone, in segments by turns. No row is asked for twice.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench import fio, tables
from bench.pairs import interleaved, median_ratio
from bench.result import Bar, Result
from bench.scale import Scale
from engram_kernels import _core
from engram_server.memory import Memory

STEP_TOKENS = 16
STEP_S = 0.05
PREFILL_POSITIONS = 4_096
"""Of one lookup, 196,608 rows; the next one is submitted while this one is read."""
LEAD_S = 0.3
"""A prefill runs for so long before a segment begins: its queue is full by then."""


@dataclass(frozen=True)
class Segment:
    """What some seconds saw."""

    p50_ms: float = 0.0
    p95_ms: float = 0.0
    steps: int = 0
    decode_reads_per_s: float = 0.0
    prefill_reads_per_s: float = 0.0


@dataclass
class Walk:
    """Positions of rows that nobody asked for before, for any thread."""

    memory: Memory
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int) -> NDArray[np.int64]:
        """Ids int64[count, L, 24]."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return tables.unique_blocks(self.memory.spec, first, count)


def run(scale: Scale) -> Iterator[Result]:
    """decode_p95_beside_prefill, prefill_share."""
    store = tables.packed_store(scale)
    seconds = 0.3 if scale.quick else 5.0
    positions = scale.pick(PREFILL_POSITIONS, 128)
    with tables.open_memory(store) as memory:
        walk = Walk(memory)

        def beside(_: int) -> Segment:
            with prefill(walk, positions):
                return segment(walk, seconds, decode=True)

        def prefill_alone(_: int) -> Segment:
            with prefill(walk, positions):
                return segment(walk, seconds, decode=False)

        outcomes = interleaved(
            "lanes",
            scale.pairs,
            {
                "alone": lambda _: segment(walk, seconds, decode=True),
                "beside": beside,
                "prefill": prefill_alone,
                "fio": lambda _: (
                    fio.ceiling(tables.store_region(store), memory.reader, scale.pick(3, 1)).iops
                ),
            },
        )
    yield decode_result(outcomes["alone"], outcomes["beside"])
    yield prefill_result(outcomes["beside"], outcomes["prefill"], outcomes["fio"])


def decode_result(alone: list[Segment], beside: list[Segment]) -> Result:
    """How long a step takes beside the prefill, and alone."""
    return Result(
        name="decode_p95_beside_prefill",
        what=f"decode step of {STEP_TOKENS} tokens, cold rows, beside a cold prefill, p95",
        value=statistics.median(one.p95_ms for one in beside),
        unit="ms",
        reference=statistics.median(one.p95_ms for one in alone),
        reference_name="the same alone",
        ratio=median_ratio([one.p95_ms for one in beside], [one.p95_ms for one in alone]),
        bar=Bar("<=", 1.5),
        details={
            "steps": sum(one.steps for one in [*alone, *beside]),
            "p50_ms": statistics.median(one.p50_ms for one in beside),
            "p50_alone_ms": statistics.median(one.p50_ms for one in alone),
        },
    )


def prefill_result(beside: list[Segment], alone: list[Segment], iops: list[float]) -> Result:
    """What the prefill reads beside decode, and what would be left for it if decode took only its own reads."""
    got = [one.prefill_reads_per_s for one in beside]
    left = [
        prefill.prefill_reads_per_s * (1 - decode.decode_reads_per_s / ceiling)
        for prefill, decode, ceiling in zip(alone, beside, iops, strict=True)
    ]
    return Result(
        name="prefill_share",
        what="that prefill's reads",
        value=statistics.median(got),
        unit="reads/s",
        reference=statistics.median(left),
        reference_name="its reads/s alone, less decode's share of the disk",
        ratio=median_ratio(got, left),
        bar=Bar(">=", 0.85),
        details={
            "alone_reads_per_s": statistics.median(one.prefill_reads_per_s for one in alone),
            "decode_reads_per_s": statistics.median(one.decode_reads_per_s for one in beside),
            "fio_iops": statistics.median(iops),
        },
    )


def segment(walk: Walk, seconds: float, *, decode: bool) -> Segment:
    """Decode steps, or nothing, for some seconds; whatever else is read meanwhile is the prefill's."""
    memory = walk.memory
    reads_before, begin = memory.reader.counters()["reads"], time.perf_counter()
    latencies_ms: list[float] = []
    step_reads = 0
    if decode:
        for number in range(int(seconds / STEP_S)):
            latency_s, reads = decode_step(walk, begin + number * STEP_S)
            latencies_ms.append(latency_s * 1e3)
            step_reads += reads
    time.sleep(max(0.0, begin + seconds - time.perf_counter()))
    elapsed = time.perf_counter() - begin
    other_reads = memory.reader.counters()["reads"] - reads_before - step_reads
    p50, p95 = np.percentile(latencies_ms, [50, 95]) if latencies_ms else (0.0, 0.0)
    return Segment(
        float(p50), float(p95), len(latencies_ms), step_reads / elapsed, max(0, other_reads) / elapsed
    )


def decode_step(walk: Walk, due: float) -> tuple[float, int]:
    """Seconds and reads of one step. A step that is due while the one before still runs has waited since then."""
    memory, ids = walk.memory, walk.take(STEP_TOKENS)
    late = time.perf_counter() > due
    if not late:
        time.sleep(due - time.perf_counter())
    begin = due if late else time.perf_counter()
    batch = memory.engine.submit(
        tables.keys_of(memory.spec, ids), group=memory.spec.heads, lane=_core.Lane.DECODE
    )
    batch.wait()
    batch.gather(0, len(ids), _core.Format.BF16)
    return time.perf_counter() - begin, batch.stats[4]


@contextmanager
def prefill(walk: Walk, positions: int) -> Iterator[None]:
    """A thread that looks blocks up back to back, and gathers them as packed rows."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            _prefill_until(stop, walk, positions)
        except BaseException as error:  # told where it can be raised
            failures.append(error)

    thread = threading.Thread(target=work, name="prefill")
    thread.start()
    try:
        time.sleep(LEAD_S)
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]
    while walk.memory.engine.in_flight_bytes():  # reads given up are no part of the next segment
        time.sleep(0.01)


def _prefill_until(stop: threading.Event, walk: Walk, positions: int) -> None:
    memory = walk.memory
    layers, columns = len(memory.spec.layers), memory.spec.columns
    row_bytes = memory.tables[tables.LAYER].row_bytes
    out = np.empty(positions * layers * columns * row_bytes, dtype=np.uint8)
    ahead: deque[_core.Batch] = deque()
    while not stop.is_set():
        while len(ahead) < 2:
            keys = tables.keys_of(memory.spec, walk.take(positions))
            ahead.append(memory.engine.submit(keys, group=memory.spec.heads, lane=_core.Lane.PREFILL))
        if ahead[0].wait(0.05):
            ahead.popleft().gather_into(0, positions, _core.Format.PACKED, out)
