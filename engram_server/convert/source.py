"""Where a conversion's rows come from: a checkpoint's planes, or DSV41EN1 shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_kernels._core import RowKind
from engram_server.spec import V41_TOKEN_MAP_SHA256, EngramSpec
from engram_server.tables import dsv41
from engram_server.tables.bulk import BulkFile, bulk_buffer
from engram_server.tables.checkpoint import PlaneRef, TableRef, open_checkpoint
from engram_server.tables.errors import TableError
from engram_server.tables.layout import CONFIG_NAME, INDEX_NAME, SCALES_PER_ROW, SINGLE_NAME
from engram_server.tables.store import is_store
from engram_server.tokens import load_token_map


@dataclass(frozen=True)
class Segment:
    """Rows first .. end - 1 of a table; the planes begin with row `first`."""

    first: int
    end: int
    codes: PlaneRef
    scales: PlaneRef

    @property
    def interleaved(self) -> bool:
        """Scales lie inside the rows of codes: one read brings both."""
        return self.codes.path == self.scales.path and self.codes.stride == self.scales.stride


@dataclass(frozen=True)
class SourceTable:
    """One layer's table."""

    layer: int
    rows: int
    kind: RowKind
    segments: tuple[Segment, ...]
    """Ascending, together every row once."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row: 136 for FP4, 264 for FP8."""
        return _core.packed_row_bytes(self.kind)


@dataclass(frozen=True)
class Source:
    """Tables to convert."""

    path: Path
    root: Path
    """The directory of the config.json."""
    spec: EngramSpec
    tables: tuple[SourceTable, ...]

    @property
    def kind(self) -> RowKind:
        """How the rows are stored; one kind for all tables."""
        return self.tables[0].kind

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds rows, once each."""
        planes = [p for t in self.tables for s in t.segments for p in (s.codes, s.scales)]
        return tuple(dict.fromkeys(plane.path for plane in planes))

    def token_map_sha256(self) -> bytes:
        """Digest of the model's token map: published for V4.1, else by the tokenizer.json beside the config.

        Empty when there is none. Raises TokenMapError for a tokenizer that is not the model's.
        """
        own = self.root / "tokenizer.json"
        if own.is_file():
            return load_token_map(own, self.spec).sha256
        return bytes.fromhex(V41_TOKEN_MAP_SHA256) if self.spec.is_v41 else b""


def open_source(path: Path, config: Path | None = None, layers: Sequence[int] | None = None) -> Source:
    """Find the tables to convert. `config`: config.json of DSV41EN1 shards, else the one beside them.

    Raises TableError or SpecError (both ValueError), OSError for files that cannot be read.
    """
    if is_store(path):
        raise TableError(
            f"{path} is a packed store already; convert the checkpoint or the shards it was made from"
        )
    holds_checkpoint = path.is_dir() and ((path / INDEX_NAME).exists() or (path / SINGLE_NAME).exists())
    shards = [] if holds_checkpoint or not path.exists() else dsv41.find_shards(path)
    if shards:
        return _open_shards(path, shards, config, layers)
    if config is not None:
        raise TableError(
            f"{path} holds no DSV41EN1 shards; a checkpoint has its config.json beside it: leave --config out"
        )
    checkpoint = open_checkpoint(path)
    tables = tuple(_in_place(table) for table in checkpoint.tables)
    chosen = _choose(path, tables, layers)
    return Source(path, checkpoint.root, checkpoint.spec, chosen)


class RowReader:
    """Reads stretches of a table in bulk. For one thread: it owns buffers, which the next read overwrites."""

    def __init__(self, files: dict[Path, BulkFile], rows_max: int, kind: RowKind) -> None:
        """rows_max: rows that one `read` may ask for."""
        self._files = files
        self._codes = bulk_buffer(rows_max * _core.packed_row_bytes(kind))
        self._scales = bulk_buffer(rows_max * SCALES_PER_ROW)

    def read(
        self, table: SourceTable, first: int, count: int
    ) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]]:
        """Rows first .. first + count - 1, a piece for each segment: first row, codes [n, 128 or 256] and
        scales [n, 8]. Raises TableError or OSError."""
        for segment in table.segments:
            begin, end = max(first, segment.first), min(first + count, segment.end)
            if begin < end:
                yield (begin, *self._piece(table.kind, segment, begin, end))

    def _piece(
        self, kind: RowKind, segment: Segment, begin: int, end: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        width = _core.packed_row_bytes(kind) - SCALES_PER_ROW
        codes = self._plane(segment.codes, begin - segment.first, end - begin, self._codes)
        if segment.interleaved:
            return codes[:, :width], codes[:, width:]
        return codes, self._plane(segment.scales, begin - segment.first, end - begin, self._scales)

    def _plane(self, plane: PlaneRef, skip: int, count: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        offset = plane.offset + skip * plane.stride
        return self._files[plane.path].read(offset, count * plane.stride, buffer).reshape(count, plane.stride)


def sampled_rows(table: SourceTable, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A few rows by ascending id: codes [n, 128 or 256] and scales [n, 8]. Raises TableError or OSError."""
    width = table.row_bytes - SCALES_PER_ROW
    codes = np.empty((len(ids), width), dtype=np.uint8)
    scales = np.empty((len(ids), SCALES_PER_ROW), dtype=np.uint8)
    for segment in table.segments:
        begin, end = np.searchsorted(ids, [segment.first, segment.end])
        with (
            segment.codes.path.open("rb", buffering=0) as code_file,
            segment.scales.path.open("rb", buffering=0) as scale_file,
        ):
            for i in range(int(begin), int(end)):
                row = int(ids[i]) - segment.first
                for file, plane, out in (
                    (code_file, segment.codes, codes[i]),
                    (scale_file, segment.scales, scales[i]),
                ):
                    if os.preadv(file.fileno(), [out.data], plane.offset + row * plane.stride) != len(out):
                        raise TableError(
                            f"{plane.path}: the file ends inside row {ids[i]}; download it again"
                        )
    return codes, scales


