"""Writes a trace of the lookups of a server, as `serve --record` asks for.

Noting a lookup is putting a reference into a list. A task makes bytes of what is there and writes them, in a thread of
its own; what comes while too much waits is counted, not kept. So a slow disk costs the trace entries, and no lookup
waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiofiles
import numpy as np

from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server.lookup import Request
from engram_server.sockets import ServeError
from engram_server.trace import gap_bytes, head_bytes, lookup_bytes

log = logging.getLogger("engram_server")

_NOTED_BYTES = 512
"""What a lookup that waits takes beside its keys, about."""
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
    """Of keys that wait to be written."""


@dataclass(frozen=True, eq=False)
class _Noted:
    ns: int
    lane: _core.Lane
    message: pb.LookupRequest
    request: Request | None
    """Whose row ids are kept in place of the message's keys."""


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
        self._wake = asyncio.Event()
        self._closing = False
        self._failed = False
        self.seen = 0
        """Lookups that were planned."""
        self.written = 0
        """Those of them that are in the trace."""
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
        self.seen += 1
        size = self._size(message, request) + _NOTED_BYTES
        full = self._pending_bytes + size > self._options.pending_bytes
        if full or self._failed or self._closing or self._file_bytes >= self._options.file_bytes:
            self._missing += 1
            return
        self._pending_bytes += size
        rows = self._options.what == "rows" and request.kind == "tokens"
        self._noted.append(_Noted(at_ns - self._began_ns, lane, message, request if rows else None))
        self._wake.set()

    async def close(self) -> None:
        """Write what was noted, and end the trace."""
        self._closing = True
        self._wake.set()
        await self._task
        self._executor.shutdown()
        log.info("%s: %d of %d lookups recorded", self._options.path, self.written, self.seen)

    def _size(self, message: pb.LookupRequest, request: Request) -> int:
        if self._options.what == "requests":
            return message.ByteSize()
        return sum(ids.size * ids.itemsize for ids in request.ids)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                noted, self._noted = self._noted, []
                missing, self._missing = self._missing, 0
                taken = self._pending_bytes
                data = await loop.run_in_executor(self._executor, self._bytes, noted, missing)
                self._file_bytes += await self._file.write(data)
                await self._file.flush()
                self.written += len(noted)
                self._pending_bytes -= taken
                del noted, data
                if self._closing and not self._noted:
                    break
        except Exception as error:
            reason = error.strerror if isinstance(error, OSError) else repr(error)
            log.error("recording to %s ends here: %s", self._options.path, reason)
            self._failed = True
            self._noted.clear()
        finally:
            try:
                await self._file.close()
            except OSError:
                self._failed = True

    def _bytes(self, noted: list[_Noted], missing: int) -> bytes:
        """In the thread."""
        ns = time.monotonic_ns() - self._began_ns
        parts = [
            lookup_bytes(max(0, entry.ns), _LANES[entry.lane], _kept(entry.message, entry.request))
            for entry in noted
        ]
        if missing:
            parts.append(gap_bytes(ns, missing))
        return b"".join(parts)


def _kept(message: pb.LookupRequest, request: Request | None) -> pb.LookupRequest:
    """What a trace keeps of a request: its keys, or row ids in their place, and what says which of them are read."""
    kept = pb.LookupRequest(format=message.format, unique=message.unique)
    if message.HasField("columns"):
        kept.columns.CopyFrom(message.columns)
    if request is None:
        for name in ("tokens", "blocks", "rows"):
            if message.WhichOneof("keys") == name:
                getattr(kept, name).CopyFrom(getattr(message, name))
        kept.layers.extend(message.layers)
        return kept
    for layer, ids in zip(request.layers, request.ids, strict=True):
        wide = ids.size > 0 and int(ids.max()) >= 2**31
        data = np.ascontiguousarray(ids, dtype="<i8" if wide else "<i4").tobytes()
        kept.blocks.layers.add(layer=layer, ids=data, id_bytes=8 if wide else 4)
    return kept


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
