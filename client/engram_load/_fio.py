"""The reads of a trace as a fio iolog: the same bytes of the same files, for fio to ask a drive for.

fio's HOWTO, "Trace file format v2" and "v3", describes the form; timestamps of v3 are microseconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray

from engram_client._description import description_from
from engram_kernels import _core
from engram_load._access import Accesses, Groups
from engram_load._errors import LoadError
from engram_load._replay import check_tables
from engram_server import wire
from engram_server.limits import Limits
from engram_server.memory import Memory, MemoryOptions
from engram_server.tables.checkpoint import PlaneRef
from engram_server.tables.store import Store


@dataclass(frozen=True)
class Exported:
    """What was written."""

    reads: int
    read_bytes: int
    lookups: int
    direct: bool
    """Whether all files are read past the page cache."""


@dataclass(frozen=True)
class _Place:
    """Where part of each row lies: `bytes` of them at offset(row) of a file."""

    file: str
    alignment: int
    row_bytes: int
    plane: PlaneRef | None = None
    pages: tuple[int, _core.RowKind] | None = None

    def offsets(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.plane is not None:
            return self.plane.offset + rows * self.plane.stride
        assert self.pages is not None
        first, kind = self.pages
        return first + np.asarray([_core.record_offset(kind, int(row)) for row in rows], dtype=np.int64)

    def reads(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, int, int]]:
        """(file, offset, bytes) of each row's read, whole blocks."""
        begin = self.offsets(rows)
        end = -(-(begin + self.row_bytes) // self.alignment) * self.alignment
        begin = begin // self.alignment * self.alignment
        for at, length in zip(begin.tolist(), (end - begin).tolist(), strict=True):
            yield self.file, at, length


def export(
    accesses: Accesses,
    tables: Path,
    out: IO[str],
    *,
    version: Literal[2, 3],
    cache_bytes: int,
    scales: Literal["memory", "disk"],
) -> Exported:
    """Write the reads that the trace's lookups cost a server of these tables, with a cache of so many bytes (an LRU of
    row groups; 0 = none). Raises LoadError, TraceError, and what Memory.open raises."""
    options = MemoryOptions(scales="disk", cache_bytes=0)
    with Memory.open(tables, options) as memory:
        served = description_from(wire.describe(memory, Limits(), "0" * 32), str(tables))
        check_tables(accesses.description, served, accesses.trace.path)
        places = _places(memory, scales)
        direct = all(file.direct for file in memory.reader.files)
    files = sorted({place.file for parts in places.values() for place in parts})
    if odd := [file for file in files if any(letter.isspace() for letter in file)]:
        raise LoadError(
            f"{odd[0]!r} cannot stand in an iolog, whose names have no spaces: link it to one without"
        )
    out.write(f"fio version {version} iolog\n")
    stamp = "0 " if version == 3 else ""
    for action in ("add", "open"):
        out.writelines(f"{stamp}{file} {action}\n" for file in files)
    cache = _Cache(cache_bytes // accesses.group_bytes)
    reads = read_bytes = microseconds = 0
    times = (entry.ns // 1000 for entry in accesses.trace.entries())
    first: int | None = None
    for lookup, at in zip(accesses, times, strict=True):
        first = at if first is None else first
        microseconds = max(microseconds, at - first)  # fio wants them ascending
        for groups in lookup:
            rows = cache.missed(groups)
            for place in places[groups.layer]:
                for file, offset, length in place.reads(rows):
                    out.write(
                        f"{microseconds if version == 3 else ''} {file} read {offset} {length}\n".lstrip()
                    )
                    reads += 1
                    read_bytes += length
    out.writelines(f"{f'{microseconds} ' if version == 3 else ''}{file} close\n" for file in files)
    return Exported(reads, read_bytes, accesses.lookups, direct)


class _Cache:
    """Which groups a cache of so many has: the least recently used goes first."""

    def __init__(self, groups: int) -> None:
        self._room = groups
        self._held: OrderedDict[int, None] = OrderedDict()

    def missed(self, groups: Groups) -> NDArray[np.int64]:
        """Rows of the groups that it had not, and has now."""
        if not self._room:
            return groups.ids[groups.ids >= 0]
        missed = []
        for index, name in enumerate(groups.names.tolist()):
            if name in self._held:
                self._held.move_to_end(name)
                continue
            missed.append(index)
            self._held[name] = None
            if len(self._held) > self._room:
                self._held.popitem(last=False)
        ids = groups.ids[missed]
        return ids[ids >= 0]


def _places(memory: Memory, scales: str) -> dict[int, list[_Place]]:
    """By layer, where its rows are read from."""
    alignment = {file.path: file.alignment_bytes for file in memory.reader.files}
    tables = memory.checkpoint
    if isinstance(tables, Store):
        file = str(tables.path)
        return {
            table.layer: [
                _Place(file, alignment[file], table.row_bytes + 4, pages=(table.offset, table.kind))
            ]
            for table in tables.tables
        }
    return {
        table.layer: [
            _Place(str(plane.path), alignment[str(plane.path)], plane.stride, plane=plane)
            for plane in ((table.codes, table.scales) if scales == "disk" else (table.codes,))
        ]
        for table in tables.tables
    }
