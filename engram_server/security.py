"""Who may call over TCP: with which certificate, and with which token. What the UNIX socket lets in is let in.

A call without a right token is refused before anything of its request is received. Tokens are looked at when a call
begins: a stream goes on with the one it came with.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2

from engram_server.bearer import Tokens
from engram_server.certificates import Certificates, CertificatesRead, TlsFiles
from engram_server.clients import UDS, Context, peer_address, token_name
from engram_server.refusals import Refusals

log = logging.getLogger("engram_server")

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_OPEN = f"/{health.SERVICE_NAME}/Check"
"""For probes, of the server as a whole. Not Watch: whoever holds one open takes a place among the calls worked on at
once."""
_NO_TOKEN = "this server wants a token: send `authorization: Bearer TOKEN`"
_WRONG_TOKEN = "the token is not one that this server knows"
_FIRST_CALL_S = 5
"""A connection whose handshake succeeds brings its first call within that time."""
_PEERS = 4096
"""Connections that are remembered to have brought one."""


@dataclass(frozen=True)
class SecurityOptions:
    """What callers over TCP must bring."""

    tls: TlsFiles | None = None
    """None: plain TCP."""
    tokens: Path | None = None
    """A file of names and tokens; None: no call needs one."""


class Security:
    """The files that say who may call, and what they mean for a server."""

    def __init__(self, options: SecurityOptions, refusals: Refusals) -> None:
        """Raises ServeError."""
        self._options = options
        self.refusals = refusals
        self.certificates = None if options.tls is None else Certificates(options.tls)
        self.tokens = None if options.tokens is None else Tokens.read(options.tokens)
        self._arrivals = _Arrivals()

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """What every call passes: nothing, where nothing is asked of callers."""
        return [] if self.certificates is None and self.tokens is None else [_Gate(self)]

    @property
    def summary(self) -> str:
        """What is asked of callers over TCP, in words; "" = nothing."""
        parts = []
        if self._options.tls is not None:
            parts.append("TLS" if self._options.tls.client_ca is None else "TLS with certificates of clients")
        if self.tokens is not None:
            parts.append(_count(self.tokens))
        return " and ".join(parts)

    def warn_of(self, listen: str) -> None:
        """Say what anybody in the network could do at this address, HOST:PORT."""
        if self.certificates is not None or _is_loopback(listen.rpartition(":")[0]):
            return
        if self.tokens is None:
            log.warning("whoever reaches %s can read the tables: no --tls-cert, no --tokens", listen)
        else:
            log.warning("tokens cross the network to %s readable for whoever listens: no --tls-cert", listen)

    async def reload(self) -> str:
        """Read all files again; what was taken, in words, "" = there are none. Raises ServeError: then all stays as it
        was. A file system may take its time: files are read in a thread."""
        certificates, tokens = await asyncio.to_thread(self._read)
        taken = []
        if self.certificates is not None and certificates is not None:
            self.certificates.use(certificates)
            taken.append("certificates")
        if tokens is not None:
            self.tokens = tokens
            taken.append(_count(tokens))
        return " and ".join(taken)

    def _read(self) -> tuple[CertificatesRead | None, Tokens | None]:
        certificates = None if self.certificates is None else self.certificates.read()
        tokens = None if self._options.tokens is None else Tokens.read(self._options.tokens)
        return certificates, tokens

    async def watch(self) -> None:
        """Count connections that brought no call. For as long as it serves."""
        if self.certificates is None:
            return
        begun: deque[int] = deque(maxlen=_FIRST_CALL_S)
        counted = 0
        while True:
            begun.append(self.certificates.begun)
            # A late one makes up for the next that never comes: a counter cannot go back.
            missing = begun[0] - self._arrivals.count if len(begun) == _FIRST_CALL_S else 0
            if missing > counted:
                self.refusals.refused(
                    "handshake",
                    "",
                    "connections with TLS brought no call: they had no certificate that counts here, did not like "
                    "this server's, spoke no TLS, or did not mean to call",
                    missing - counted,
                )
                counted = missing
            await asyncio.sleep(1.0)

    def arrived(self, peer: str) -> None:
        """A call came over TCP; peer as gRPC names it."""
        self._arrivals.add(peer)

    async def refuse(self, context: Context, brought_none: bool) -> None:
        """Abort a call."""
        text = _NO_TOKEN if brought_none else _WRONG_TOKEN
        self.refusals.refused(
            "no_token" if brought_none else "wrong_token", peer_address(context.peer()), text
        )
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)


class _Arrivals:
    """Connections that brought a call."""

    def __init__(self) -> None:
        self.count = 0
        self._peers: OrderedDict[str, None] = OrderedDict()

    def add(self, peer: str) -> None:
        if peer in self._peers:
            self._peers.move_to_end(peer)
            return
        self.count += 1
        self._peers[peer] = None
        if len(self._peers) > _PEERS:
            self._peers.popitem(last=False)


class _Gate(grpc.aio.ServerInterceptor):
    """What every call passes."""

    def __init__(self, security: Security) -> None:
        self._security = security

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Before a call begins. Nothing tells its peer here, so it is the handler that lets it in or refuses it."""
        handler = await continuation(details)
        if handler is None:  # there is no such method
            return None
        security = self._security
        name = None if security.tokens is None else security.tokens.name_of(details.invocation_metadata)
        if name:
            token_name.set(name)
        elif security.tokens is not None and details.method == _OPEN:
            return _unread(handler, self._note)
        elif security.tokens is not None:
            return _behind(handler, partial(self._admit, brought_none=name is None), before_request=True)
        return handler if security.certificates is None else _behind(handler, self._note)

    async def _note(self, context: Context) -> None:
        peer = context.peer()
        if peer_address(peer) != UDS:
            self._security.arrived(peer)

    async def _admit(self, context: Context, brought_none: bool) -> None:
        """A call that is not admitted is aborted, which raises."""
        await self._note(context)
        if peer_address(context.peer()) != UDS:
            await self._security.refuse(context, brought_none)


def _behind(
    handler: Handler, check: Callable[[Context], Awaitable[None]], before_request: bool = False
) -> Handler:
    """The same method, after a check that may abort the call.

    before_request: before any request is received, which gRPC does of itself where it may be more than one.
    """
    inner: Callable[..., Any] = next(
        filter(None, (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream))
    )

    async def behaviour(request: Any, context: Context) -> Any:
        await check(context)
        if before_request and not handler.request_streaming:
            request = await _only(request, context)
        answer = inner(request, context)
        if not inspect.isasyncgen(answer):
            return await answer
        async for reply in answer:
            await context.write(reply)
        return None

    many_requests = handler.request_streaming or before_request
    kind = f"{'stream' if many_requests else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    made: Handler = make(behaviour, handler.request_deserializer, handler.response_serializer)
    return made


def _unread(check: Handler, note: Callable[[Context], Awaitable[None]]) -> Handler:
    """Health's Check for whoever asks: its request may be as large as any message, and is received from the UNIX socket
    alone. Over TCP the answer is of the server as a whole."""
    inner: Any = check.unary_unary

    async def behaviour(requests: AsyncIterator[Any], context: Context) -> Any:
        await note(context)
        request = health_pb2.HealthCheckRequest()
        if peer_address(context.peer()) == UDS:
            request = await _only(requests, context)
        return await inner(request, context)

    made: Handler = grpc.stream_unary_rpc_method_handler(
        behaviour, check.request_deserializer, check.response_serializer
    )
    return made


async def _only(requests: AsyncIterator[Any], context: Context) -> Any:
    async for request in requests:
        return request
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call brought no request")
    return None


def _count(tokens: Tokens) -> str:
    return f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
