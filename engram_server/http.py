"""The HTTP port for those who run a server: `/metrics`, and `/healthz` and `/readyz` for whoever restarts or routes.

Anybody who reaches it may read; what changes the server is asked for elsewhere (admin.py).
"""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from engram_server.refusals import Refusals
from engram_server.sockets import ServeError

log = logging.getLogger("engram_server")

_SILENCE_S = 5.0
"""How long a client may keep its thread waiting for the next byte."""
_CONNECTIONS = 16
"""Worked on at once. One more takes the place of the one that has been saying what it wants for longest: whoever means
to ask does so at once, and is kept out by nobody who does not."""
_HANGING_UP_S = 1.0
"""How long it may take until the place is free."""


class HttpServer:
    """Answers on threads of its own."""

    def __init__(
        self,
        listen: str,
        registry: CollectorRegistry,
        not_alive: Callable[[], str],
        not_ready: Callable[[], str],
        refusals: Refusals,
    ) -> None:
        """not_alive says in words why a restart is needed, not_ready why no lookups should come now; "" = neither.

        Listens at once. Raises ServeError.
        """
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise ServeError(f"cannot show metrics at {listen!r}: expected HOST:PORT, such as 127.0.0.1:9464")
        try:
            self._server = _MetricsServer((host.strip("[]"), int(port)), _MetricsHandler)
        except (OSError, TypeError, UnicodeError) as error:  # the last two: of a host that is no name
            reason = getattr(error, "strerror", None) or error
            raise ServeError(f"cannot show metrics at {listen}: {reason}") from error
        self._server.registry, self._server.refusals = registry, refusals
        self._server.not_alive, self._server.not_ready = not_alive, not_ready
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="engram-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Server(ThreadingHTTPServer):
    """Answers few at once."""

    refusals: Refusals

    def __init__(self, address: Any, handler: type[Handler]) -> None:
        self._room = threading.BoundedSemaphore(_CONNECTIONS)
        self._asking: dict[socket.socket, None] = {}
        """Of those in work, whose request is not there yet, by when they came. Changed by whole operations alone."""
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the name look-up of HTTPServer, which may take as long as name servers do."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, while there is room for one or room can be made."""
        if self._room.acquire(blocking=False) or self._make_room():
            self._asking[request] = None
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _make_room(self) -> bool:
        longest = next(iter(tuple(self._asking)), None)
        if longest is None:
            return False
        self.has_asked(longest)
        with suppress(OSError):  # it has just gone by itself
            longest.shutdown(socket.SHUT_RDWR)  # its thread wakes up, and closes it
        return self._room.acquire(timeout=_HANGING_UP_S)

    def has_asked(self, request: socket.socket) -> None:
        """It is to be answered now, and not hung up on any more."""
        self._asking.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread's."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            log.exception("a request over HTTP failed")


class Handler(BaseHTTPRequestHandler):
    """Says little of itself."""

    server: Server
    timeout = _SILENCE_S
    server_version = "engram-server"
    sys_version = ""

    def parse_request(self) -> bool:
        """With the headers, which is all there is of a request here."""
        understood = super().parse_request()
        self.server.has_asked(self.connection)
        return understood

    def answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        """The whole of it."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


class _MetricsServer(Server):
    registry: CollectorRegistry
    not_alive: Callable[[], str]
    not_ready: Callable[[], str]

    def __init__(self, address: tuple[str, int], handler: type[Handler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)


class _MetricsHandler(Handler):
    server: _MetricsServer

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                self._metrics()
            case "/healthz":
                self._say(self.server.not_alive(), "alive")
            case "/readyz":
                self._say(self.server.not_ready(), "ready")
            case "/reload" | "/status":
                self._not_here()
            case _:
                self.answer(404, b"there are /metrics, /healthz and /readyz\n")

    def _metrics(self) -> None:
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encode(self.server.registry)
        except Exception:
            log.exception("metrics could not be collected")
            self.answer(500, b"metrics could not be collected: see the server's log\n")
        else:
            self.answer(200, body, kind)

    def _say(self, trouble: str, well: str) -> None:
        self.answer(503 if trouble else 200, f"{trouble or well}\n".encode())

    def do_POST(self) -> None:
        self._not_here()

    def _not_here(self) -> None:
        text = "a server is administered at the UNIX socket of --admin, not here"
        self.server.refusals.refused("admin_over_tcp", str(self.client_address[0]), text)
        self.answer(403, f"{text}\n".encode())
