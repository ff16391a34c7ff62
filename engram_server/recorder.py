"""Writes a trace of the lookups of a server, as `serve --record` asks for.

Noting a lookup is putting a reference into a list; what goes through shared memory, native threads note in one of
theirs, which is looked at every so often. A task makes bytes of what is there and writes them, in a thread of its own;
what comes while too much waits is counted, not kept. So a slow disk costs the trace entries, and no lookup waits for
it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiofiles
import numpy as np
from numpy.typing import NDArray

from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server.lookup import Request
from engram_server.shared_memory import SharedMemoryChannel
from engram_server.sockets import ServeError
from engram_server.trace import gap_bytes, head_bytes, lookup_bytes
from engram_server.wire import FORMAT_NUMBERS

log = logging.getLogger("engram_server")

_NOTED_BYTES = 512
"""What a lookup that waits takes beside its keys, about."""
_LOOK_S = 0.05
"""Between two looks at what came through shared memory."""
_LANES = {
    _core.Lane.DECODE: pb.LANE_DECODE,
    _core.Lane.PREFILL: pb.LANE_PREFILL,
    _core.Lane.PREFETCH: pb.LANE_PREFETCH,
}


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded, and how much. Every limit has its default here."""

    path: Path
    what: Literal["requests", "rows"] = "requests"
    """rows: row ids in place of token ids."""
    file_bytes: int = 4 << 30
    """Of the trace; lookups after that are counted, and left out."""
    pending_bytes: int = 64 << 20
    """Of keys that wait to be written; as many again of what came through shared memory."""


@dataclass(frozen=True, eq=False)
class _Noted:
    at_ns: int
    lane: _core.Lane
    kept: Callable[[], pb.LookupRequest]
    """Makes what the trace has of it."""


