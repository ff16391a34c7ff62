"""Cold unique rows from a table file in place, beside what fio gets from the same file.

The scales are in memory, so a row is one read. fio reads the same file at the same block size and depth with registered
buffers and files; runs are interleaved in pairs and compared by medians. Beside them, what one would write first:
`np.memmap`, and 64 threads of buffered pread (fio's psync engine, so that no interpreter slows them).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from engram_kernels import _core
from engram_server.memory import Memory, MemoryOptions
from engram_server.tables.checkpoint import PlaneRef, TableRef
from engram_server.tables.synth import synthesise

PAIRS = 7
FIO_SECONDS = 3
ROWS_PER_RUN = 240_000
BLOCKS_PER_RUN = 4
MEMMAP_ROWS = 4_000
LAYER = 1

VOCAB_SIZE = int(os.environ.get("ENGRAM_BENCH_VOCAB_SIZE", "2000000"))
"""13 GB of FP4 tables: smaller ones share pages between rows and flatter the page cache."""
DATA = Path(os.environ.get("ENGRAM_BENCH_DATA", "data/bench"))


def run() -> list[dict[str, Any]]:
    """cold_inplace_vs_fio, memmap_rows and pread64_rows."""
    checkpoint = synthesise(DATA, VOCAB_SIZE, progress=True).path
    with Memory.open(checkpoint, MemoryOptions(scales="memory")) as memory:
        (table,) = [table for table in memory.checkpoint.tables if table.layer == LAYER]
        _wait_for_scales(memory)
        rng = np.random.default_rng(0)
        ids = rng.choice(table.rows, size=(PAIRS + 1) * ROWS_PER_RUN, replace=False)
        runs = ids.reshape(PAIRS + 1, ROWS_PER_RUN)
        _cold_rows(memory, runs[PAIRS])  # warm-up: threads, buffers, CPU clock
        block_bytes = memory.reader.files[0].alignment_bytes
        pairs = []
        for pair in range(PAIRS):
            ours = _cold_rows(memory, runs[pair])
            theirs = _fio(
                table.codes, table.rows, bs=block_bytes, ioengine="io_uring", direct=1,
                iodepth=memory.reader.depth, fixedbufs=1, registerfiles=1,
            )  # fmt: skip
            pairs.append((ours, theirs))
        cold = statistics.median(ours for ours, _ in pairs)
        fio = {
            "name": "cold_inplace_vs_fio",
            "value": cold,
            "unit": "rows/s",
            "reference": statistics.median(theirs for _, theirs in pairs),
            "reference_name": f"fio randread, io_uring, {block_bytes} B, depth {memory.reader.depth}, IOPS",
            "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        }
    rivals = {
        "memmap_rows": [_memmap(table, ids[i * MEMMAP_ROWS :][:MEMMAP_ROWS]) for i in range(3)],
        "pread64_rows": [_pread64(table) for _ in range(3)],
    }
    return [fio] + [
        {
            "name": name,
            "value": statistics.median(rates),
            "unit": "rows/s",
            "reference": cold,
            "reference_name": "our cold rows, same file",
            "ratio": statistics.median(rates) / cold,
        }
        for name, rates in rivals.items()
    ]


def _wait_for_scales(memory: Memory) -> None:
    while True:
        loaded, rows, error = memory.scale_progress()
        if error:
            raise OSError(error)
        if loaded == rows:
            return
        time.sleep(0.05)


def _cold_rows(memory: Memory, ids: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """Unique random rows per second through the engine, gathered as packed rows.

    In blocks, the next one read while this one is gathered: as the server and the embedded client do it.
    """
    begin = time.perf_counter()
    ahead: deque[_core.Batch] = deque()
    for block in np.split(ids.reshape(-1, 1), BLOCKS_PER_RUN):
        ahead.append(memory.engine.submit([(LAYER, block)]))
        if len(ahead) > 1:
            _gather(ahead.popleft())
    _gather(ahead.popleft())
    return len(ids) / (time.perf_counter() - begin)


def _gather(batch: _core.Batch) -> None:
    rows = ROWS_PER_RUN // BLOCKS_PER_RUN
    batch.wait()
    batch.gather(0, rows, _core.Format.PACKED)
    if batch.stats[:5] != (rows, rows, 0, 0, rows):
        raise AssertionError("these rows were not read cold, one read each")


def _fio(plane: PlaneRef, rows: int, **options: Any) -> float:
    """Reads per second of fio at random offsets of the plane."""
    begin = plane.offset // 4096 * 4096
    job = {
        "name": "rival", "filename": plane.path, "readonly": None, "rw": "randread", "norandommap": None,
        "randrepeat": 0, "offset": begin, "size": rows * plane.stride // 4096 * 4096,
        "time_based": None, "runtime": FIO_SECONDS, "ramp_time": "200ms", "group_reporting": None,
        "output-format": "json", **options,
    }  # fmt: skip
    arguments = [f"--{key}" if value is None else f"--{key}={value}" for key, value in job.items()]
    done = subprocess.run(["fio", *arguments], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["iops"])


def _memmap(table: TableRef, ids: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """Code rows per second by NumPy's fancy indexing of a mapping, page cache emptied first."""
    _drop_pages(table.codes.path)
    codes = np.memmap(
        table.codes.path, np.uint8, "r", offset=table.codes.offset, shape=(table.rows, table.codes.stride)
    )
    begin = time.perf_counter()
    rows = codes[ids]
    elapsed = time.perf_counter() - begin
    return len(rows) / elapsed


def _pread64(table: TableRef) -> float:
    """Code rows per second by 64 threads of buffered pread, page cache emptied first."""
    _drop_pages(table.codes.path)
    return _fio(
        table.codes, table.rows, bs=table.codes.stride, ioengine="psync", direct=0, numjobs=64, thread=None
    )


def _drop_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


if __name__ == "__main__":
    for result in run():
        print(
            f"{result['name']}: {result['value']:,.0f} {result['unit']}, {result['reference_name']} "
            f"{result['reference']:,.0f}, ratio {result['ratio']:.3f}"
        )
