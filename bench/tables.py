"""The tables that are measured: one synthetic checkpoint, in place and as a packed store of the same rows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.fio import PAGE_BYTES, Region
from bench.scale import Scale
from engram_server.memory import Memory, MemoryOptions
from engram_server.spec import EngramSpec
from engram_server.tables.checkpoint import TableRef
from engram_server.tables.synth import synthesise

LAYER = 1
"""Whose rows are read where one table is enough."""


def checkpoint(scale: Scale) -> Path:
    """The FP4 checkpoint, written at its first use."""
    return synthesise(scale.data, scale.vocab_size, progress=True).path


def packed_store(scale: Scale) -> Path:
    """The packed store of the same rows, converted at its first use.

    The rows follow from the vocabulary size alone, so its name says which rows it holds.
    """
    store = scale.beside(f"-packed-{scale.vocab_size}.engram")
    if not store.exists():
        convert(checkpoint(scale), store, "--verify", "none")
    return store


def convert(source: Path, store: Path, *options: str, quiet: bool = False) -> None:
    """`engram-server convert`. Raises CalledProcessError; its sentence is on stderr."""
    command = [sys.executable, "-m", "engram_server.cli", "convert", str(source), str(store), *options]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if quiet else None
    )


def open_memory(path: Path, **options: Any) -> Memory:
    """Tables as the server opens them, scales in memory: one read a row. Waits until the scales are there."""
    memory = Memory.open(path, MemoryOptions(**{"scales": "memory"} | options))
    try:
        while memory.loads:
            loaded, rows, error = memory.load_progress()
            if error:
                raise OSError(error)
            if loaded == rows:
                break
            time.sleep(0.05)
        return memory
    except BaseException:
        memory.close()
        raise


def table_of(memory: Memory, layer: int = LAYER) -> TableRef:
    """Where a table lies; of a checkpoint."""
    return next(table for table in memory.checkpoint.tables if table.layer == layer)


def codes_region(table: TableRef) -> Region:
    """The codes of a table in place: where all its reads go when its scales are in memory."""
    return Region(table.codes.path, table.codes.offset, table.codes.offset + table.rows * table.codes.stride)


def store_region(store: Path) -> Region:
    """All records of a packed store."""
    return Region(store, PAGE_BYTES, store.stat().st_size)


def drop_pages(path: Path) -> None:
    """Empty the page cache of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def unseen_rows(memory: Memory, runs: int, rows: int) -> NDArray[np.int64]:
    """Distinct random rows int64[runs, rows] of LAYER's table, none of which opening it has read for its digest."""
    table_rows = memory.tables[LAYER].rows
    seen = np.append(memory.spec.digest_rows(LAYER), table_rows - 1)
    drawn = np.random.default_rng(0).choice(table_rows, size=runs * rows + len(seen), replace=False)
    return drawn[~np.isin(drawn, seen)][: runs * rows].reshape(runs, rows)


def unique_blocks(spec: EngramSpec, first: int, count: int) -> NDArray[np.int64]:
    """Ids int64[count, L, 24] of positions first .. first + count - 1 of a walk that repeats no row.

    Column by column, position k has row (start + k * step) mod prime: every row once before any comes again, each far
    from the one before. Raises ValueError when the columns are shorter than the walk.
    """
    primes = np.asarray(spec.primes, dtype=np.int64)
    if first + count > primes.min():
        raise ValueError(
            f"{first + count} positions of unique rows are wanted, but a column has {primes.min()} rows: raise "
            "ENGRAM_BENCH_VOCAB_SIZE"
        )
    rng = np.random.default_rng(0)
    start = rng.integers(0, primes, dtype=np.int64)
    step = rng.integers(primes // 4, primes // 4 * 3, dtype=np.int64)
    k = np.arange(first, first + count).reshape(-1, 1, 1)
    local: NDArray[np.int64] = np.remainder(start + k * step, primes)
    return local + np.asarray(spec.offsets, dtype=np.int64)


def keys_of(spec: EngramSpec, ids: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Ids [n, L, 24] as `Engine.submit` takes them."""
    return [(layer, ids[:, index]) for index, layer in enumerate(spec.layers)]
