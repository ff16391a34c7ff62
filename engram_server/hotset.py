"""Hot sets: files that say which row groups to bring into the row cache, hottest first. Ids, never bytes.

    offset          what
    0               magic "ENGRMHOT"
    8               u32 version, 1
    12              u32 length of the head
    16              head, JSON: {"tables": [{"layer", "digest" (hex), "id_bytes" (4 or 8), "groups"}, ...]}
    then, table by table
                    u8[groups]      rows of the group: 8, or 1 for a row that belongs to none
                    u8[groups]      mask: bit c set = row c of the 8 is wanted
                    int[groups, 8]  row ids of `id_bytes` each; of a lone row the first counts, the others are -1
    last 32 bytes   sha256 of all before

All numbers are little-endian. A table whose digest is not the one served is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from engram_server.locks import lock_unfinished
from engram_server.logs import ONE_BY_ONE
from engram_server.lookup import GROUP_ROWS, Block
from engram_server.memory import TableState

log = logging.getLogger("engram_server")

MAGIC = b"ENGRMHOT"
VERSION = 1

_PREFIX = struct.Struct("<8sII")
_HEAD_BYTES_MAX = 1 << 20
_SHA256_BYTES = 32
_PIECE_BYTES = 1 << 20
_BLOCK_GROUPS = 4_096
"""Groups of one layer that are read at a time: 4.5 MB of FP4 rows."""


class HotSetError(ValueError):
    """A file that is no hot set, or a damaged one. The text is a sentence."""


@dataclass(frozen=True, eq=False)
class HotGroups:
    """Row groups of one layer, hottest first."""

    layer: int
    group_rows: NDArray[np.uint8]
    """uint8[n]: 8, or 1 for a row that belongs to no group."""
    masks: NDArray[np.uint8]
    """uint8[n]: bit c = row c is wanted."""
    ids: NDArray[np.signedinteger[Any]]
    """int32 or int64[n, 8]; of a lone row the first counts."""

    def __len__(self) -> int:
        return len(self.group_rows)


# ------------------------------------------------------------------------------------------------- writing


def write_hot_set(path: Path, tables: Mapping[int, TableState], hot: Sequence[HotGroups]) -> None:
    """Write a hot set for the tables served. A kill at any moment leaves the old file, or the new one.

    Raises OSError, BlockingIOError among them when another process is writing the same file.
    """
    partial = path.with_name(path.name + ".partial")
    # Always the same name, so that what a kill leaves behind is overwritten and never piles up.
    with partial.open("ab") as file:
        lock_unfinished(file.fileno(), partial)
        file.truncate(0)
        try:
            _write(file, tables, hot)
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(partial)) from error
            raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _write(file: IO[bytes], tables: Mapping[int, TableState], hot: Sequence[HotGroups]) -> None:
    sha256 = hashlib.sha256()

    def put(data: bytes | memoryview) -> None:
        sha256.update(data)
        file.write(data)

    head = [
        {
            "layer": groups.layer,
            "digest": tables[groups.layer].digest.hex(),
            "id_bytes": _id_bytes(tables[groups.layer]),
            "groups": len(groups),
        }
        for groups in hot
    ]
    text = json.dumps({"tables": head}).encode()
    put(_PREFIX.pack(MAGIC, VERSION, len(text)))
    put(text)
    for groups in hot:
        put(np.ascontiguousarray(groups.group_rows).data)
        put(np.ascontiguousarray(groups.masks).data)
        dtype = f"<i{_id_bytes(tables[groups.layer])}"
        for first in range(0, len(groups), _BLOCK_GROUPS):
            put(groups.ids[first : first + _BLOCK_GROUPS].astype(dtype).tobytes())
    file.write(sha256.digest())


def _id_bytes(table: TableState) -> int:
    return 4 if table.rows < 2**31 else 8


# ------------------------------------------------------------------------------------------------- reading


def check_place(path: Path) -> None:
    """Raise HotSetError when a hot set cannot be kept at `path`: another file is there, or no directory."""
    if not path.parent.is_dir():
        raise HotSetError(f"there is no directory {path.parent} to keep the hot set {path.name} in")
    if path.exists() and not path.is_file():  # a pipe's open would wait for its other end
        raise HotSetError(f"{path} is not a regular file: choose another path for the hot set")
    if path.exists():
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
        if start and start != MAGIC:
            raise HotSetError(f"{path} exists and is not a hot set: choose another path for it")


def read_hot_set(path: Path, tables: Mapping[int, TableState], groups_max: int) -> list[HotGroups]:
    """The groups of a hot set that belong to the tables served, at most `groups_max` of each: the hottest.

    Tables with another digest are left out, with a line in the log. Raises HotSetError for what is damaged,
    OSError.
    """
    with path.open("rb") as file:
        head, offset = _checked_head(path, file)
        found = []
        for layer, digest, id_bytes, groups in head:
            table = tables.get(layer)
            if table is not None and table.digest == digest:
                found.append(_groups(path, file, offset, layer, id_bytes, groups, min(groups, groups_max)))
            else:
                log.warning(
                    "%s has %d groups of another table of layer %d: ignored",
                    path,
                    groups,
                    layer,
                    extra=ONE_BY_ONE,
                )
            offset += groups * _entry_bytes(id_bytes)
    return found


def _entry_bytes(id_bytes: int) -> int:
    return 2 + GROUP_ROWS * id_bytes


def _checked_head(path: Path, file: IO[bytes]) -> tuple[list[tuple[int, bytes, int, int]], int]:
    """(layer, digest, id_bytes, groups) of each table, and where the first begins, once all has been checked."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if prefix[: len(MAGIC)] != MAGIC:
        raise HotSetError(f"{path} is not a hot set")
    if len(prefix) < _PREFIX.size:
        raise HotSetError(f"{path} ends inside its first {_PREFIX.size} bytes")
    _, version, head_bytes = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise HotSetError(f"{path} is a hot set of version {version}; this server reads version {VERSION}")
    if head_bytes > _HEAD_BYTES_MAX:
        raise HotSetError(f"{path} claims a head of {head_bytes} bytes, over the limit of {_HEAD_BYTES_MAX}")
    text = file.read(head_bytes)
    if not _sha256(path, file, size):
        raise HotSetError(f"{path} is damaged: its sha256 does not match")
    try:
        head = [
            (
                int(table["layer"]),
                bytes.fromhex(table["digest"]),
                int(table["id_bytes"]),
                int(table["groups"]),
            )
            for table in json.loads(text)["tables"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise HotSetError(f"{path} has a head that cannot be read: {error}") from error
    offset = _PREFIX.size + head_bytes
    sound = all(id_bytes in (4, 8) and groups >= 0 for _, _, id_bytes, groups in head)
    body_bytes = sum(groups * _entry_bytes(id_bytes) for _, _, id_bytes, groups in head)
    if not sound or offset + body_bytes + _SHA256_BYTES != size:
        raise HotSetError(f"{path} has {size} bytes, which is not what its head says")
    return head, offset


def _sha256(path: Path, file: IO[bytes], size: int) -> bool:
    """Whether the last bytes are the sha256 of all before them."""
    left = size - _SHA256_BYTES
    sha256 = hashlib.sha256()
    file.seek(0)
    while left > 0:
        piece = file.read(min(left, _PIECE_BYTES))
        if not piece:
            raise HotSetError(f"{path} became shorter while it was read")
        sha256.update(piece)
        left -= len(piece)
    return file.read() == sha256.digest()


def _groups(
    path: Path, file: IO[bytes], offset: int, layer: int, id_bytes: int, groups: int, count: int
) -> HotGroups:
    def column(start: int, items: int, dtype: str) -> NDArray[Any]:
        file.seek(start)
        return np.fromfile(file, dtype=dtype, count=items)

    group_rows = column(offset, count, "u1")
    masks = column(offset + groups, count, "u1")
    ids = column(offset + 2 * groups, count * GROUP_ROWS, f"<i{id_bytes}").reshape(-1, GROUP_ROWS)
    if not np.isin(group_rows, (1, GROUP_ROWS)).all():
        raise HotSetError(f"{path} has groups of neither 1 nor {GROUP_ROWS} rows in layer {layer}")
    return HotGroups(layer, group_rows, masks, ids)


# ----------------------------------------------------------------------------------------------- restoring


def blocks_of(hot: Sequence[HotGroups], tables: Mapping[int, TableState]) -> Iterator[Block]:
    """Blocks whose reading brings the groups into the cache: hottest first, the layers in turn.

    Groups with a wanted id that is no row of the table are left out.
    """
    longest = max((len(groups) for groups in hot), default=0)
    for first in range(0, longest, _BLOCK_GROUPS):
        for groups in hot:
            part = slice(first, first + _BLOCK_GROUPS)
            ids = groups.ids[part].astype(np.int64)
            masks, group_rows = groups.masks[part], groups.group_rows[part]
            is_row = (ids >= -1) & (ids < tables[groups.layer].rows)
            whole = group_rows == GROUP_ROWS
            for mask in np.unique(masks[whole & (masks > 0)]).tolist():
                begin, end = (mask & -mask).bit_length() - 1, mask.bit_length()
                own = ids[whole & (masks == mask) & is_row[:, begin:end].all(axis=1)]
                if len(own):
                    yield Block([(groups.layer, own)], GROUP_ROWS, (begin, end), 1)
            lone = ids[~whole & is_row[:, 0], :1]
            if len(lone):
                yield Block([(groups.layer, lone)], 1, (0, 1), 1)
