"""What would one write first, and how far does it come on the same file?

`np.memmap` with fancy indexing, a mapping advised MADV_RANDOM and indexed by 64 threads, and 64 threads of buffered
pread (fio's psync engine, so that no interpreter slows them). Code rows of a table in place, page cache emptied before
each run; beside them our cold rows of the same table.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from bench import fio, tables
from bench.cold import cold_rows
from bench.pairs import interleaved, median_ratio
from bench.result import Result
from bench.scale import Scale
from engram_server.tables.checkpoint import TableRef

THREADS = 64

WHAT = {
    "memmap_rows": "the same rows by `np.memmap`",
    "madvise64_rows": f"the same by {THREADS} threads on a mapping with MADV_RANDOM",
    "pread64_rows": f"the same file by {THREADS} threads of buffered `pread`",
}


def run(scale: Scale) -> Iterator[Result]:
    """memmap_rows, madvise64_rows, pread64_rows."""
    with tables.open_memory(tables.checkpoint(scale)) as memory:
        table = tables.table_of(memory)
        few, many = scale.pick(4_000, 500), scale.pick(120_000, 2_000)
        ids = tables.unseen_rows(memory, scale.pairs, many)
        outcomes = interleaved(
            "rivals",
            scale.pairs,
            {
                "ours": lambda number: cold_rows(memory, ids[number]).rows_per_s,
                "memmap_rows": lambda number: memmap(table, ids[number, :few]),
                "madvise64_rows": lambda number: madvise64(table, ids[number]),
                "pread64_rows": lambda _: pread64(table, scale.pick(3, 1)),
            },
        )
    ours = outcomes.pop("ours")
    for name, rates in outcomes.items():
        yield Result(
            name=name,
            what=WHAT[name],
            value=statistics.median(rates),
            unit="rows/s",
            reference=statistics.median(ours),
            reference_name="our cold rows in place",
            ratio=median_ratio(rates, ours),
        )


def memmap(table: TableRef, ids: NDArray[np.int64]) -> float:
    """Code rows per second by NumPy's fancy indexing of a mapping."""
    tables.drop_pages(table.codes.path)
    codes = np.memmap(
        table.codes.path, np.uint8, "r", offset=table.codes.offset, shape=(table.rows, table.codes.stride)
    )
    begin = time.perf_counter()
    rows = codes[ids]
    return len(rows) / (time.perf_counter() - begin)


def madvise64(table: TableRef, ids: NDArray[np.int64]) -> float:
    """The same without read-ahead and by many threads: `np.take` holds no GIL while it faults pages in."""
    tables.drop_pages(table.codes.path)
    with table.codes.path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapping.madvise(mmap.MADV_RANDOM)
    codes = np.frombuffer(mapping, np.uint8, table.rows * table.codes.stride, table.codes.offset)
    codes = codes.reshape(table.rows, table.codes.stride)
    with ThreadPoolExecutor(THREADS) as pool:
        begin = time.perf_counter()
        parts = pool.map(lambda part: len(np.take(codes, part, axis=0)), np.array_split(ids, THREADS))
        return sum(parts) / (time.perf_counter() - begin)


def pread64(table: TableRef, seconds: int) -> float:
    """Code rows per second by many threads of buffered pread."""
    tables.drop_pages(table.codes.path)
    region = tables.codes_region(table)
    job = {"ioengine": "psync", "direct": 0, "bs": table.codes.stride, "numjobs": THREADS, "thread": None}
    return fio.randread(region, seconds, **job).iops
