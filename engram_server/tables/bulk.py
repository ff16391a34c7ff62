"""Files read or written once from end to end: large pieces that go past the page cache.

A conversion moves hundreds of gigabytes. Through the page cache it would push out whatever else the machine
keeps there, a server's tables first of all. Where a file system takes no direct I/O, pieces go through the cache and
are dropped from it behind us.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_server.tables.errors import TableError

ALIGNMENT_BYTES = 4096
"""Of offset, length and memory: what the most demanding disks ask for."""


def bulk_buffer(payload_bytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory that `BulkFile.read` can read so many bytes from any offset into."""
    return np.frombuffer(mmap.mmap(-1, _up(payload_bytes) + ALIGNMENT_BYTES), dtype=np.uint8)


class BulkFile:
    """One open file. Threads may share it: it has no position of its own."""

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        """Raises OSError with the path in it."""
        self.path = path
        self.direct = True
        try:
            self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
            self.direct = False

    def read(self, offset: int, length: int, buffer: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes offset .. offset + length - 1, as a view of `buffer` (see bulk_buffer).

        Raises TableError when the file ends inside them, OSError when the disk fails.
        """
        begin = offset - offset % ALIGNMENT_BYTES
        wanted = offset + length - begin
        size = _up(wanted)
        done = 0
        while done < wanted:
            count = self._move(os.preadv, buffer[done:size], begin + done)
            # A direct read goes on from a boundary; what lies before it in this page is read once more.
            after = (
                done + count
                if done + count >= wanted
                else (done + count) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            )
            if after == done:
                raise TableError(
                    f"{self.path} ends at byte {begin + done + count}, inside what its header describes; was it "
                    "changed meanwhile? Download or convert it again"
                )
            done = after
        self._drop(begin, size)
        return buffer[offset - begin : wanted]

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write all of `data`. Offset, length and memory must be aligned. Raises OSError."""
        done = 0
        while done < len(data):
            done += self._move(os.pwritev, data[done:], offset + done)
        self._drop(offset, len(data))

    def close(self) -> None:
        """Close the file, unless it is."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> BulkFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _move(self, call: Callable[..., int], memory: NDArray[np.uint8], offset: int) -> int:
        """preadv or pwritev. Some file systems take O_DIRECT at open, and refuse the first read or write."""
        try:
            return call(self.fd, [memory.data], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False
        try:
            return call(self.fd, [memory.data], offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def _drop(self, offset: int, length: int) -> None:
        """Of pages just written this starts the write-back, which the kernel would put off for gigabytes."""
        if not self.direct:
            os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)


def _up(count: int) -> int:
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
