"""What `engram-server convert` does, from opening the source to the report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engram_kernels import _core
from engram_kernels._core import RowKind
from engram_server.convert import partial as partials
from engram_server.convert.compare import (
    Fidelity,
    VerifyMode,
    chunks_to_compare,
    compare,
    is_requantised,
)
from engram_server.convert.partial import Partial, partial_name
from engram_server.convert.pipeline import in_parallel
from engram_server.convert.source import RowReader, Source, open_source, sampled_rows
from engram_server.convert.target import (
    CHUNK_BYTES,
    Chunk,
    Noticed,
    Section,
    Target,
    TargetFormat,
    pack_piece,
    plan_shards,
    plan_store,
)
from engram_server.progress import byte_progress
from engram_server.spec import EngramSpec, SpecError
from engram_server.tables import dsv41
from engram_server.tables.bulk import BulkFile, bulk_buffer
from engram_server.tables.errors import TableError
from engram_server.tables.layout import CONFIG_NAME
from engram_server.tables.synth_table import pwrite_all, whole_file

SUSPECTS_LISTED = 20
"""Suspect rows that are named; the others are counted."""


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert. The last three are for tests."""

    to: TargetFormat | None = None
    """None: a packed store of the source's own kind."""
    config: Path | None = None
    """config.json of DSV41EN1 shards, where it does not lie beside them."""
    layers: tuple[int, ...] | None = None
    """Tables to convert; None = all."""
    resume: bool = False
    force: bool = False
    """Replace an existing OUT, and an unfinished one."""
    verify: VerifyMode = "sample"
    """How much is read back and compared with the source, read again."""
    allow_nan: bool = False
    """Take rows with NaN codes or scale byte 255 as they are."""
    progress: bool = False
    threads: int = 0
    """0 = two for each core, 8 at most."""
    chunk_bytes: int = CHUNK_BYTES
    journal_bytes: int = partials.JOURNAL_BYTES


@dataclass(frozen=True)
class ConvertResult:
    """One file that was written."""

    path: Path
    rows: int
    file_bytes: int
    written_bytes: int
    """By this run; 0 when the file was there."""
    compared_bytes: int
    suspect_rows: int
    suspects: tuple[str, ...]
    """The first of them found by this run: layer, row and what is wrong with it."""
    fidelity: Fidelity | None
    """Of FP8 -> FP4."""


def convert(path: Path, out: Path, options: ConvertOptions | None = None) -> tuple[ConvertResult, ...]:
    """Rewrite the tables at `path` as a packed store at `out`, or as DSV41EN1 shards in the directory `out`.

    A file gets its name when it is whole and on disk. Until then it is OUT.partial, which an interruption leaves
    behind to be resumed.

    Raises TableError, SpecError or TokenMapError (all ValueError) with a sentence, OSError for files that cannot be
    opened, KeyboardInterrupt after Ctrl-C (the unfinished file is kept).
    """
    options = options or ConvertOptions()
    source = open_source(path, options.config, options.layers)
    if not out.parent.is_dir():
        raise TableError(f"{out.parent} is not a directory; make it, or name another place to write to")
    if options.to == "dsv41":
        return _write_shards(source, out, options)
    if out.is_dir():
        raise TableError(f"{out} is a directory; a packed store is one file: name that")
    kinds = {"fp4": RowKind.FP4, "fp8": RowKind.FP8, None: source.kind}
    return _write_all(source, (plan_store(source, out, kinds[options.to]),), options)


def _write_shards(source: Source, out: Path, options: ConvertOptions) -> tuple[ConvertResult, ...]:
    """Shards say little about their model, so its config goes with them."""
    config = out / CONFIG_NAME
    keep_config = _is_config_of(config, source.spec)
    if config.exists() and not keep_config and not options.force:
        raise TableError(
            f"{config} belongs to another model; name another directory, or replace it by --force"
        )
    made = not out.exists()
    out.mkdir(exist_ok=True)
    try:
        results = _write_all(source, plan_shards(source, out), options)
        if not keep_config:
            with whole_file(config) as fd:
                pwrite_all(fd, json.dumps(source.spec.to_config(), indent=2).encode() + b"\n", 0)
    except BaseException:
        if made:
            with contextlib.suppress(OSError):
                out.rmdir()  # when nothing is in it
        raise
    return results


def _is_config_of(config: Path, spec: EngramSpec) -> bool:
    try:
        return EngramSpec.from_file(config) == spec
    except SpecError:
        return False