class Recorder:
    """Records lookups. Belongs to the event loop it is opened on; close it there."""

    def __init__(
        self, options: RecordOptions, file: Any, file_bytes: int, executor: ThreadPoolExecutor
    ) -> None:
        """For `open`."""
        self._options = options
        self._file = file
        self._executor = executor
        self._began_ns = time.monotonic_ns()
        self._noted: list[_Noted] = []
        self._pending_bytes = 0
        self._file_bytes = file_bytes
        self._missing = 0
        self._told = 0
        """Of the missing lookups, those that gaps in the trace tell of."""
        self._channel: SharedMemoryChannel | None = None
        self._wake = asyncio.Event()
        self._closing = False
        self._failed = False
        self._written = 0
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def open(cls, options: RecordOptions, description: pb.DescribeReply) -> Recorder:
        """Begin a trace in a new file that its owner alone may read. Raises ServeError."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="trace")
        try:
            file = await aiofiles.open(options.path, "xb", opener=_opener, executor=executor)
        except FileExistsError:
            executor.shutdown()
            raise ServeError(f"cannot record to {options.path}: it exists, and is not overwritten") from None
        except OSError as error:
            executor.shutdown()
            raise ServeError(f"cannot record to {options.path}: {error.strerror}") from error
        try:
            file_bytes = await file.write(head_bytes(description))
            await file.flush()
        except OSError as error:
            with suppress(OSError):
                await file.close()
            options.path.unlink(missing_ok=True)  # of no use, and in the way of the next start
            executor.shutdown()
            raise ServeError(f"cannot record to {options.path}: {error.strerror}") from error
        return cls(options, file, file_bytes, executor)

    def note(self, message: pb.LookupRequest, request: Request, lane: _core.Lane, at_ns: int) -> None:
        """A lookup was planned that came at a moment of time.monotonic_ns. Takes microseconds, whatever its size."""
        size = self._size(message, request) + _NOTED_BYTES
        if self._pending_bytes + size > self._options.pending_bytes or self._over() or self._closing:
            self._missing += 1
            return
        self._pending_bytes += size
        rows = self._options.what == "rows" and request.kind == "tokens"
        self._noted.append(_Noted(at_ns, lane, partial(_of_message, message, request if rows else None)))
        self._wake.set()

    def follow(self, channel: SharedMemoryChannel) -> None:
        """Record what goes through shared memory as well, from now on. The channel is to be closed first."""
        self._channel = channel
        channel.note_requests(self._options.pending_bytes)
        self._wake.set()

    def leave(self) -> None:
        """Nothing that goes through shared memory from now on belongs into this trace."""
        if self._channel is not None:
            self._channel.note_requests(0)

    async def close(self) -> None:
        """Write what was noted, and end the trace."""
        self._closing = True
        self._wake.set()
        await self._task
        self._executor.shutdown()
        seen = self._written + self._missing
        log.info("%s: %d of %d lookups recorded", self._options.path, self._written, seen)

    def _size(self, message: pb.LookupRequest, request: Request) -> int:
        if self._options.what == "requests":
            return message.ByteSize()
        return sum(ids.size * ids.itemsize for ids in request.ids)

    def _over(self) -> bool:
        """Whether the trace takes no more lookups."""
        return self._failed or self._file_bytes >= self._options.file_bytes

    async def _run(self) -> None:
        try:
            closing = False
            while not closing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if self._channel is None else _LOOK_S):
                        await self._wake.wait()
                self._wake.clear()
                closing = self._closing  # nothing is noted after that
                await self._write_noted()
        finally:
            with suppress(OSError):  # nothing is left to be written
                await self._file.close()

    async def _write_noted(self) -> None:
        noted, self._noted = self._noted, []
        taken = self._pending_bytes
        lookups = len(noted)
        loop = asyncio.get_running_loop()
        try:
            data, lookups, missing = await loop.run_in_executor(self._executor, self._entries, noted)
            self._missing += missing
            # Of a trace that is full but one, at its end: else it would grow on.
            gap = 0 if self._over() and not self._closing else self._missing - self._told
            if gap:
                data += gap_bytes(time.monotonic_ns() - self._began_ns, gap)
            if data and not self._failed:
                self._file_bytes += await self._file.write(data)
                await self._file.flush()
                self._told += gap
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            log.error("recording to %s ends here: %s", self._options.path, reason)
            self._failed = True
            self._missing += lookups
        else:
            self._written += lookups
        self._pending_bytes -= taken

    def _entries(self, noted: list[_Noted]) -> tuple[bytearray, int, int]:
        """In the thread, since it may take as long as a stalled disk lets things pile up: what was noted on either
        way, as the trace has it; how many lookups that is, and how many more are missing."""
        missing = 0
        if self._channel is not None:
            requests, missing = self._channel.take_requests()
            rows = self._options.what == "rows"
            noted = noted + [
                _Noted(request.at_ns, request.lane, partial(_of_shared_memory, request, rows))
                for request in requests
            ]
        if self._over():
            return bytearray(), 0, missing + len(noted)
        noted.sort(key=lambda one: one.at_ns)
        data = bytearray()
        for one in noted:
            data += lookup_bytes(max(0, one.at_ns - self._began_ns), _LANES[one.lane], one.kept())
        return data, len(noted), missing


# ------------------------------------------------------------------------------------------- what is kept
# Of a request: its keys, or row ids in place of tokens, and what says which of them are read.


def _of_message(message: pb.LookupRequest, request: Request | None) -> pb.LookupRequest:
    """request: whose row ids are kept in place of the message's keys."""
    kept = pb.LookupRequest(format=message.format, unique=message.unique)
    if message.HasField("columns"):
        kept.columns.CopyFrom(message.columns)
    if request is not None:
        _put_blocks(kept, zip(request.layers, request.ids, strict=True))
        return kept
    for name in ("tokens", "blocks", "rows"):
        if message.WhichOneof("keys") == name:
            getattr(kept, name).CopyFrom(getattr(message, name))
    kept.layers.extend(message.layers)
    return kept


def _of_shared_memory(request: _core.ShmRequest, rows: bool) -> pb.LookupRequest:
    """The same of what came through shared memory; rows: with row ids in place of tokens."""
    kept = pb.LookupRequest(format=FORMAT_NUMBERS[request.format])
    ids = request.ids
    if request.kind == "rows":
        [(kept.rows.layer, listed)] = ids
        kept.rows.ids, kept.rows.id_bytes = _packed(listed)
        return kept
    if request.columns != (0, ids[0][1].shape[1]):
        kept.columns.begin, kept.columns.end = request.columns
    if request.kind == "blocks" or rows:
        _put_blocks(kept, ids)
        return kept
    kept.tokens.SetInParent()
    for tokens, history in request.sequences:
        kept.tokens.sequences.add(tokens=tokens, history=history)
    if request.names_layers:
        kept.layers.extend(layer for layer, _ in ids)
    return kept


def _put_blocks(kept: pb.LookupRequest, ids: Iterable[tuple[int, NDArray[np.int64]]]) -> None:
    for layer, found in ids:
        data, id_bytes = _packed(found)
        kept.blocks.layers.add(layer=layer, ids=data, id_bytes=id_bytes)


def _packed(ids: NDArray[np.int64]) -> tuple[bytes, int]:
    """Ids as the wire has them, and the bytes of one."""
    wide = ids.size > 0 and not -(2**31) <= int(ids.min()) <= int(ids.max()) < 2**31
    return np.ascontiguousarray(ids, dtype="<i8" if wide else "<i4").tobytes(), 8 if wide else 4


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
