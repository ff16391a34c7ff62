"""Reading a path's rows as the server would: which files and rows, and what each backend makes of them."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_kernels._core import PAGE_BYTES
from engram_server.doctor.finding import Finding, plural, size_text
from engram_server.tables.layout import ROW_VALUES
from engram_server.tables.opened import OpenedTables, has_text_name, open_tables
from engram_server.tables.placement import ScaleDecision, decide_scales
from engram_server.tables.store import Store

PLAIN_ROW_BYTES = ROW_VALUES // 2
"""What a file that is no shard is read in: the codes of an FP4 row."""

BACKENDS = ("io_uring", "pread", "mmap")
_COMPARED_ROWS = 64
_EXTENTS_MAX = 10_000
"""Looked at to tell whether a file is sparse."""


@dataclass(frozen=True)
class Rows:
    """Row i is the `stride` bytes at `offset + i * stride` of file number `file`, i < count."""

    file: int
    offset: int
    stride: int
    count: int


@dataclass(frozen=True)
class Target:
    """Files, and where rows lie in them."""

    files: tuple[Path, ...]
    rows: tuple[Rows, ...]
    reads_per_token: int | None = None
    """Of a checkpoint: what one token takes when nothing repeats."""

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in self.files)

    @property
    def row_bytes(self) -> int:
        """Of the longest row."""
        return max(rows.stride for rows in self.rows)

    def draw(
        self, rng: np.random.Generator, count: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32]]:
        """File, offset and length [count] of rows drawn evenly from all, as Reader.read takes them."""
        counts = np.array([rows.count for rows in self.rows])
        which = rng.choice(len(counts), size=count, p=counts / counts.sum())
        offset, stride, file = (
            np.array([getattr(rows, name) for rows in self.rows], dtype=np.uint64)
            for name in ("offset", "stride", "file")
        )
        row = rng.integers(0, counts[which]).astype(np.uint64)
        at = offset[which] + row * stride[which]
        return file[which].astype(np.uint32), at, stride[which].astype(np.uint32)


def is_mostly_holes(path: Path) -> bool:
    """Whether less than half of a file was ever written: reading the rest asks no disk.

    st_blocks would not tell: it counts space that is only reserved, and network file systems leave it out.
    """
    size, data, at = path.stat().st_size, 0, 0
    with path.open("rb", buffering=0) as file:
        for _ in range(_EXTENTS_MAX):
            if 2 * data >= size:
                return False
            try:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                return error.errno == errno.ENXIO  # no more data; else the file system cannot tell
            at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            data += at - begin
    return False


def find_target(path: Path) -> tuple[Target | None, list[Finding]]:
    """What to read below a path, and what there is to say of it. None when no file can be read.

    Raises OSError when the path is not there, cannot be read, or is neither directory nor regular file.
    """
    _check_readable(path)
    try:
        checkpoint = open_tables(path)
    except (ValueError, OSError) as error:
        return _fallback_target(path, str(error))
    files = checkpoint.files
    if isinstance(checkpoint, Store):
        # Records back to back: a few straddle pages here, as none does there.
        rows = tuple(
            Rows(0, table.offset, table.row_bytes + 4, table.pages * PAGE_BYTES // (table.row_bytes + 4))
            for table in checkpoint.tables
        )
        reads_per_token = checkpoint.spec.columns * len(checkpoint.tables)
        return Target(files, rows, reads_per_token), [_explain_tables(checkpoint)]
    rows = tuple(
        Rows(files.index(table.codes.path), table.codes.offset, table.codes.stride, table.rows)
        for table in checkpoint.tables
    )
    scales = decide_scales("auto", checkpoint.scale_bytes)
    reads_per_row = 1 if scales.mode == "memory" else 2
    reads_per_token = checkpoint.spec.columns * len(checkpoint.tables) * reads_per_row
    return Target(files, rows, reads_per_token), [_explain_tables(checkpoint), _explain_scales(scales)]


def _check_readable(path: Path) -> None:
    mode = path.stat().st_mode
    if not has_text_name(path):
        raise OSError("its name is not UTF-8: rename it, or name a link to it")
    if stat.S_ISDIR(mode):
        os.scandir(path).close()
    elif stat.S_ISREG(mode):
        with path.open("rb") as file:
            file.read(1)
    else:
        raise OSError("it is neither a directory nor a regular file")


def _fallback_target(path: Path, problem: str) -> tuple[Target | None, list[Finding]]:
    """Where no checkpoint can be opened there may still be a file on the same disk."""
    if path.is_dir():
        file = _largest_file(path)
        findings = [Finding("checkpoint", "error", f"cannot be served: {problem}")]
        if file is not None:
            findings.append(Finding("checkpoint", "note", f"what follows is about {file}, read as any file"))
    else:
        file = path
        if path.suffix == ".safetensors":
            findings = [Finding("checkpoint", "error", f"cannot be served: {problem}")]
        else:
            text = f"{path} is no shard: read as any file, in pieces of {PLAIN_ROW_BYTES} B"
            findings = [Finding("file", "note", text)]
    if file is None or file.stat().st_size == 0:
        return None, [*findings, Finding("file", "note", f"{file or path} holds nothing to read")]
    return plain_target(file), findings


def plain_target(file: Path) -> Target:
    """Any file that is not empty, as rows."""
    size = file.stat().st_size
    stride = min(size, PLAIN_ROW_BYTES)
    return Target((file,), (Rows(0, 0, stride, size // stride),))


def _largest_file(directory: Path) -> Path | None:
    """Shards first: they lie where the tables will."""
    files = [entry for entry in directory.iterdir() if entry.is_file() and os.access(entry, os.R_OK)]
    return max(
        files, key=lambda file: (file.suffix == ".safetensors", file.stat().st_size, file.name), default=None
    )


def _explain_tables(checkpoint: OpenedTables) -> Finding:
    tables = checkpoint.tables
    size = size_text(sum(table.rows * table.row_bytes for table in tables))
    layers = " and ".join(str(table.layer) for table in tables)
    return Finding(
        "tables",
        "ok",
        f"{tables[0].kind.name}, layer{'' if len(tables) == 1 else 's'} {layers}, {size} in "
        f"{plural(len(checkpoint.files), 'file')}: can be served",
    )


def _explain_scales(decision: ScaleDecision) -> Finding:
    if decision.mode == "memory":
        return Finding("scales", "ok", f"in memory, so that a row takes one read ({decision.reason})")
    return Finding(
        "scales",
        "note",
        f"on disk, so that a row takes two reads ({decision.reason})",
        "free or grant that much memory to halve the reads",
    )


@dataclass(frozen=True)
class FileAccess:
    """How the reader opened a file."""

    path: str
    size_bytes: int
    direct: bool
    alignment_bytes: int
    reason: str
    statx_memory_align_bytes: int
    """What statx(STATX_DIOALIGN) reports; 0 = nothing."""
    statx_offset_align_bytes: int


@dataclass(frozen=True)
class Reads:
    """What became of real reads."""

    backend: str
    """That `auto` takes."""
    reason: str
    fallback: bool
    threads: int
    hardware_queues: int
    """As the reader sees them: 1 where a volume hides its disks'."""
    registered: str
    files: tuple[FileAccess, ...]
    backend_errors: dict[str, str]
    """By backend, asked for by name: why it cannot read these files as plain pread does; "" = it can."""


