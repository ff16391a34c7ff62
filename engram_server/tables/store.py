"""The packed store: one file that holds the tables of a model and is enough to serve from.

A header page says what is in it; behind it lie each table's pages, full of records: a packed row and the
checksum that binds it to its store, layer and row id. docs/format.md specifies every byte.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_kernels._core import PAGE_BYTES, RowKind
from engram_server.spec import EngramSpec, SpecError
from engram_server.tables.errors import TableError
from engram_server.tables.magic import begins_with
from engram_server.tables.safetensors import parse_json_object

__all__ = ["Store", "StoreTable", "build_header", "is_store", "open_store", "store_uuid"]

MAGIC = b"\x89ENGRAM\n"
VERSION = 1

_HEAD = struct.Struct("<8sII")
"""Magic, version, bytes of JSON, which follow."""
_CRC_BYTES = 4
JSON_BYTES_MAX = PAGE_BYTES - _HEAD.size - _CRC_BYTES

_UUID_NAMESPACE = uuids.UUID("17d5f27b-e29b-4ee2-9cf4-851322039c49")
_KINDS = {"fp4": RowKind.FP4, "fp8": RowKind.FP8}
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StoreTable:
    """One layer's table in a store."""

    layer: int
    rows: int
    kind: RowKind
    first_page: int
    """Where its pages begin; the header is page 0."""
    digest: bytes
    """See EngramSpec.table_digest."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row: 136 for FP4, 264 for FP8."""
        return _core.packed_row_bytes(self.kind)

    @property
    def offset(self) -> int:
        """First byte of its pages in the file."""
        return self.first_page * PAGE_BYTES

    @property
    def pages(self) -> int:
        """Number of its pages."""
        return -(-self.rows // _core.records_per_page(self.kind))


@dataclass(frozen=True)
class Store:
    """What a store's header says, checked against its file."""

    path: Path
    uuid: uuids.UUID
    """Part of every record's checksum."""
    spec: EngramSpec
    tables: tuple[StoreTable, ...]
    """Ascending by layer, one row kind for all. May be fewer than `spec.layers`."""
    token_map_sha256: bytes
    """Digest of the token map that belongs to the tables; empty when the writer knew none."""

    @property
    def root(self) -> Path:
        """The directory in which a tokenizer.json is looked for."""
        return self.path.parent

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that holds rows."""
        return (self.path,)

    @property
    def kind(self) -> RowKind:
        """How the rows are stored."""
        return self.tables[0].kind

    @property
    def scale_bytes(self) -> int:
        """Bytes of scale planes, of which there are none: scales lie inside the rows."""
        return 0

    @property
    def file_bytes(self) -> int:
        """Exact size of the file."""
        return self.tables[-1].offset + self.tables[-1].pages * PAGE_BYTES


def is_store(path: Path) -> bool:
    """Whether a path is a regular file that begins as a store does. False when it cannot be read."""
    return begins_with(path, MAGIC)


def open_store(path: Path) -> Store:
    """Read and check a store's header, and that the file has exactly the size it gives.

    Rows are not looked at: each is checked by its own seal when it is read. Raises TableError or SpecError
    (both ValueError): a sentence naming the file, what is wrong, what to do.
    """
    page, file_bytes = _read_page(path)
    store = parse_header(path, page)
    if file_bytes != store.file_bytes:
        change = "truncated" if file_bytes < store.file_bytes else "longer than it was written"
        _refuse(
            path, f"the file has {file_bytes} bytes, but its header describes {store.file_bytes}: {change}"
        )
    return store


def store_uuid(digests: Sequence[bytes]) -> uuids.UUID:
    """The UUID that `convert` gives to a store of tables with these digests.

    Derived, so that converting again gives the identical file, while tables with other rows get another one.
    """
    return uuids.uuid5(_UUID_NAMESPACE, " ".join(digest.hex() for digest in digests))


def plan_tables(
    spec: EngramSpec, kind: RowKind, digests: Sequence[tuple[int, bytes]]
) -> tuple[StoreTable, ...]:
    """Lay tables out one behind the other: (layer, digest), ascending by layer."""
    tables: list[StoreTable] = []
    page = 1
    for layer, digest in digests:
        tables.append(StoreTable(layer, spec.rows_of(layer), kind, page, digest))
        page += tables[-1].pages
    return tuple(tables)


def build_header(store: Store) -> bytes:
    """The header page. Raises TableError when the tables are too many to be described in one page."""
    text = json.dumps(
        {
            "uuid": str(store.uuid),
            "kind": store.kind.name.lower(),
            "tables": [
                {"layer": t.layer, "rows": t.rows, "first_page": t.first_page, "digest": t.digest.hex()}
                for t in store.tables
            ],
            "token_map_sha256": store.token_map_sha256.hex(),
            "config": store.spec.to_config(),
        },
        separators=(",", ":"),
    ).encode()
    if len(text) > JSON_BYTES_MAX:
        raise TableError(
            f"{len(store.tables)} tables take {len(text)} bytes to describe, but a store's header has room for "
            f"{JSON_BYTES_MAX}; choose fewer with --layers"
        )
    body = (_HEAD.pack(MAGIC, VERSION, len(text)) + text).ljust(PAGE_BYTES - _CRC_BYTES, b"\0")
    return body + _core.crc32c(body).to_bytes(_CRC_BYTES, "little")


def parse_header(path: Path, page: bytes) -> Store:
    """The store that a header page describes. Raises TableError or SpecError."""
    body = page[:-_CRC_BYTES]
    magic, version, length = _HEAD.unpack_from(page)
    if magic != MAGIC:
        _refuse(path, "the file does not begin as a packed store does", "name a file that `convert` wrote")
    # The checksum stands at the same place in every version, so damage is never mistaken for a new one.
    if _core.crc32c(body) != int.from_bytes(page[-_CRC_BYTES:], "little"):
        _refuse(path, "the header page is damaged: its checksum does not match")
    if version != VERSION:
        _refuse(
            path,
            f"this is a store of version {version}; this program reads version {VERSION}",
            "use the program that wrote it, or a newer one",
        )
    if length > JSON_BYTES_MAX or any(body[_HEAD.size + length :]):
        _refuse(path, "the header page has bytes behind its JSON that are not zero")
    return _Fields(path, parse_json_object(path, "the header", body[_HEAD.size :][:length])).store()


@dataclass(frozen=True)
class _Fields:
    """The header's JSON, read with suspicion: a checksum that fits does not say that its writer was right."""

    path: Path
    entries: dict[str, Any]

    def store(self) -> Store:
        identity = self._text("uuid")
        try:
            uuid = uuids.UUID(identity)
        except ValueError:
            uuid = None
        if uuid is None or str(uuid) != identity:
            _refuse(self.path, f"the header's uuid is {identity!r:.60}")
        kind = _KINDS.get(self._text("kind"))
        if kind is None:
            _refuse(self.path, f"the header's kind is {self.entries['kind']!r:.60}; known are fp4 and fp8")
        try:
            spec = EngramSpec.from_config(self.entries.get("config"))
        except SpecError as error:
            raise SpecError(f"{self.path}: the header's config: {error}") from error
        token_map = self._text("token_map_sha256")
        if token_map and not _SHA256_HEX.fullmatch(token_map):
            _refuse(self.path, f"the header's token_map_sha256 is {token_map!r:.80}")
        return Store(self.path, uuid, spec, self._tables(spec, kind), bytes.fromhex(token_map))

    def _tables(self, spec: EngramSpec, kind: RowKind) -> tuple[StoreTable, ...]:
        listed = self.entries.get("tables")
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed) or not listed:
            _refuse(self.path, "the header's tables is not a list of objects")
        layers = [entry.get("layer") for entry in listed]
        if layers != [layer for layer in spec.layers if layer in layers]:
            _refuse(
                self.path, f"the header lists tables of layers {layers!r:.80}; the model's are {spec.layers}"
            )
        digests = [entry.get("digest") for entry in listed]
        if not all(isinstance(digest, str) and _SHA256_HEX.fullmatch(digest) for digest in digests):
            _refuse(self.path, "a table's digest in the header is not 64 hexadecimal digits")
        pairs = zip(layers, map(bytes.fromhex, digests), strict=True)
        planned = plan_tables(spec, kind, list(pairs))
        for entry, table in zip(listed, planned, strict=True):
            for key, value in (("rows", table.rows), ("first_page", table.first_page)):
                if type(entry.get(key)) is not int or entry[key] != value:
                    _refuse(
                        self.path,
                        f"the header gives layer {table.layer} {key} {entry.get(key)!r:.40}; it must be {value}",
                    )
        return planned

    def _text(self, key: str) -> str:
        value = self.entries.get(key)
        if not isinstance(value, str):
            _refuse(self.path, f"the header's {key} is not a string")
        return value


