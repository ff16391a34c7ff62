"""A real server process over real sockets."""

import pickle
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engram_server.limits import Limits
from engram_server.memory import MemoryOptions
from engram_server.recorder import RecordOptions
from engram_server.security import SecurityOptions
from engram_server.server import ServeOptions
from engram_server.shared_memory import SharedMemoryOptions
from engram_server.spans import SpanOptions

_CHILD = """
import logging, pickle, sys
from engram_server.server import ServeError, serve
logging.basicConfig(level=logging.INFO)
exec(sys.argv[1])
try:
    sys.exit(serve(pickle.load(sys.stdin.buffer)))
except ServeError as error:
    sys.exit(f"ServeError: {error}")
"""
_START_S = 30.0
_STOP_S = 30.0


class ServerProcess:
    """`engram_server.server.serve` in a process of its own."""

    def __init__(self, options: ServeOptions, log: Path, before: str = "") -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, before],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(pickle.dumps(options))
        self.ready_line = ""
        self.targets: list[str] = []

    def wait_ready(self) -> "ServerProcess":
        """Read the line it prints when it serves."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], _START_S)
        self.ready_line = self.process.stdout.readline().decode() if readable else ""
        found = re.search(r" on (\S+?)(?: and (\S+?))?: layer", self.ready_line)
        if not found:
            self.kill()
            raise AssertionError(f"the server did not start: {self.ready_line!r}\n{self.log.read_text()}")
        self.targets = [target for target in found.groups() if target]
        return self

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait until it has ended; its exit status."""
        try:
            return self.process.wait(_STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def serving(
    path: Path,
    folder: Path,
    *,
    listen: str | None = "127.0.0.1:0",
    uds: Path | None = None,
    uds_group: str | None = None,
    limits: dict[str, Any] | None = None,
    device: str = "cpu",
    metrics: str | None = None,
    spans: SpanOptions | None = None,
    cache_bytes: int = 64 << 20,
    shared_memory: SharedMemoryOptions | None = None,
    record: RecordOptions | None = None,
    security: SecurityOptions | None = None,
    admin: Path | None = None,
    drain_s: float = 5.0,
    idle_s: float = 3600.0,
    before: str = "",
    **memory: Any,
) -> Iterator[ServerProcess]:
    """A server of `path` that is ready; its log goes to `folder`. before: Python that its process runs first.

    However slow the machine is, it refuses nothing for that; but a request that it will not answer within its deadline.
    """
    options = ServeOptions(
        path=path,
        listen=listen,
        uds=uds,
        uds_group=uds_group,
        limits=Limits(**{"queue_s": 3600.0} | (limits or {})),
        shared_memory=shared_memory or SharedMemoryOptions(),
        record=record,
        memory=MemoryOptions(cache_bytes=cache_bytes, **memory),
        device=device,
        metrics=metrics,
        security=security or SecurityOptions(),
        admin=admin,
        spans=spans,
        drain_s=drain_s,
        idle_s=idle_s,
    )
    server = ServerProcess(options, folder / "server.log", before)
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def until(condition: Any, timeout_s: float = 20.0) -> None:
    """Wait for something another process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
