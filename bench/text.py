"""What does real text cost: how many reads, how fast, and what if it comes again?

A document of 65,536 tokens and its first chunk of 2,048, exact tokenizer, packed store. Reads are those the reader
counts; distinct row groups are counted by NumPy from row ids hashed by NumPy, so neither side counts for itself. Every
cold figure is of tables just opened, with an empty cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench import corpus, tables
from bench.hash import by_division, numpy_hash
from bench.pairs import interleaved, median_ratio, progress
from bench.result import Bar, Result
from bench.scale import Scale
from engram_client import EngramMemory
from engram_kernels import _core
from engram_server.memory import Memory
from engram_server.tables.checkpoint import TableRef
from engram_server.tokens import encode

CALLERS = 8
"""Threads that look chunks up at once."""
LOOK_BACK = 3
READY_S = 60
REPEATED = " memory"
"""One ordinary token."""
REPEATED_READS = 144
"""A sequence of one token has 2 + 3 + 4 distinct n-grams, each with 8 rows in 2 layers."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Asked:
    """What a text asks for, by NumPy."""

    rows: int
    groups: int
    distinct_rows: int


@dataclass(frozen=True)
class Seen:
    """One pass over a text."""

    reads: int
    tokens_per_s: float


def run(scale: Scale) -> Iterator[Result]:
    """text_reads_vs_groups, text_warm_vs_cold, text_chunk_vs_plain_ring, repeat_reads."""
    store, source = tables.packed_store(scale), tables.checkpoint(scale)
    tokens = scale.pick(65_536, 512)
    document = corpus.load(scale, source / "tokenizer.json", tokens)
    text = document.document(0, tokens)
    yield from whole_document(scale, store, text, document.source)
    yield chunk(scale, store, source, text[: scale.pick(2_048, 128)])
    yield repeat(store, source)


def whole_document(scale: Scale, store: Path, text: Tokens, source: str) -> Iterator[Result]:
    """The document in several cuts, cold and then again."""
    chunkings: dict[str, Callable[[EngramMemory], None]] = {
        "one_request": lambda memory: by_chunks(memory, text, len(text)),
        "chunks_of_2048": lambda memory: by_chunks(memory, text, 2_048),
        "chunks_of_64": lambda memory: by_chunks(memory, text, 64),
        "concurrent_chunks": lambda memory: at_once(memory, text, scale.pick(2_048, 64)),
    }
    seen = {
        name: cold_then_warm(store, len(text), call)
        for name, call in progress(chunkings.items(), "document", "chunking")
    }
    with tables.open_memory(store) as memory:
        asked = asked_for(memory, text)
    worst = max(seen, key=lambda name: seen[name][0].reads)
    details: dict[str, float | str] = {
        "text": source,
        "tokens": len(text),
        "rows_asked": asked.rows,
        "distinct_groups": asked.groups,
        "distinct_rows_per_token": round(asked.distinct_rows / len(text), 2),
        "worst_chunking": worst,
    }
    for name, (cold, warm) in seen.items():
        details |= {
            f"{name}_reads": cold.reads,
            f"{name}_tokens_per_s": round(cold.tokens_per_s),
            f"{name}_reads_again": warm.reads,
            f"{name}_tokens_per_s_again": round(warm.tokens_per_s),
        }
    yield Result(
        name="text_reads_vs_groups",
        what=f"disk reads for a document of {len(text):,} tokens, {asked.rows:,} rows asked, worst chunking",
        value=seen[worst][0].reads,
        unit="reads",
        reference=8 * asked.groups,
        reference_name="8 for each of its distinct row groups",
        ratio=seen[worst][0].reads / (8 * asked.groups),
        bar=Bar("<=", 1),
        details=details,
    )
    cold, warm = seen["one_request"]
    yield Result(
        name="text_warm_vs_cold",
        what=f"the document in one request, a second time ({warm.reads:,} reads)",
        value=warm.tokens_per_s,
        unit="tokens/s",
        reference=cold.tokens_per_s,
        reference_name="the first time",
        ratio=warm.tokens_per_s / cold.tokens_per_s,
    )


def chunk(scale: Scale, store: Path, source: Path, text: Tokens) -> Result:
    """One cold chunk of a prefill, beside a ring that reads every row."""
    with tables.open_memory(source) as inplace:
        table_files = {path: number for number, path in enumerate(inplace.checkpoint.files)}
        ids = numpy_ids(inplace, text)
        asked = asked_for(inplace, text)
        outcomes = interleaved(
            "chunk",
            scale.pairs,
            {
                "ours": lambda _: cold_then_warm(store, len(text), lambda m: by_chunks(m, text, len(text))),
                "ring": lambda _: plain_ring(inplace, table_files, ids),
            },
        )
    ours, ring = [cold.tokens_per_s for cold, _ in outcomes["ours"]], outcomes["ring"]
    return Result(
        name="text_chunk_vs_plain_ring",
        what=f"a cold chunk of {len(text):,} tokens of it",
        value=statistics.median(ours),
        unit="tokens/s",
        reference=statistics.median(ring),
        reference_name="io_uring reading every row",
        ratio=median_ratio(ours, ring),
        details={
            "rows_asked": asked.rows,
            "distinct_groups": asked.groups,
            "distinct_rows_per_token": round(asked.distinct_rows / len(text), 2),
            "reads": outcomes["ours"][0][0].reads,
            "tokens_per_s_again": round(statistics.median(warm.tokens_per_s for _, warm in outcomes["ours"])),
        },
    )


