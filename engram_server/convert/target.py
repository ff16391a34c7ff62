"""Where a conversion's rows go: which bytes of which file hold which rows, and how they get their form.

Every target is a file of one header page and, behind it, sections of rows: so a store and a DSV41EN1 shard are
written, resumed and read back by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_kernels._core import PAGE_BYTES, RowKind
from engram_server.convert.source import Source, SourceTable, sampled_rows
from engram_server.tables import dsv41
from engram_server.tables.store import Store, build_header, plan_tables, store_uuid

TargetFormat: TypeAlias = Literal["fp4", "fp8", "dsv41"]

CHUNK_BYTES = 8 << 20
"""What a thread writes at once, about."""


@dataclass(frozen=True)
class Section:
    """One table in a target file."""

    table: SourceTable
    kind: RowKind
    """How the rows are written."""
    uuid: bytes | None
    """Of the store whose sealed pages these are; None = packed rows back to back."""
    offset: int
    """First byte in the file, on a page."""

    @property
    def unit_rows(self) -> int:
        """The fewest rows that fill whole pages."""
        return 512 if self.uuid is None else _core.records_per_page(self.kind)

    @property
    def unit_bytes(self) -> int:
        """Bytes of that many rows."""
        return self.unit_rows * _core.packed_row_bytes(self.kind) if self.uuid is None else PAGE_BYTES

    @property
    def padded_bytes(self) -> int:
        """Bytes of all rows, whole pages."""
        return self.bytes_of(self.table.rows)

    def bytes_of(self, rows: int) -> int:
        """Bytes of the first so many rows, whole pages."""
        if self.uuid is not None:
            return -(-rows // self.unit_rows) * PAGE_BYTES
        return -(-rows * _core.packed_row_bytes(self.kind) // PAGE_BYTES) * PAGE_BYTES

    def chunk_count(self, chunk_bytes: int) -> int:
        """Chunks of about so many bytes that the table is cut into."""
        return -(-self.table.rows // self._chunk_rows(chunk_bytes))

    def chunk(self, number: int, chunk_bytes: int) -> Chunk:
        """One of them."""
        step = self._chunk_rows(chunk_bytes)
        return Chunk(self, number * step, min(step, self.table.rows - number * step))

    def _chunk_rows(self, chunk_bytes: int) -> int:
        return max(1, chunk_bytes // self.unit_bytes) * self.unit_rows


@dataclass(frozen=True)
class Chunk:
    """Rows that are converted at once; `offset` and `size` are whole pages of the file."""

    section: Section
    first: int
    rows: int

    @property
    def offset(self) -> int:
        """First byte in the file."""
        return self.section.offset + self.first // self.section.unit_rows * self.section.unit_bytes

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.section.bytes_of(self.rows)


@dataclass(frozen=True)
class Noticed:
    """What packing rows brought to light."""

    rows: NDArray[np.int64]
    """Suspect rows: those with NaN codes or scale byte 255."""
    why: NDArray[np.uint8]
    """NAN_CODE | SCALE_255 of each."""
    clipped_blocks: int


@dataclass(frozen=True)
class Target:
    """One file to write."""

    path: Path
    header: bytes
    """Its first page."""
    sections: tuple[Section, ...]
    file_bytes: int

    def chunks(self, begin: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """All rows from byte `begin` of the file on, in order; `begin` is where a chunk began or the header ends."""
        for section in self.sections:
            if begin >= section.offset + section.padded_bytes:
                continue
            skipped = max(0, begin - section.offset) // section.unit_bytes * section.unit_rows
            step = section.chunk(0, chunk_bytes).rows
            for first in range(skipped, section.table.rows, step):
                yield Chunk(section, first, min(step, section.table.rows - first))


def pack_piece(
    chunk: Chunk, first: int, codes: NDArray[np.uint8], scales: NDArray[np.uint8], out: NDArray[np.uint8]
) -> Noticed:
    """Write rows `first` .. of a chunk into `out`, the chunk's bytes."""
    section, width = chunk.section, _core.packed_row_bytes(chunk.section.kind)
    source, layer = section.table.kind, section.table.layer
    if section.uuid is not None:
        found = _core.seal_pages(
            source, codes, scales, first, section.kind, section.uuid, layer, chunk.first, out
        )
        return Noticed(*found)
    begin = (first - chunk.first) * width
    end = begin + len(codes) * width
    out[end:] = 0
    return Noticed(*_core.pack_rows(source, codes, scales, first, section.kind, out[begin:end]))


def plan_store(source: Source, out: Path, kind: RowKind) -> Target:
    """A packed store at `out`. Reads the rows of the table digests."""
    spec = source.spec
    digests = [(table.layer, _digest(source, table, kind)) for table in source.tables]
    uuid = store_uuid([digest for _, digest in digests])
    planned = plan_tables(spec, kind, digests)
    store = Store(out, uuid, spec, planned, source.token_map_sha256())
    sections = tuple(
        Section(table, kind, uuid.bytes, place.offset)
        for table, place in zip(source.tables, planned, strict=True)
    )
    return Target(out, build_header(store), sections, store.file_bytes)


def plan_shards(source: Source, out: Path) -> tuple[Target, ...]:
    """DSV41EN1 shards in the directory `out`, one for each table."""
    targets = []
    for table in source.tables:
        head = dsv41.header(table.layer, 0, table.rows, table.rows)
        section = Section(table, RowKind.FP8, None, dsv41.HEADER_BYTES)
        size = dsv41.HEADER_BYTES + table.rows * dsv41.ROW_BYTES
        targets.append(Target(out / f"engram-layer-{table.layer:02}.dsv41", head, (section,), size))
    return tuple(targets)


def _digest(source: Source, table: SourceTable, kind: RowKind) -> bytes:
    ids = source.spec.digest_rows(table.layer)
    codes, scales = sampled_rows(table, ids)
    packed = np.empty(len(ids) * _core.packed_row_bytes(kind), dtype=np.uint8)
    _core.pack_rows(table.kind, codes, scales, 0, kind, packed)
    return source.spec.table_digest(table.layer, _core.packed_row_bytes(kind), packed.tobytes())
