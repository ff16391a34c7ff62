"""How fast are rows that the cache holds, beside torch gathering the same rows from a tensor in memory?

All hits, on one core, threads of the engine included: whole token blocks of unique random n-grams, many times the size
of any CPU cache, as packed rows and as bf16. torch.index_select (one thread) takes the same rows in the same order from
a tensor that holds just them, sorted by row id, as a table in memory would. Both write into memory allocated before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench import one_core, tables
from bench.pairs import interleaved, median_ratio, progress
from bench.result import Bar, Result
from bench.scale import Scale
from engram_kernels import _core
from engram_server.memory import Memory

BLOCK_POSITIONS = 2_048
"""A chunk of a prefill: 98,304 rows of both layers."""
FILL_PASSES = 3
"""By then every group must have stayed in the cache."""

FORMATS = {
    "warm_packed_vs_torch": (_core.Format.PACKED, "packed rows", Bar(">=", 2)),
    "warm_bf16_vs_torch": (_core.Format.BF16, "rows to bf16", Bar(">=", 1.5)),
}


@dataclass(frozen=True, eq=False)
class Rows:
    """What is looked up, in blocks."""

    blocks: list[NDArray[np.int64]]
    """Ids int64[n, L, 24]."""
    order: list[NDArray[np.int64]]
    """The same rows as places in the resident tensor, int64[n * L * 24]."""
    count: int


def run(scale: Scale) -> Iterator[Result]:
    """warm_packed_vs_torch, warm_bf16_vs_torch."""
    with tables.open_memory(tables.packed_store(scale), cache_bytes=scale.pick(2 << 30, 64 << 20)) as memory:
        rows = chosen_rows(memory, scale)
        fill(memory, rows)
        for name, (format, what, bar) in FORMATS.items():
            yield compare(scale, memory, rows, name, format, what, bar)


def chosen_rows(memory: Memory, scale: Scale) -> Rows:
    """Unique random n-grams, in random order."""
    positions = scale.pick(32 * BLOCK_POSITIONS, 64)
    ids = tables.unique_blocks(memory.spec, 0, positions)
    ids = ids[np.random.default_rng(0).permutation(positions)]
    # One key per row over all layers: row ids of a layer stay below 2^32.
    keys = ids + (np.arange(ids.shape[1], dtype=np.int64) << 32).reshape(1, -1, 1)
    _, places = np.unique(keys.reshape(-1), return_inverse=True)
    count = -(-positions // BLOCK_POSITIONS)
    return Rows(np.array_split(ids, count), np.array_split(places.reshape(-1), count), ids.size)


def fill(memory: Memory, rows: Rows) -> None:
    """Read every group until all stay. Raises AssertionError when they do not fit."""
    for _ in range(FILL_PASSES):
        before = memory.reader.counters()["reads"]
        for block in progress(rows.blocks, "filling the cache", "block"):
            submit(memory, block).wait()
        if memory.reader.counters()["reads"] == before:
            return
    raise AssertionError("the cache does not keep these rows, so none of them is warm")


def submit(memory: Memory, ids: NDArray[np.int64]) -> _core.Batch:
    """One block of whole row groups."""
    return memory.engine.submit(tables.keys_of(memory.spec, ids), group=memory.spec.heads)


def compare(
    scale: Scale, memory: Memory, rows: Rows, name: str, format: _core.Format, what: str, bar: Bar
) -> Result:
    """Rows per second of both sides."""
    width = _core.output_row_bytes(memory.tables[tables.LAYER].kind, format)
    resident = resident_rows(memory, rows, format, width)
    outs = [np.empty((len(order), width), dtype=np.uint8) for order in rows.order[:1]]
    ours = our_pass(memory, rows, format, outs[0])
    theirs = torch_pass(resident, rows, format)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with one_core():
            before = memory.reader.counters()["reads"]
            outcomes = interleaved(
                f"warm, {what}", scale.pairs, {"ours": lambda _: ours(), "torch": lambda _: theirs()}
            )
            if memory.reader.counters()["reads"] != before:
                raise AssertionError("a row was read from disk: these were no hits")
    finally:
        torch.set_num_threads(threads)
    return Result(
        name=name,
        what=f"all hits, {what}, one core",
        value=statistics.median(outcomes["ours"]),
        unit="rows/s",
        reference=statistics.median(outcomes["torch"]),
        reference_name="torch.index_select, 1 thread",
        ratio=median_ratio(outcomes["ours"], outcomes["torch"]),
        bar=bar,
        details={"rows": rows.count, "resident_bytes": resident.nbytes},
    )


def resident_rows(memory: Memory, rows: Rows, format: _core.Format, width: int) -> NDArray[np.uint8]:
    """The rows as the tensor that torch gathers from: uint8[rows, width], sorted by layer and id."""
    resident = np.empty((rows.count, width), dtype=np.uint8)
    for block, order in zip(rows.blocks, rows.order, strict=True):
        batch = submit(memory, block)
        batch.wait()
        got = np.frombuffer(batch.gather(0, len(block), format), dtype=np.uint8)
        resident[order] = got.reshape(-1, width)
    return resident


def our_pass(memory: Memory, rows: Rows, format: _core.Format, out: NDArray[np.uint8]) -> Callable[[], float]:
    """Rows per second of one pass over all blocks."""

    def run_once() -> float:
        begin = time.perf_counter()
        for block in rows.blocks:
            keys = tables.keys_of(memory.spec, block)
            stats = memory.engine.copy_hits(keys, format, out[: block.size], group=memory.spec.heads)
            assert stats is not None, "a row was not in the cache"
        return rows.count / (time.perf_counter() - begin)

    return run_once


def torch_pass(resident: NDArray[np.uint8], rows: Rows, format: _core.Format) -> Callable[[], float]:
    """The same by torch: a tensor of bytes, or of bf16."""
    table: Any = torch.from_numpy(resident)
    if format is _core.Format.BF16:
        table = table.view(torch.bfloat16)
    orders = [torch.from_numpy(order) for order in rows.order]
    out = torch.empty((len(rows.order[0]), table.shape[1]), dtype=table.dtype)

    def run_once() -> float:
        begin = time.perf_counter()
        for order in orders:
            torch.index_select(table, 0, order, out=out[: len(order)])
        return rows.count / (time.perf_counter() - begin)

    return run_once
