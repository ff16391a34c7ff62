"""Traces: what was asked of a server, and when. docs/trace.md specifies every byte.

    offset          what
    0               magic "ENGRMTRC"
    8               u32 version, 1
    12              u32 length of the head
    16              head: DescribeReply of engram.proto, what the server said of itself when it began to record
    then, entry by entry
                    u32 length of the body, u8 kind, u8 lane, u16 0, u64 ns since the head was written
                    body: kind 1, LookupRequest; kind 2, u64 lookups that are missing here

All numbers are little-endian. A trace may end anywhere, since a server may: what is cut off is left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from engram_client._proto import engram_pb2 as pb
from engram_server.tables.magic import begins_with

MAGIC = b"ENGRMTRC"
VERSION = 1
LOOKUP, GAP = 1, 2

_PREFIX = struct.Struct("<8sII")
_ENTRY = struct.Struct("<IBBHQ")
_GAP = struct.Struct("<Q")
_HEAD_BYTES_MAX = 1 << 20
_BODY_BYTES_MAX = 256 << 20
"""More than the row ids of the largest request that a server takes."""


class TraceError(ValueError):
    """A file that is no trace, or a damaged one. The text is a sentence."""


@dataclass(frozen=True)
class Entry:
    """One lookup."""

    ns: int
    """Since recording began."""
    lane: int
    """As `Lane` of engram.proto numbers it: the one it was in, whatever the request says."""
    request: pb.LookupRequest


class Trace:
    """A trace in a file. Iterate `entries`; what they left to say is known afterwards."""

    def __init__(self, path: Path) -> None:
        """Raises TraceError, OSError."""
        self.path = path
        self.missing = 0
        """Lookups that the server did not record, as far as entries were read."""
        self.cut_short = False
        """Whether the last entry is not whole."""
        with path.open("rb") as file:
            prefix = file.read(_PREFIX.size)
            if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
                raise TraceError(f"{path} is no trace: it does not begin as one (see docs/trace.md)")
            _, version, head_bytes = _PREFIX.unpack(prefix)
            if version != VERSION:
                raise TraceError(
                    f"{path} is a trace of version {version}; this program reads version {VERSION}"
                )
            if head_bytes > _HEAD_BYTES_MAX:
                raise TraceError(f"{path}: the trace's head claims {head_bytes} bytes: it is damaged")
            head = file.read(head_bytes)
        self._begin = _PREFIX.size + head_bytes
        try:
            if len(head) < head_bytes:
                raise DecodeError("it ends early")
            self.description = pb.DescribeReply.FromString(head)
        except DecodeError as error:
            raise TraceError(f"{path}: the trace's head is damaged: {error}") from error

    def entries(self) -> Iterator[Entry]:
        """Lookups, in the order the server planned them. Raises TraceError naming the byte that is wrong."""
        self.missing, self.cut_short = 0, False
        with self.path.open("rb") as file:
            at = file.seek(self._begin)
            while prefix := file.read(_ENTRY.size):
                body_bytes, kind, lane, zero, ns = _ENTRY.unpack(prefix.ljust(_ENTRY.size, b"\0"))
                whole = len(prefix) == _ENTRY.size
                if whole and (body_bytes > _BODY_BYTES_MAX or kind not in (LOOKUP, GAP) or zero):
                    raise TraceError(
                        f"{self.path}: what is at byte {at} is no entry of a trace: it is damaged"
                    )
                body = file.read(body_bytes) if whole else b""
                if not whole or len(body) < body_bytes:
                    self.cut_short = True
                    return
                if kind == GAP:
                    self.missing += self._gap(body, at)
                else:
                    yield Entry(ns, lane, self._request(body, at))
                at += _ENTRY.size + body_bytes

    def _gap(self, body: bytes, at: int) -> int:
        if len(body) != _GAP.size:
            raise TraceError(f"{self.path}: the entry at byte {at} is damaged")
        return int(_GAP.unpack(body)[0])

    def _request(self, body: bytes, at: int) -> pb.LookupRequest:
        try:
            return pb.LookupRequest.FromString(body)
        except DecodeError as error:
            raise TraceError(f"{self.path}: the entry at byte {at} is damaged: {error}") from error

    def sequences(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """(tokens, history) of all lookups. Raises TraceError where there are row ids alone."""
        for entry in self.entries():
            if entry.request.WhichOneof("keys") != "tokens":
                raise TraceError(
                    f"{self.path} holds row ids, and what is wanted here are tokens: record without --record-what rows"
                )
            for sequence in entry.request.tokens.sequences:
                yield self._ids(sequence.tokens), self._ids(sequence.history)

    def _ids(self, data: bytes) -> NDArray[np.int32]:
        if len(data) % 4:
            raise TraceError(f"{self.path}: a lookup in it is damaged: {len(data)} bytes are no token ids")
        return np.frombuffer(data, dtype="<i4")


def is_trace(path: Path) -> bool:
    """Whether a file begins as a trace does. False when it cannot be read."""
    return begins_with(path, MAGIC)


def head_bytes(description: pb.DescribeReply) -> bytes:
    """What a trace begins with."""
    head = description.SerializeToString()
    return _PREFIX.pack(MAGIC, VERSION, len(head)) + head


def lookup_bytes(ns: int, lane: int, request: pb.LookupRequest) -> bytes:
    """An entry of a lookup."""
    return _entry(LOOKUP, lane, ns, request.SerializeToString())


def gap_bytes(ns: int, missing: int) -> bytes:
    """An entry in place of lookups that were left out."""
    return _entry(GAP, 0, ns, _GAP.pack(missing))


def _entry(kind: int, lane: int, ns: int, body: bytes) -> bytes:
    return _ENTRY.pack(len(body), kind, lane, 0, ns) + body
