"""Reading back: what was written against the source, read again, and how close FP4 rows come to theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_kernels._core import PAGE_BYTES, RowKind
from engram_server.convert.pipeline import in_parallel
from engram_server.convert.source import RowReader, Source
from engram_server.convert.target import Chunk, Section, Target, pack_piece
from engram_server.tables.bulk import BulkFile, bulk_buffer
from engram_server.tables.errors import TableError

VerifyMode: TypeAlias = Literal["sample", "full", "none"]

SAMPLE_CHUNKS = 512
"""Stretches of a table that `sample` compares, evenly spread, the first and the last among them ..."""
SAMPLE_CHUNK_BYTES = 256 << 10
"""... and the size of each: 128 MiB a table in all."""


@dataclass(frozen=True)
class Fidelity:
    """How close FP4 rows come to the FP8 rows they were made from."""

    rows: int
    """Rows looked at."""
    mean_cosine: float
    min_cosine: float
    clipped_blocks: int
    """Blocks, of all rows, with a value too large for FP4's largest scale. Always 0: such a source is refused."""


def is_requantised(target: Target) -> bool:
    """Whether rows lose precision on the way."""
    return any(s.table.kind is RowKind.FP8 and s.kind is RowKind.FP4 for s in target.sections)


def chunks_to_compare(target: Target, mode: VerifyMode, chunk_bytes: int) -> list[Chunk]:
    """What `compare` reads. `none` compares nothing, but the fidelity of re-quantised rows is measured all the same."""
    if mode == "full":
        return list(target.chunks(PAGE_BYTES, chunk_bytes))
    if mode == "none" and not is_requantised(target):
        return []
    return [chunk for section in target.sections for chunk in _spread(section)]


def compare(
    source: Source,
    target: Target,
    written: BulkFile,
    files: dict[Path, BulkFile],
    chunks: list[Chunk],
    advance: Callable[[int], None],
    threads: int,
) -> Fidelity | None:
    """Make these chunks from the source once more, and compare them with what is on disk.

    Returns the fidelity of their rows when those were re-quantised. Raises TableError at the first difference.
    """
    if not chunks:
        return None
    size, rows = max(chunk.size for chunk in chunks), max(chunk.rows for chunk in chunks)
    cosines = _Cosines()

    def make_worker() -> Callable[[Chunk], None]:
        reader = RowReader(files, rows, source.kind)
        expected, actual_buffer = bulk_buffer(size), bulk_buffer(size)

        def work(chunk: Chunk) -> None:
            actual = written.read(chunk.offset, chunk.size, actual_buffer)
            packed = _packed_rows(chunk, actual) if is_requantised(target) else None
            for first, codes, scales in reader.read(chunk.section.table, chunk.first, chunk.rows):
                pack_piece(chunk, first, codes, scales, expected[: chunk.size])
                if packed is not None:
                    begin = first - chunk.first
                    cosines.add(_core.row_cosines(codes, scales, packed[begin : begin + len(codes)]))
            if not np.array_equal(actual, expected[: chunk.size]):
                raise TableError(_difference(target, chunk, actual, expected[: chunk.size]))
            advance(chunk.size)

        return work

    in_parallel(chunks, make_worker, threads)
    return cosines.fidelity()


@dataclass
class _Cosines:
    """Of rows, as threads compute them: the sum and the least, since a table has too many to keep."""

    rows: int = 0
    sum: float = 0.0
    least: float = 1.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, cosines: NDArray[np.float64]) -> None:
        with self._lock:
            self.rows += len(cosines)
            self.sum += float(cosines.sum())
            self.least = min(self.least, float(cosines.min()))

    def fidelity(self) -> Fidelity | None:
        if self.rows == 0:
            return None
        return Fidelity(self.rows, self.sum / self.rows, self.least, clipped_blocks=0)


def _spread(section: Section) -> Iterator[Chunk]:
    stretches = section.chunk_count(SAMPLE_CHUNK_BYTES)
    count = min(SAMPLE_CHUNKS, stretches)
    for i in range(count):
        yield section.chunk(i * (stretches - 1) // max(1, count - 1), SAMPLE_CHUNK_BYTES)


def _packed_rows(chunk: Chunk, pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The packed rows [n, row_bytes] in a chunk of a store."""
    kind = chunk.section.kind
    row_bytes, per_page = _core.packed_row_bytes(kind), _core.records_per_page(kind)
    record = row_bytes + 4
    records = pages.reshape(-1, PAGE_BYTES)[:, : per_page * record].reshape(-1, record)
    return records[: chunk.rows, :row_bytes]


def _difference(target: Target, chunk: Chunk, actual: NDArray[np.uint8], expected: NDArray[np.uint8]) -> str:
    at = int(np.flatnonzero(actual != expected)[0])
    unit = chunk.section.unit_bytes
    first = chunk.first + at // unit * chunk.section.unit_rows
    last = min(first + chunk.section.unit_rows, chunk.section.table.rows) - 1
    return (
        f"reading back, rows {first} to {last} of layer {chunk.section.table.layer} are not what the source says "
        f"now (byte {chunk.offset + at} of {target.path.name}): the source changed meanwhile, or a disk does not "
        "return what was written; check both and convert again"
    )
