"""The shared-memory channel as the server process holds it: where its socket is, who may come, what it may take.

The channel itself is native (`_core.ShmServer`, docs/shared-memory.md): no request of it passes through here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server.limits import Limits
from engram_server.lookup import group_rows
from engram_server.memory import Memory
from engram_server.sockets import ServeError, group_id, make_way, remove

log = logging.getLogger("engram_server")

_CLIENT_SHARE = 4
"""One client may have one part in so many of all bytes."""
_IDLE_POLL_S = 0.02


@dataclass(frozen=True)
class SharedMemoryOptions:
    """What clients on this host may have. Every limit has its default here."""

    socket: Path | Literal["auto"] | None = "auto"
    """auto: beside the gRPC UNIX socket, else in $XDG_RUNTIME_DIR or the folder for temporary files. None: none."""
    clients: int = 64
    """Attached at once; each has a thread of the server."""
    total_bytes: int = 1 << 30
    """Memory of all clients together, of which one may have a quarter. Taken when a client attaches."""
    spin_us: int = 0
    """How long a service thread looks for the next request before it sleeps: latency for CPU time."""
    group: str | None = None
    """Besides this process' own user and root, members of this group may attach: its name or number."""

    def claims(self) -> dict[str, int]:
        """For Memory.open."""
        return {} if self.socket is None else {"--shm-bytes": self.total_bytes}

    def __post_init__(self) -> None:
        if self.clients < 1 or self.total_bytes < 8 << 20 or self.spin_us < 0:
            raise ValueError(
                f"shared memory for {self.clients} clients in {self.total_bytes} bytes, spinning {self.spin_us} us: at "
                "least one client, 8 MiB, and no negative time are needed"
            )


class SharedMemoryChannel:
    """A socket that is being listened at, and the native server behind it."""

    def __init__(
        self, memory: Memory, limits: Limits, options: SharedMemoryOptions, path: Path, server_id: str
    ) -> None:
        """Listens at once. Raises ServeError."""
        self.path = path
        self._options = options
        group = None if options.group is None else group_id(options.group)
        listener, self._inode = _listen(path, group)
        try:
            self._native = _native_server(_served(memory), limits, options, listener, group, server_id)
        except BaseException:
            remove(path, self._inode)
            raise

    def info(self) -> pb.SharedMemoryInfo:
        """For Describe."""
        return pb.SharedMemoryInfo(
            socket=str(self.path.absolute()),
            version=_core.SHM_VERSION,
            slots=_core.SHM_SLOTS,
            clients=self._options.clients,
            client_bytes_max=self._options.total_bytes // _CLIENT_SHARE,
        )

    def reopen(self, memory: Memory) -> None:
        """Answer from these tables from now on; clients stay attached. Requests under way keep those they have."""
        self._native.reopen(_served(memory))

    async def settled(self) -> None:
        """Wait until all requests that began before `reopen` are over."""
        while not self._native.settled:
            await asyncio.sleep(_IDLE_POLL_S)

    def counts(self) -> dict[str, int]:
        """clients and bytes now; since the start requests, and strangers: who came with a uid that may not attach."""
        return self._native.counts()

    def failures(self) -> dict[int, int]:
        """Requests of these that were not answered with rows, by gRPC's number of the status."""
        return self._native.failures()

    def latencies(self) -> list[tuple[_core.Lane, _core.Format, list[int], int]]:
        """(lane, format, counts, sum in ns) of those that were, as _core.ShmServer.latencies."""
        return self._native.latencies()

    def note_requests(self, pending_bytes: int) -> None:
        """Note requests from now on, as long as no more bytes of keys than these wait to be dropped; 0 = no more."""
        self._native.note_requests(pending_bytes)

    def take_requests(self) -> tuple[list[_core.ShmRequest], int]:
        """What was noted since the last call, and how many more had no room; after `close` as well."""
        return self._native.take_requests()

    def look(self) -> str:
        """Log what happened since the last look; returns the first sign of a damaged table file, "" = none."""
        for note in self._native.take_notes():
            # Its words are what it is of a kind with: one who knocks again and again shall not hide what else happens.
            log.warning("shared memory: " + note)
        return self._native.damage

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests, and wait until those under way are answered, `drain_s` at most."""
        self._native.drain()
        give_up = time.monotonic() + drain_s
        while not self._native.idle and time.monotonic() < give_up:
            await asyncio.sleep(_IDLE_POLL_S)

    def close(self) -> None:
        """End every client's session; what is under way is given up."""
        remove(self.path, self._inode)
        self._native.close()


