"""What `engram-server verify` does: read every page of a store and check all that is written in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_kernels._core import PAGE_BYTES
from engram_server.convert.pipeline import in_parallel
from engram_server.progress import byte_progress
from engram_server.tables.bulk import BulkFile, bulk_buffer
from engram_server.tables.store import Store, StoreTable, open_store

FAULTS_LISTED = 20
"""Bad rows or pages of a table that are named; the others are counted."""
_CHUNK_BYTES = 8 << 20
_SEAL_BYTES = 4


@dataclass
class TableFaults:
    """What is wrong with one table."""

    layer: int
    bad_rows: int = 0
    """Rows whose record does not match its checksum."""
    bad_pages: int = 0
    """Pages whose padding is not zero."""
    first_rows: list[int] = field(default_factory=list)
    first_pages: list[int] = field(default_factory=list)
    """Counted from the start of the file; the header is page 0."""
    digest_matches: bool = True


@dataclass(frozen=True)
class VerifyReport:
    """The outcome for a store."""

    path: Path
    rows: int
    file_bytes: int
    tables: tuple[TableFaults, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """Sentences; none when the store is sound."""
        return tuple(problem for table in self.tables for problem in _problems(table))


@dataclass(frozen=True)
class _Chunk:
    table: StoreTable
    first: int
    rows: int


def verify(path: Path, progress: bool = False, threads: int = 0) -> VerifyReport:
    """Check the header, every record's checksum, all padding and the table digests of a store.

    Raises TableError or SpecError (both ValueError) when the header or the file's size is wrong, OSError when
    it cannot be read.
    """
    store = open_store(path)
    faults = {table.layer: TableFaults(table.layer) for table in store.tables}
    samples = {table.layer: _Sample.of(store, table) for table in store.tables}
    chunks = [chunk for table in store.tables for chunk in _chunks(table)]
    lock = threading.Lock()
    with (
        BulkFile(path) as file,
        byte_progress(progress, "verify", store.file_bytes - PAGE_BYTES) as advance,
    ):

        def make_worker() -> Callable[[_Chunk], None]:
            buffer = bulk_buffer(_CHUNK_BYTES)

            def work(chunk: _Chunk) -> None:
                table = chunk.table
                offset = table.offset + _core.record_offset(table.kind, chunk.first)
                size = -(-chunk.rows // _core.records_per_page(table.kind)) * PAGE_BYTES
                pages = file.read(offset, size, buffer)
                rows, bad_pages = _core.check_pages(
                    pages, chunk.first, chunk.rows, table.kind, store.uuid.bytes, table.layer
                )
                samples[table.layer].take(chunk, pages)
                with lock:
                    _add(faults[table.layer], rows.tolist(), (bad_pages + table.first_page).tolist())
                advance(size)

            return work

        in_parallel(chunks, make_worker, threads)
    for table in store.tables:
        digest = store.spec.table_digest(table.layer, table.row_bytes, samples[table.layer].rows.tobytes())
        faults[table.layer].digest_matches = digest == table.digest
    rows = sum(table.rows for table in store.tables)
    return VerifyReport(path, rows, store.file_bytes, tuple(faults.values()))


def _chunks(table: StoreTable) -> Iterator[_Chunk]:
    step = _CHUNK_BYTES // PAGE_BYTES * _core.records_per_page(table.kind)
    for first in range(0, table.rows, step):
        yield _Chunk(table, first, min(step, table.rows - first))


@dataclass(frozen=True)
class _Sample:
    """The rows that a table's digest is made of, gathered as their chunks come by."""

    ids: NDArray[np.int64]
    rows: NDArray[np.uint8]

    @classmethod
    def of(cls, store: Store, table: StoreTable) -> _Sample:
        ids = store.spec.digest_rows(table.layer)
        return cls(ids, np.zeros((len(ids), table.row_bytes), dtype=np.uint8))

    def take(self, chunk: _Chunk, pages: NDArray[np.uint8]) -> None:
        kind, width = chunk.table.kind, chunk.table.row_bytes
        begin, end = np.searchsorted(self.ids, [chunk.first, chunk.first + chunk.rows])
        page, place = np.divmod(self.ids[begin:end] - chunk.first, _core.records_per_page(kind))
        offsets = page * PAGE_BYTES + place * (width + _SEAL_BYTES)
        self.rows[begin:end] = pages[offsets[:, None] + np.arange(width)]


def _add(table: TableFaults, rows: list[int], pages: list[int]) -> None:
    table.bad_rows += len(rows)
    table.bad_pages += len(pages)
    table.first_rows = sorted(table.first_rows + rows)[:FAULTS_LISTED]
    table.first_pages = sorted(table.first_pages + pages)[:FAULTS_LISTED]


def _problems(table: TableFaults) -> Iterator[str]:
    if table.bad_rows:
        listed = ", ".join(map(str, table.first_rows)) + (
            ", ..." if table.bad_rows > len(table.first_rows) else ""
        )
        yield f"layer {table.layer}: {table.bad_rows:,} rows do not match their checksum: {listed}"
    if table.bad_pages:
        listed = ", ".join(map(str, table.first_pages)) + (
            ", ..." if table.bad_pages > len(table.first_pages) else ""
        )
        yield f"layer {table.layer}: {table.bad_pages:,} pages have padding that is not zero: {listed}"
    if not table.digest_matches:
        yield f"layer {table.layer}: the rows do not give the digest in the header"
