"""How near do cold rows come to what the disk can do, and what does each cost in CPU time?

Unique random rows, one read each, beside fio on the same file at the same read size and depth: from a packed store,
where every row's CRC is checked, and from a checkpoint in place with its scales in memory. Ours is the whole line from
row ids to gathered packed rows, cache included; the CPU time is that of all our threads.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench import fio, tables
from bench.pairs import interleaved, median_ratio
from bench.result import Bar, Result
from bench.scale import Scale
from engram_kernels import _core
from engram_server.memory import Memory

BLOCKS_PER_RUN = 4
CACHE_BYTES = 256 << 20
"""Filled by the warm-up, so that every run finds the cache as it is for most of a server's life: full."""


@dataclass(frozen=True)
class ColdRun:
    """One run of ours."""

    rows_per_s: float
    cpu_s_per_row: float


@dataclass(frozen=True)
class Comparison:
    """Interleaved pairs, by round."""

    ours: Sequence[ColdRun]
    theirs: Sequence[fio.FioRun]
    fio_name: str


def run(scale: Scale) -> Iterator[Result]:
    """cold_vs_fio, cold_cpu_vs_fio, cold_inplace_vs_fio."""
    store = tables.packed_store(scale)
    with tables.open_memory(store, cache_bytes=CACHE_BYTES) as memory:
        packed = compare(scale, "cold, packed", memory, tables.store_region(store))
    yield speed("cold_vs_fio", "cold rows, packed store, every CRC checked", packed, Bar(">=", 0.95))
    yield cpu_time("cold_cpu_vs_fio", "CPU time of each of these rows, all threads", packed, Bar("<=", 0.75))
    with tables.open_memory(tables.checkpoint(scale), cache_bytes=CACHE_BYTES) as memory:
        inplace = compare(scale, "cold, in place", memory, tables.codes_region(tables.table_of(memory)))
    yield speed("cold_inplace_vs_fio", "cold rows, checkpoint in place, scales in memory", inplace)


def compare(scale: Scale, label: str, memory: Memory, region: fio.Region) -> Comparison:
    """Our cold rows of one table and fio's reads of the region, by turns."""
    ids = tables.unseen_rows(memory, scale.pairs + 1, scale.pick(240_000, 2_000))
    cold_rows(memory, ids[scale.pairs])  # warm-up: threads, buffers, CPU clock, cache
    sides = {
        "ours": lambda number: cold_rows(memory, ids[number]),
        "fio": lambda _: fio.ceiling(region, memory.reader, scale.pick(3, 1)),
    }
    outcomes = interleaved(label, scale.pairs, sides)
    return Comparison(outcomes["ours"], outcomes["fio"], fio.described(memory.reader))


def cold_rows(memory: Memory, ids: NDArray[np.int64]) -> ColdRun:
    """Unique random rows through the engine, gathered as packed rows into memory allocated before, as fio reads.

    In blocks, the next one read while this one is gathered: as the server and the embedded client do it.
    """
    rows, row_bytes = len(ids) // BLOCKS_PER_RUN, memory.tables[tables.LAYER].row_bytes
    out = np.ones((rows, row_bytes), dtype=np.uint8)  # pages and all
    before, begin = cpu_seconds(), time.perf_counter()
    ahead: deque[_core.Batch] = deque()
    for block in np.split(ids.reshape(-1, 1), BLOCKS_PER_RUN):
        ahead.append(memory.engine.submit([(tables.LAYER, block)]))
        if len(ahead) > 1:
            _gather(ahead.popleft(), out)
    _gather(ahead.popleft(), out)
    seconds = time.perf_counter() - begin
    return ColdRun(len(ids) / seconds, (cpu_seconds() - before) / len(ids))


def cpu_seconds() -> float:
    """User and system time of this process, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def speed(name: str, what: str, pairs: Comparison, bar: Bar | None = None) -> Result:
    """Rows per second beside reads per second."""
    rates, iops = [one.rows_per_s for one in pairs.ours], [one.iops for one in pairs.theirs]
    return Result(
        name=name,
        what=what,
        value=statistics.median(rates),
        unit="rows/s",
        reference=statistics.median(iops),
        reference_name=pairs.fio_name,
        ratio=median_ratio(rates, iops),
        bar=bar,
    )


def cpu_time(name: str, what: str, pairs: Comparison, bar: Bar) -> Result:
    """CPU time per row beside that per read."""
    ours, theirs = [one.cpu_s_per_row for one in pairs.ours], [one.cpu_s_per_read for one in pairs.theirs]
    return Result(
        name=name,
        what=what,
        value=statistics.median(ours) * 1e6,
        unit="µs",
        reference=statistics.median(theirs) * 1e6,
        reference_name="fio's, per read",
        ratio=median_ratio(ours, theirs),
        bar=bar,
    )


def _gather(batch: _core.Batch, out: NDArray[np.uint8]) -> None:
    rows = len(out)
    batch.wait()
    batch.gather_into(0, rows, _core.Format.PACKED, out)
    if batch.stats[:5] != (rows, rows, 0, 0, rows):
        raise AssertionError("these rows were not read cold, one read each")
