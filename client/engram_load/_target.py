"""Who is asked: a server over gRPC or through shared memory, or tables that are read in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from engram_client import (
    NO_RETRY,
    EngramClient,
    EngramMemory,
    Format,
    Lookup,
    SharedMemory,
    UnavailableError,
)
from engram_client._query import BlockKeys, RowKeys, TokenKeys
from engram_client._targets import parse_targets
from engram_load._errors import LoadError
from engram_load._patterns import Request
from engram_server.credentials import Credentials
from engram_server.memory import Memory, MemoryOptions

Transport = Literal["gRPC over TCP", "gRPC over a UNIX socket", "shared memory", "embedded"]
Source: TypeAlias = EngramClient | EngramMemory

_SHM = "shm:"
_SHM_DATA_BYTES = 256 << 20
"""Room for requests of many threads at once; the server may grant less."""


@dataclass(frozen=True)
class Target:
    """What TARGET names."""

    name: str
    transport: Transport
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    """How an embedded one is opened."""
    format: Format = "packed"
    timeout_s: float | None = None
    credentials: Credentials = field(default_factory=lambda: Credentials(tls=None, token=None))

    @property
    def path(self) -> Path | None:
        """Of the tables, where they are read in this process."""
        return Path(self.name) if self.transport == "embedded" else None

    @contextmanager
    def open(self) -> Iterator[Source]:
        """Connect, or open the tables. Raises LoadError when nobody answers, and what Memory.open raises."""
        if self.transport == "embedded":
            with EngramMemory(Memory.open(Path(self.name), self.memory)) as memory:
                yield memory
            return
        shared = self.transport == "shared memory"
        address = self.name.removeprefix(_SHM)
        # A refusal is to be counted, not hidden by another try.
        with EngramClient(
            address,
            retry=NO_RETRY,
            shared_memory=SharedMemory("require", data_bytes=_SHM_DATA_BYTES) if shared else "off",
            **self.credentials,
        ) as client:
            try:
                client.describe()
            except UnavailableError as error:
                raise LoadError(
                    f"no server answers at {address}: start one, or name another ({error})"
                ) from error
            yield client

    def send(self, source: Source, request: Request) -> Lookup:
        """One lookup. Raises EngramError."""
        common = {
            "format": self.format,
            "lane": request.lane,
            "unique": request.unique,
            "timeout": self.timeout_s,
        }
        match request.keys:
            case TokenKeys(sequences):
                return source.lookup_batch(
                    [tokens for tokens, _ in sequences],
                    histories=[history for _, history in sequences],
                    layers=request.layers,
                    columns=request.columns,
                    **common,  # type: ignore[arg-type]
                )
            case BlockKeys(layers):
                return source.lookup_blocks(layers, columns=request.columns, **common)  # type: ignore[arg-type]
            case RowKeys(layer, ids):
                return source.lookup_rows(layer, ids, **common)  # type: ignore[arg-type]


def transport_of(name: str) -> Transport:
    """How a TARGET is reached: HOST:PORT and unix:PATH by gRPC, shm:TARGET through shared memory, a path in process.

    Raises LoadError for what is none of these.
    """
    if name.startswith(_SHM):
        _check_address(name.removeprefix(_SHM), name)
        return "shared memory"
    if name.startswith("unix:"):
        return "gRPC over a UNIX socket"
    if "/" in name or Path(name).exists():
        if not Path(name).exists():
            raise LoadError(f"there are no tables at {name}")
        return "embedded"
    _check_address(name, name)
    return "gRPC over TCP"


def _check_address(address: str, name: str) -> None:
    try:
        parse_targets(address)
    except ValueError as error:
        raise LoadError(
            f"{name!r} is no target: expected HOST:PORT, unix:PATH, shm:HOST:PORT or shm:unix:PATH, or the path of a "
            "checkpoint or packed store"
        ) from error
