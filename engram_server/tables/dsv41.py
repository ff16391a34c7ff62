"""DSV41EN1, the community's shards of interleaved FP8 rows.

A file is a page of 4,096 bytes that begins with six little-endian u64 (magic, layer, first row, end row, the
table's rows in all, bytes a row: 264), then rows first .. end - 1, each 256 codes and 8 scale bytes. A
table may be cut into any number of such files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engram_server.spec import EngramSpec
from engram_server.tables.errors import TableError
from engram_server.tables.magic import begins_with

MAGIC = b"DSV1EN41"
"""0x31344e4531565344, little-endian."""
HEADER_BYTES = 4096
ROW_BYTES = 264

_HEAD = struct.Struct("<8s5Q")


@dataclass(frozen=True)
class Shard:
    """One file: rows first .. end - 1 of a layer's `rows`."""

    path: Path
    layer: int
    first: int
    end: int
    rows: int


def is_dsv41(path: Path) -> bool:
    """Whether a path is a regular file that begins with the magic. False when it cannot be read."""
    return begins_with(path, MAGIC)


def header(layer: int, first: int, end: int, rows: int) -> bytes:
    """The 4,096 bytes before rows first .. end - 1 of a layer's `rows`."""
    return _HEAD.pack(MAGIC, layer, first, end, rows, ROW_BYTES).ljust(HEADER_BYTES, b"\0")


def read_shard(path: Path) -> Shard:
    """One file's header, checked against the file's size. Raises TableError or OSError."""
    with path.open("rb", buffering=0) as file:
        head = file.read(_HEAD.size)
        file_bytes = path.stat().st_size
    if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
        raise TableError(f"{path} is not a DSV41EN1 shard: it does not begin with its magic")
    _, layer, first, end, rows, row_bytes = _HEAD.unpack(head)
    if row_bytes != ROW_BYTES:
        raise TableError(f"{path} has rows of {row_bytes} bytes; DSV41EN1 rows have {ROW_BYTES}")
    if not first < end <= rows:
        raise TableError(f"{path} says it holds rows {first} to {end} of {rows}, which is no range of them")
    expected = HEADER_BYTES + (end - first) * ROW_BYTES
    if file_bytes != expected:
        raise TableError(
            f"{path} has {file_bytes} bytes, but its header describes {expected} ({end - first} rows); "
            "download or export it again"
        )
    return Shard(path, layer, first, end, rows)


def find_shards(path: Path) -> list[Shard]:
    """The shards in a directory, or the one file. Raises TableError or OSError."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [read_shard(file) for file in files if is_dsv41(file)]


def check_cover(shards: Sequence[Shard], spec: EngramSpec, layer: int) -> tuple[Shard, ...]:
    """The shards of one layer in row order, proven to hold each of its rows once. Raises TableError."""
    own = sorted((shard for shard in shards if shard.layer == layer), key=lambda shard: shard.first)
    rows = spec.rows_of(layer)
    if not own:
        raise TableError(
            f"there is no DSV41EN1 shard of layer {layer}; download it, or leave it out by --layers"
        )
    for shard in own:
        if shard.rows != rows:
            raise TableError(
                f"{shard.path} says layer {layer} has {shard.rows} rows, but the config gives it {rows}; use the "
                "config that belongs to these tables"
            )
    for before, after in pairwise(own):
        if after.first < before.end:
            raise TableError(
                f"{before.path} and {after.path} both hold row {after.first} of layer {layer}; keep one of them"
            )
        if after.first > before.end:
            raise TableError(
                f"rows {before.end} to {after.first - 1} of layer {layer} are missing between {before.path} and "
                f"{after.path}; download the shard that holds them"
            )
    if own[0].first != 0 or own[-1].end != rows:
        raise TableError(
            f"the shards of layer {layer} hold rows {own[0].first} to {own[-1].end - 1} of {rows}; download the "
            "others too"
        )
    return tuple(own)