def _write_all(
    source: Source, targets: tuple[Target, ...], options: ConvertOptions
) -> tuple[ConvertResult, ...]:
    for target in targets:
        _check_place(source, target)
        _check_existing(source, target, options)
    return tuple(_write(source, target, options) for target in targets)


def _check_place(source: Source, target: Target) -> None:
    """Refuse, whatever the options, to write over the source, or over what is no file of ours."""
    for path in (target.path, partial_name(target.path)):
        if not os.path.lexists(path):
            continue
        if any(path.exists() and path.samefile(file) for file in source.files):
            raise TableError(f"{path} is what would be converted; name another file to write to")
        if path.is_symlink() or not path.is_file():
            raise TableError(f"{path} exists and is not a regular file; name another file to write to")


def _check_existing(source: Source, target: Target, options: ConvertOptions) -> None:
    unfinished = partial_name(target.path)
    if options.force or (options.resume and (not target.path.exists() or _is_whole(source, target))):
        return
    if target.path.exists():
        raise TableError(f"{target.path} exists; name another file, or replace it by --force")
    if unfinished.exists():
        raise TableError(
            f"{unfinished} is an interrupted conversion; go on with --resume, or start again with --force"
        )


def _is_whole(source: Source, target: Target) -> bool:
    """Whether the target is there already, from this very source."""
    try:
        with target.path.open("rb") as file:
            page = file.read(len(target.header))
            if page != target.header or os.fstat(file.fileno()).st_size != target.file_bytes:
                return False
    except OSError:
        return False
    # A store's header names its rows by their digest; a shard's does not, so some of the rows must.
    return all(
        section.uuid is not None or _holds_rows_of(source, target, section) for section in target.sections
    )


def _holds_rows_of(source: Source, target: Target, section: Section) -> bool:
    ids = source.spec.digest_rows(section.table.layer)
    expected = np.concatenate(sampled_rows(section.table, ids), axis=1)
    with target.path.open("rb", buffering=0) as file:
        found = [
            os.pread(file.fileno(), dsv41.ROW_BYTES, section.offset + int(row) * dsv41.ROW_BYTES)
            for row in ids
        ]
    return b"".join(found) == expected.tobytes()


def _write(source: Source, target: Target, options: ConvertOptions) -> ConvertResult:
    rows = sum(section.table.rows for section in target.sections)
    if options.resume and not options.force and _is_whole(source, target):
        return ConvertResult(target.path, rows, target.file_bytes, 0, 0, 0, (), None)
    identity = _identity(source, target)
    partial = Partial(target, identity, options.resume, options.journal_bytes)
    suspects = _Suspects(partial.progress.suspect_rows)
    begun = partial.progress.done
    with ExitStack() as stack:
        files = {file: stack.enter_context(BulkFile(file)) for file in source.files}
        with _ending(partial):
            _fill(source, target, partial, files, suspects, options)
            suspects.check(target, options.allow_nan)
            chunks = chunks_to_compare(target, options.verify, options.chunk_bytes)
            size = sum(chunk.size for chunk in chunks)
            with byte_progress(options.progress, "compare", size) as advance:
                fidelity = compare(source, target, partial.file, files, chunks, advance, options.threads)
            if _identity(source, target) != identity:
                raise TableError(f"{source.path} was written to meanwhile; let that end, and convert again")
            partial.finish()
    return ConvertResult(
        target.path,
        rows,
        target.file_bytes,
        partial.progress.done - begun,
        0 if options.verify == "none" else size,
        suspects.count,
        tuple(suspects.named()),
        fidelity,
    )


def _fill(
    source: Source,
    target: Target,
    partial: Partial,
    files: dict[Path, BulkFile],
    suspects: _Suspects,
    options: ConvertOptions,
) -> None:
    """Convert all rows that are not on disk yet."""
    begin = partial.progress.done
    chunks = list(target.chunks(begin, options.chunk_bytes))
    if not chunks:
        return
    size, rows = max(chunk.size for chunk in chunks), max(chunk.rows for chunk in chunks)

    def make_worker() -> Callable[[Chunk], None]:
        reader = RowReader(files, rows, source.kind)
        out = bulk_buffer(size)

        def work(chunk: Chunk) -> None:
            data, suspect = out[: chunk.size], 0
            for first, codes, scales in reader.read(chunk.section.table, chunk.first, chunk.rows):
                noticed = pack_piece(chunk, first, codes, scales, data)
                suspect += suspects.add(chunk.section.table.layer, noticed)
            # A source with suspect rows is read to its end, so that all of them are known, but not written.
            if not suspects.count or options.allow_nan:
                partial.file.write(chunk.offset, data)
                partial.advance(chunk.offset, chunk.offset + chunk.size, suspect)
            advance(chunk.size)

        return work

    end = chunks[-1].offset + chunks[-1].size
    with byte_progress(options.progress, "convert", end, begin) as advance:
        in_parallel(chunks, make_worker, options.threads)