def examine_reads(target: Target, depth: int) -> Reads:
    """Open a target's files with every backend and read. Raises OSError when they cannot be read at all."""
    paths = [str(file) for file in target.files]
    with closing(_core.Reader(paths, depth=depth)) as reader:
        files = tuple(
            FileAccess(
                info.path,
                info.size_bytes,
                info.direct,
                info.alignment_bytes,
                info.reason,
                *_core.statx_dioalign(info.path),
            )
            for info in reader.files
        )
        return Reads(
            reader.backend,
            reader.reason,
            reader.fallback,
            reader.threads,
            _core.hardware_queues(paths[0]),
            reader.registered,
            files,
            {backend: _compare(target, backend, depth) for backend in BACKENDS},
        )


def _compare(target: Target, backend: str, depth: int) -> str:
    """Read some rows through a backend and through plain pread; "" when both give the same."""
    try:
        reader = _core.Reader([str(file) for file in target.files], backend=backend, depth=depth)
    except (RuntimeError, OSError) as error:
        return str(error)
    with closing(reader):
        file, offset, length = target.draw(np.random.default_rng(), _COMPARED_ROWS)
        out = np.zeros((_COMPARED_ROWS, target.row_bytes), dtype=np.uint8)
        errors = reader.read(file, offset, length, out)
    for i in range(_COMPARED_ROWS):
        path, at, count = target.files[file[i]], int(offset[i]), int(length[i])
        if errors[i]:
            return f"reading {count} B at {at} of {path} failed: {_core.error_text(int(errors[i]))}"
        with path.open("rb", buffering=0) as plain:
            if os.pread(plain.fileno(), count, at) != out[i, :count].tobytes():
                return f"{count} B at {at} of {path} differ from what pread gives"
    return ""


