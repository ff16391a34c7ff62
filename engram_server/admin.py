"""The administrator's door: HTTP at a UNIX socket of its own, for root and the server's own user alone.

gRPC in Python does not say which user is at the other end of a UNIX socket, so it cannot be the socket of lookups.

    POST /reload    read tables, certificates and tokens again; 200, or 409 with what was wrong
    GET  /status    what is served, as JSON
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeAlias

from engram_server.http import Handler, Server
from engram_server.refusals import Refusals
from engram_server.reload import ReloadError
from engram_server.sockets import ServeError, make_way, remove

Reload: TypeAlias = Callable[[], Coroutine[Any, Any, str]]

_CREDENTIALS = struct.Struct("iII")
"""struct ucred: process, user, group."""
_RELOAD_S = 600.0
"""A large table on a slow disk is open by then."""


class AdminServer:
    """Answers on threads of its own."""

    def __init__(
        self,
        path: Path,
        reload: Reload,
        status: Callable[[], dict[str, Any]],
        refusals: Refusals,
    ) -> None:
        """reload runs on the loop that calls this; it says what it took, or raises ReloadError. status, from any
        thread, gives what JSON can say.

        Listens at once. Raises ServeError.
        """
        make_way(path, socket.SOCK_STREAM)
        self.path = path
        try:
            self._server = _AdminServer(str(path), _AdminHandler)
        except OSError as error:
            raise ServeError(f"cannot listen on the UNIX socket {path}: {error.strerror}") from error
        self._inode = path.lstat().st_ino
        self._server.loop = asyncio.get_running_loop()
        self._server.reload, self._server.status, self._server.refusals = reload, status, refusals
        self._thread = threading.Thread(target=self._server.serve_forever, name="engram-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        remove(self.path, self._inode)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def ask(path: Path, method: str, what: str) -> tuple[int, str]:
    """Ask a server at its administrator's socket: the HTTP status, and the text. Raises ServeError."""
    connection = _AdminConnection(path)
    try:
        connection.request(method, what)
        reply = connection.getresponse()
        return reply.status, reply.read().decode("utf-8", "replace").rstrip()
    except (OSError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or "what listens there speaks no HTTP"
        raise ServeError(
            f"no server answers at {path} ({reason}): it listens there when started with --admin {path}"
        ) from error
    finally:
        connection.close()


class _AdminServer(Server):
    address_family = socket.AF_UNIX
    loop: asyncio.AbstractEventLoop
    reload: Reload
    status: Callable[[], dict[str, Any]]

    def server_bind(self) -> None:
        """For its owner alone, before anybody can connect."""
        self.socket.bind(str(self.server_address))
        Path(str(self.server_address)).chmod(0o600)
        self.server_name, self.server_port = "localhost", 0


class _AdminHandler(Handler):
    server: _AdminServer

    def do_GET(self) -> None:  # noqa: N802
        if not self._is_administrator():
            return
        if self.path != "/status":
            self.answer(404, b"there are GET /status and POST /reload\n")
            return
        self.answer(200, json.dumps(self.server.status()).encode() + b"\n", "application/json")

    def do_POST(self) -> None:  # noqa: N802
        if not self._is_administrator():
            return
        if self.path != "/reload":
            self.answer(404, b"there are GET /status and POST /reload\n")
            return
        reloading = asyncio.run_coroutine_threadsafe(self.server.reload(), self.server.loop)
        try:
            self.answer(200, f"{reloading.result(_RELOAD_S)}\n".encode())
        except ReloadError as error:
            self.answer(409, f"{error}\n".encode())
        except TimeoutError:
            self.answer(504, f"it was not done within {_RELOAD_S:.0f} s, and goes on\n".encode())

    def _is_administrator(self) -> bool:
        """Whether it comes from root or the server's own user, whoever else may open the socket."""
        raw = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid in (0, os.geteuid()):
            return True
        text = f"uid {uid} may not administer this server"
        self.server.refusals.refused("wrong_uid", f"uid {uid}", text)
        self.answer(403, f"{text}\n".encode())
        return False


class _AdminConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))