@contextmanager
def _ending(partial: Partial) -> Iterator[None]:
    """What becomes of the unfinished file when converting fails."""
    try:
        yield
    except (TableError, SpecError):
        partial.discard()
        raise
    except OSError as error:
        if error.errno in partials.DISK_FULL:
            partial.discard()
            raise TableError(
                f"{partial.path.parent} is full; nothing was left there: free some space and start again"
            ) from error
        partial.keep()
        if partial.whole:
            raise
        raise TableError(
            f"{error.filename or partial.path}: {error.strerror}; what was converted is in {partial.path}: go on "
            "with --resume"
        ) from error
    except BaseException:
        partial.keep()
        raise


def _identity(source: Source, target: Target) -> bytes:
    """Of what is written and what from: an interrupted conversion must not go on with other files."""
    digest = hashlib.sha256(target.header)
    for file in source.files:
        facts = file.stat()
        digest.update(f"{source.kind.name} {facts.st_size} {facts.st_mtime_ns} ".encode())
    return digest.digest()


@dataclass
class _Suspects:
    """Rows with NaN codes or infinite scales, as threads find them."""

    count: int
    _first: list[tuple[int, int, int]] = field(default_factory=list)
    """Layer, row, why."""
    _clipped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, layer: int, noticed: Noticed) -> int:
        """Returns how many rows these were."""
        found = list(zip(noticed.rows.tolist(), noticed.why.tolist(), strict=True))
        if found or noticed.clipped_blocks:
            with self._lock:
                self.count += len(found)
                self._clipped += noticed.clipped_blocks
                # The lowest of all, whatever thread came first.
                self._first = sorted(self._first + [(layer, row, why) for row, why in found])[
                    :SUSPECTS_LISTED
                ]
        return len(found)

    def named(self) -> Iterator[str]:
        """The first rows in words."""
        words = {_core.NAN_CODE: "a NaN code", _core.SCALE_255: "scale byte 255"}
        for layer, row, why in self._first:
            what = " and ".join(text for bit, text in words.items() if why & bit)
            yield f"layer {layer} row {row}: {what}"

    def check(self, target: Target, allow_nan: bool) -> None:
        """Refuse what cannot be, or was not asked to be, written. Raises TableError."""
        lossy = is_requantised(target)
        if self.count and (lossy or not allow_nan):
            advice = "FP4 has no NaN: convert to fp8" if lossy else "take them as they are with --allow-nan"
            listed = "; ".join(self.named()) + ("; ..." if self.count > len(self._first) else "")
            raise TableError(
                f"{self.count} rows of the source hold NaN or infinity, as no released table does ({listed}); "
                f"download the source again, or {advice}"
            )
        if self._clipped:
            raise TableError(
                f"{self._clipped} blocks of the source hold values beyond 6 * 2^127, which FP4 cannot; convert to fp8"
            )


def report_lines(results: Sequence[ConvertResult], options: ConvertOptions) -> Iterator[str]:
    """The outcome as text for a terminal."""
    for result in results:
        if not result.written_bytes and not result.compared_bytes and not result.fidelity:
            yield f"{result.path} is whole already: {result.rows:,} rows, {result.file_bytes:,} bytes"
            continue
        yield f"{result.path}: {result.rows:,} rows, {result.file_bytes:,} bytes"
        if result.compared_bytes:
            yield f"  compared with the source, read again: {result.compared_bytes:,} bytes ({options.verify})"
        if (fidelity := result.fidelity) is not None:
            yield (
                f"  fidelity: cosine mean {fidelity.mean_cosine:.6f}, minimum {fidelity.min_cosine:.6f} over "
                f"{fidelity.rows:,} rows; blocks clipped: {fidelity.clipped_blocks}"
            )
        if result.suspect_rows:
            yield f"  rows with NaN codes or scale byte 255, taken as they are: {result.suspect_rows:,}"
            yield from (f"    {row}" for row in result.suspects)