def repeat(store: Path, source: Path) -> Result:
    """One token over and over: a test of deduplication."""
    (token,) = encode(source / "tokenizer.json", REPEATED)
    text = np.full(2_048, token, dtype=np.int32)
    cold, _ = cold_then_warm(store, len(text), lambda memory: by_chunks(memory, text, len(text)))
    return Result(
        name="repeat_reads",
        what="disk reads for one token 2,048 times from a sequence start",
        value=cold.reads,
        unit="reads",
        reference=REPEATED_READS,
        reference_name="9 distinct n-grams, 8 rows each, 2 layers",
        ratio=cold.reads / REPEATED_READS,
        bar=Bar("<=", REPEATED_READS, of="value"),
    )


# -------------------------------------------------------------------------------------------------- lookups


def cold_then_warm(store: Path, tokens: int, call: Callable[[EngramMemory], None]) -> tuple[Seen, Seen]:
    """The same lookups twice, the first time with nothing in the cache, whose memory is ready as a server's is."""
    memory = tables.open_memory(store)
    make_ready(memory)
    with EngramMemory(memory) as client:

        def seen() -> Seen:
            before, begin = memory.reader.counters()["reads"], time.perf_counter()
            call(client)
            seconds = time.perf_counter() - begin
            return Seen(memory.reader.counters()["reads"] - before, tokens / seconds)

        return seen(), seen()


def make_ready(memory: Memory) -> None:
    """Have the cache's memory cleared. Raises AssertionError after READY_S seconds."""
    memory.engine.populate_cache()
    give_up = time.monotonic() + READY_S
    while memory.engine.cache_stats()["ready_bytes"] < memory.engine.cache_stats()["capacity_bytes"]:
        assert time.monotonic() < give_up, "the kernel does not clear the cache's memory"
        time.sleep(0.01)


def by_chunks(memory: EngramMemory, text: Tokens, size: int) -> None:
    """One chunk after another, each with the ids before it."""
    for at in range(0, len(text), size):
        look_up(memory, text, at, size)


def at_once(memory: EngramMemory, text: Tokens, size: int) -> None:
    """Chunks by several threads at once."""
    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(lambda at: look_up(memory, text, at, size), range(0, len(text), size)))


def look_up(memory: EngramMemory, text: Tokens, at: int, size: int) -> None:
    """One chunk; its rows are dropped again."""
    memory.lookup(text[at : at + size], history=text[max(0, at - LOOK_BACK) : at], format="packed")


# --------------------------------------------------------------------------------- what NumPy says, and the rival


def numpy_ids(memory: Memory, text: Tokens) -> NDArray[np.int64]:
    """Row ids int64[T, L, 24], hashed by NumPy."""
    assert memory.token_map is not None
    return numpy_hash(memory.spec, memory.token_map.ids, text, by_division, 4_096, transposed=False)


def asked_for(memory: Memory, text: Tokens) -> Asked:
    """Rows, distinct row groups and distinct rows of a text."""
    ids = numpy_ids(memory, text)
    groups = distinct_rows = 0
    for index in range(ids.shape[1]):
        by_order = ids[:, index].reshape(len(ids), -1, memory.spec.heads)
        groups += sum(len(np.unique(by_order[:, order], axis=0)) for order in range(by_order.shape[1]))
        distinct_rows += len(np.unique(ids[:, index]))
    return Asked(ids.size, groups, distinct_rows)


def plain_ring(memory: Memory, files: dict[Path, int], ids: NDArray[np.int64]) -> float:
    """Tokens per second when the code rows of every id are read as they come: neither dedupe nor cache."""
    items = [
        code_reads(tables.table_of(memory, layer), files, layer_ids)
        for layer, layer_ids in tables.keys_of(memory.spec, ids)
    ]
    file, offset, length = (np.concatenate(parts) for parts in zip(*items, strict=True))
    out = np.empty((len(file), int(length.max())), dtype=np.uint8)
    begin = time.perf_counter()
    errors = memory.reader.read(file, offset, length, out)
    seconds = time.perf_counter() - begin
    if errors.any():
        raise OSError(_core.error_text(int(errors[errors != 0][0])))
    return len(ids) / seconds


def code_reads(
    table: TableRef, files: dict[Path, int], ids: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32]]:
    """File, offset and length of each code row, as `Reader.read` takes them."""
    flat = ids.reshape(-1)
    return (
        np.full(len(flat), files[table.codes.path], dtype=np.uint32),
        (table.codes.offset + flat * table.codes.stride).astype(np.uint64),
        np.full(len(flat), table.codes.stride, dtype=np.uint32),
    )