def explain_reads(reads: Reads, row_bytes: int) -> list[Finding]:
    """How files are read, by which backend, and what else would do."""
    return [*explain_access(reads, row_bytes), *explain_backends(reads)]


def explain_access(reads: Reads, row_bytes: int) -> list[Finding]:
    """Direct or buffered, at which alignment: a finding for each way, not for each file."""
    ways: dict[tuple[object, ...], list[FileAccess]] = {}
    for file in reads.files:
        key = (file.direct, file.alignment_bytes, file.reason, file.statx_offset_align_bytes)
        ways.setdefault(key, []).append(file)
    return [_explain_way(files, row_bytes, alone=len(ways) == 1) for files in ways.values()]


def _explain_way(files: list[FileAccess], row_bytes: int, alone: bool) -> Finding:
    file = files[0]
    where = "" if alone else ", ".join(Path(each.path).name for each in files) + ": "
    if not file.direct:
        return Finding(
            "access",
            "degraded",
            f"{where}{file.reason}; every row drags a page through the page cache, outside any memory "
            "limit of the server's own",
            "keep the tables on a file system with direct I/O: ext4 or xfs on a local disk",
        )
    if file.statx_offset_align_bytes:
        memory, offset = file.statx_memory_align_bytes, file.statx_offset_align_bytes
        told = f"statx reports {memory} B for memory, {offset} B for offsets"
    else:
        told = "statx reports none: before Linux 6.1, or the file system does not say"
    return Finding(
        "access",
        "ok",
        f"{where}direct, past the page cache, in blocks of {file.alignment_bytes:,} B ({told}); a row of "
        f"{row_bytes} B reads one, or two where it straddles",
    )


def explain_backends(reads: Reads) -> list[Finding]:
    """What `auto` takes and why, and whether all backends agree."""
    if reads.backend == "io_uring":
        rings = f"{plural(reads.threads, 'ring')} for {plural(reads.hardware_queues, 'hardware queue')}"
        how = f"{rings}, registered: {reads.registered}"
        findings = [Finding("auto", "ok", f"takes io_uring: {reads.reason}; {how}")]
    else:
        findings = [
            Finding(
                "auto",
                "degraded",
                f"takes {reads.backend}, {plural(reads.threads, 'thread')}: {reads.reason}",
                "see io_uring and seccomp above; meanwhile rows are exact, at more CPU and fewer reads/s",
            )
        ]
    if reads.backend == "io_uring" and reads.registered != "files+buffers":
        findings.append(
            Finding(
                "registered",
                "note",
                f"{reads.registered}, where files+buffers costs the least CPU for a read",
                "raise RLIMIT_MEMLOCK; a seccomp profile must allow io_uring_register",
            )
        )
    failed = {backend: error for backend, error in reads.backend_errors.items() if error}
    good = [backend for backend in reads.backend_errors if backend not in failed]
    if good:
        what = f"{_COMPARED_ROWS} random rows came out as plain pread reads them"
        findings.append(Finding("backends", "ok", f"{', '.join(good)}: {what}"))
    for backend, error in failed.items():
        if backend == "io_uring" and reads.fallback:
            continue  # said under auto
        serving = backend == reads.backend
        findings.append(Finding("backends", "error" if serving else "note", f"{backend}: {error}"))
    return findings