def read_rows(store: Store, table: StoreTable, ids: Sequence[int]) -> NDArray[np.uint8]:
    """Packed rows [n, row_bytes] of a few ids, each checked by its seal. Raises TableError or OSError."""
    out = np.empty((len(ids), table.row_bytes), dtype=np.uint8)
    with store.path.open("rb", buffering=0) as file:
        for i, row in enumerate(ids):
            offset = table.offset + _core.record_offset(table.kind, row)
            record = os.pread(file.fileno(), table.row_bytes + _CRC_BYTES, offset)
            packed, seal = record[: table.row_bytes], record[table.row_bytes :]
            if len(seal) != _CRC_BYTES or int.from_bytes(seal, "little") != _core.record_seal(
                store.uuid.bytes, table.layer, row, packed
            ):
                raise TableError(
                    f"{store.path}: row {row} of layer {table.layer} does not match its checksum; `verify` "
                    "lists all that do not: convert the table again"
                )
            out[i] = np.frombuffer(packed, dtype=np.uint8)
    return out


def _read_page(path: Path) -> tuple[bytes, int]:
    """The first page, and the file's size."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before open, which would wait on a pipe for its writer
            _refuse(path, "this is not a regular file", "name a packed store")
        with path.open("rb") as file:
            page = file.read(PAGE_BYTES)
            file_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        _refuse(path, "there is no such file", "check the name")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}", "check the path and its permissions")
    if len(page) < PAGE_BYTES:
        _refuse(path, f"the file has {len(page)} bytes, less than a store's header page of {PAGE_BYTES}")
    return page, file_bytes


def _refuse(
    path: Path, problem: str, advice: str = "convert the tables again, or copy the store again"
) -> NoReturn:
    raise TableError(f"{path}: {problem}; {advice}")