def _in_place(table: TableRef) -> SourceTable:
    segment = Segment(0, table.rows, table.codes, table.scales)
    return SourceTable(table.layer, table.rows, table.kind, (segment,))


def _open_shards(
    path: Path, shards: Sequence[dsv41.Shard], config: Path | None, layers: Sequence[int] | None
) -> Source:
    root = path if path.is_dir() else path.parent
    config = config or root / CONFIG_NAME
    if not config.exists():
        raise TableError(
            f"{config} is not there; it says what DSV41EN1 shards belong to: give the model's with --config FILE"
        )
    spec = EngramSpec.from_file(config)
    foreign = sorted({shard.layer for shard in shards} - set(spec.layers))
    if foreign:
        raise TableError(
            f"{path} holds a shard of layer {foreign[0]}, but {config} names layers {list(spec.layers)}"
        )
    # One file is converted for what it holds; of a directory nothing may be missing unless it is left out by name.
    wanted = layers or (spec.layers if path.is_dir() else sorted({shard.layer for shard in shards}))
    unknown = sorted(set(wanted) - set(spec.layers))
    if unknown:
        raise TableError(
            f"--layers names {unknown[0]}, but the model's Engram layers are {list(spec.layers)}"
        )
    tables = []
    for layer in sorted(set(wanted)):
        segments = tuple(
            Segment(
                shard.first,
                shard.end,
                PlaneRef(shard.path, dsv41.HEADER_BYTES, dsv41.ROW_BYTES),
                PlaneRef(shard.path, dsv41.HEADER_BYTES + dsv41.ROW_BYTES - SCALES_PER_ROW, dsv41.ROW_BYTES),
            )
            for shard in dsv41.check_cover(shards, spec, layer)
        )
        tables.append(SourceTable(layer, spec.rows_of(layer), RowKind.FP8, segments))
    return Source(path, config.parent, spec, tuple(tables))


def _choose(
    path: Path, tables: tuple[SourceTable, ...], layers: Sequence[int] | None
) -> tuple[SourceTable, ...]:
    if layers is None:
        return tables
    missing = sorted(set(layers) - {table.layer for table in tables})
    if missing:
        raise TableError(
            f"--layers names {missing[0]}, but {path} has tables of {[table.layer for table in tables]}"
        )
    return tuple(table for table in tables if table.layer in layers)