def open_channel(
    memory: Memory,
    limits: Limits,
    options: SharedMemoryOptions,
    *,
    uds: Path | None,
    port: int | None,
    server_id: str,
) -> SharedMemoryChannel | None:
    """The channel that the options ask for, None without one.

    uds, port: where gRPC listens, which names a socket that has no name. Raises ServeError for a path that was
    asked for and cannot be had; where none was, the server goes without, and says so.
    """
    if options.socket is None:
        return None
    if options.socket != "auto":
        return SharedMemoryChannel(memory, limits, options, options.socket, server_id)
    try:
        path = _own_path(uds, port)
        return SharedMemoryChannel(memory, limits, options, path, server_id)
    except (ServeError, OSError) as error:
        log.warning("no shared memory: %s; give a path with --shm PATH, or --shm off", error)
        return None


def _own_path(uds: Path | None, port: int | None) -> Path:
    """A path that a server of the same addresses finds again, so that it clears up what a dead one left."""
    if uds is not None:
        return uds.with_name(uds.name + ".shm")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime) if runtime and Path(runtime).is_dir() else _private_folder()
    return folder / f"engram-server-{port}.shm"


def _private_folder() -> Path:
    """A folder that nobody else can put sockets into."""
    folder = Path(tempfile.gettempdir()) / f"engram-server-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ServeError(f"{folder} is not a folder of this user alone")
    return folder


def _listen(path: Path, group: int | None) -> tuple[socket.socket, int]:
    """The listener, and the inode of its path."""
    make_way(path, socket.SOCK_SEQPACKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inode = None
    try:
        listener.bind(str(path))
        inode = path.lstat().st_ino
        if group is not None:
            os.chown(path, -1, group)
        # Before it listens, nobody can connect. Who may is checked once more by the peer's credentials.
        path.chmod(0o600 if group is None else 0o660)
        if group is not None and path.parent.stat().st_mode & 0o011 == 0:
            log.warning(
                "shared memory: the group cannot reach %s, since only its owner may enter the folder", path
            )
        listener.listen(64)
    except OSError as error:
        listener.close()
        if inode is not None:
            remove(path, inode)
        raise ServeError(f"cannot listen on the UNIX socket {path}: {error.strerror}") from error
    return listener, inode


def _served(memory: Memory) -> _core.ShmServed:
    token_map = memory.token_map
    return _core.ShmServed(
        engine=memory.engine,
        reader=memory.reader,
        hash=memory.hash,
        layers=list(memory.spec.layers),
        tables=[(table.layer, table.rows, table.kind, table.digest) for table in memory.tables.values()],
        columns=memory.spec.columns,
        group_rows=group_rows(memory),
        token_map_digest=token_map.sha256 if token_map else b"",
        hash_digest=memory.hash_digest,
        sealed=memory.all_packed,
    )


def _native_server(
    served: _core.ShmServed,
    limits: Limits,
    options: SharedMemoryOptions,
    listener: socket.socket,
    group: int | None,
    server_id: str,
) -> _core.ShmServer:
    return _core.ShmServer(
        served,
        server_id=bytes.fromhex(server_id),
        listener=listener.detach(),
        group=group,
        request_rows=limits.request_rows,
        admission=limits.admission,
        decode_rows=limits.decode_rows,
        block_bytes=limits.block_bytes,
        budget_wait_s=limits.budget_wait_s,
        clients=options.clients,
        client_bytes=options.total_bytes // _CLIENT_SHARE,
        total_bytes=options.total_bytes,
        spin_us=options.spin_us,
    )
