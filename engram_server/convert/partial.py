"""The unfinished file of a conversion: its name, its journal, and how it becomes whole.

`OUT.partial` holds the journal where the header page will be, so it is never mistaken for a whole file, and
journal and data cannot part. The journal says up to which byte the data is known to be on disk: it is written
after that data was, and lies within one sector, which a disk writes whole or not at all. Last of all the
header takes its place and the file its name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engram_kernels import _core
from engram_kernels._core import PAGE_BYTES
from engram_server.convert.target import Target
from engram_server.locks import lock_unfinished
from engram_server.tables.bulk import BulkFile, bulk_buffer
from engram_server.tables.errors import TableError

JOURNAL_BYTES = 512 << 20
"""Written between two entries of the journal: what an interruption costs at most."""
FREE_MARGIN_BYTES = 16 << 20
"""Left free for the file system's own needs."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_MAGIC = b"\x89ENGRAM~"
_ENTRY = struct.Struct("<8s32sQQ")
"""Magic, identity, bytes done, suspect rows in them; a CRC-32C follows."""
assert _ENTRY.size + 4 <= 512, "a journal entry must fit a sector"


@dataclass(frozen=True)
class Progress:
    """What is done: everything before byte `done` of the file, `suspect_rows` among it."""

    done: int
    suspect_rows: int = 0


def partial_name(out: Path) -> Path:
    """The unfinished file's name."""
    return out.with_name(out.name + ".partial")


class Partial:
    """An open OUT.partial. Threads may share it; exactly one of `finish`, `keep` and `discard` ends it."""

    def __init__(self, target: Target, identity: bytes, resume: bool, journal_bytes: int) -> None:
        """Open or create it. identity: 32 bytes that say what is written from what; another's is not resumed.

        Raises TableError when it is in use, another conversion's, or the disk is too small; OSError.
        """
        self._target = target
        self._identity = identity
        self._journal_bytes = journal_bytes
        self.path = partial_name(target.path)
        self._lock = threading.Lock()
        self._waiting: dict[int, Progress] = {}
        self.whole = False
        """Whether the file has all its bytes, and is about to get its name or has it."""
        self.file = BulkFile(self.path, os.O_RDWR | os.O_CREAT)
        try:
            self._take(resume)
        except BaseException:
            self.file.close()
            raise

    def _take(self, resume: bool) -> None:
        try:
            lock_unfinished(self.file.fd, self.path)
        except BlockingIOError:
            raise TableError(
                f"{self.path} is being written by another conversion; wait for it to end"
            ) from None
        found = self._read_journal() if resume else None
        self.progress = found or Progress(PAGE_BYTES)
        """What is done, the way to the disk included or not."""
        self._journalled = self.progress.done
        if found is None:
            os.ftruncate(self.file.fd, 0)
        try:
            self._reserve()
            if found is None:
                self._write_journal(self.progress)
        except BaseException:
            if found is None:
                self.path.unlink(missing_ok=True)
            raise

    def advance(self, begin: int, end: int, suspect_rows: int) -> None:
        """Bytes begin .. end - 1 were written. In whatever order: the journal follows what is gapless."""
        with self._lock:
            self._waiting[begin] = Progress(end, suspect_rows)
            while (item := self._waiting.pop(self.progress.done, None)) is not None:
                self.progress = Progress(item.done, self.progress.suspect_rows + item.suspect_rows)
            if self.progress.done - self._journalled < self._journal_bytes:
                return
            due, self._journalled = self.progress, self.progress.done
        self._record(due)

    def keep(self) -> None:
        """Close it as it is, to be resumed, or whole when `finish` came that far."""
        if not self.whole:
            # Should the disk refuse: what the journal says already stays true.
            with contextlib.suppress(OSError):
                self._record(self.progress)
        self.file.close()

    def discard(self) -> None:
        """Close and remove it."""
        self.path.unlink(missing_ok=True)
        self.file.close()

    def finish(self) -> None:
        """Give it its header and its name, both on disk when this returns."""
        os.ftruncate(self.file.fd, self._target.file_bytes)
        os.fsync(self.file.fd)
        self._write_page(self._target.header)
        os.fsync(self.file.fd)
        # Before it has its name: whoever is interrupted in between must not put the journal into a whole file.
        self.whole = True
        self.path.replace(self._target.path)
        sync_directory(self._target.path.parent)
        self.file.close()

    def _record(self, progress: Progress) -> None:
        os.fdatasync(self.file.fd)  # the data first: a journal must not promise what a power cut takes back
        self._write_journal(progress)

    def _write_journal(self, progress: Progress) -> None:
        entry = _ENTRY.pack(_MAGIC, self._identity, progress.done, progress.suspect_rows)
        self._write_page(entry + _core.crc32c(entry).to_bytes(4, "little"))

    def _write_page(self, data: bytes) -> None:
        page = bulk_buffer(PAGE_BYTES)[:PAGE_BYTES]
        page[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        self.file.write(0, page)

    def _read_journal(self) -> Progress | None:
        """The journal of an interrupted conversion; None when it did not get that far."""
        size = os.fstat(self.file.fd).st_size
        if size < PAGE_BYTES:
            return None
        page = self.file.read(0, PAGE_BYTES, bulk_buffer(PAGE_BYTES)).tobytes()
        if page == self._target.header:
            # Stopped between its last two steps. (A shard's header does not say whose rows these are.)
            named = all(section.uuid is not None for section in self._target.sections)
            return Progress(self._end) if named else None
        entry, crc = page[: _ENTRY.size], page[_ENTRY.size :][:4]
        magic, identity, *numbers = _ENTRY.unpack(entry)
        if magic != _MAGIC or int.from_bytes(crc, "little") != _core.crc32c(entry):
            return None
        if identity != self._identity:
            raise TableError(
                f"{self.path} was begun from another source, in another format or from files that changed since; "
                "start again with --force"
            )
        return Progress(*numbers)

    @property
    def _end(self) -> int:
        last = self._target.sections[-1]
        return last.offset + last.padded_bytes

    def _reserve(self) -> None:
        """Take all the space at once: a full disk shows now, not hours later."""
        held = os.fstat(self.file.fd).st_blocks * 512
        free = shutil.disk_usage(self.path.parent).free
        needed = self._end - held
        if needed + FREE_MARGIN_BYTES > free:
            raise TableError(
                f"{self.path.parent} has {free / 1e9:.2f} GB free, but {self._target.path.name} takes "
                f"{needed / 1e9:.2f} GB{' more' if held else ''}; free some space, or name another directory"
            )
        error = _core.reserve_file(self.file.fd, self._end)
        if error == errno.EOPNOTSUPP:
            os.ftruncate(self.file.fd, self._end)
        elif error in DISK_FULL:
            raise TableError(
                f"{self.path.parent} is full: {self._target.path.name} needs {needed / 1e9:.2f} GB; "
                "free some space, or name another directory"
            )
        elif error:
            raise OSError(error, os.strerror(error), str(self.path))


def sync_directory(directory: Path) -> None:
    """Make names in a directory survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    finally:
        os.close(fd)
