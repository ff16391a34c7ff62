"""Connections to the targets of a client for asyncio, and the loop that tries them. The twin of _pool.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from engram_client._channel import Identity, channel_options, open_aio_channel, stub
from engram_client._codec import Assembler, expect, must_stream, prefetched_from, request_message
from engram_client._config import Limits, Retry, Timeouts
from engram_client._credentials import Credentials
from engram_client._description import Description, description_from
from engram_client._errors import DeadlineError, EngramError, ProtocolError, UnavailableError, from_rpc
from engram_client._payload import Chunk
from engram_client._proto import engram_pb2 as pb
from engram_client._query import Query
from engram_client._result import Lookup, Prefetched
from engram_client._retry import Attempts

T = TypeVar("T")


class AsyncChunkCall(Protocol):
    """A stream call of gRPC, as far as it is used here."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...
    def cancel(self) -> object: ...


class AsyncConnection:
    """One target: a channel, which reconnects by itself, and what is known of the server behind it."""

    def __init__(
        self,
        target: str,
        timeouts: Timeouts,
        limits: Limits,
        identity: Identity,
        credentials: Credentials,
    ) -> None:
        """Call on the loop that will use it."""
        self.target = target
        self._timeouts = timeouts
        self._limits = limits
        self._identity = identity
        self._channel = open_aio_channel(target, channel_options(limits, timeouts), credentials)
        # The generated stub serves both kinds of channel; its types know the other one.
        self._stub = stub(self._channel, credentials.bearer(target))
        self._description: Description | None = None

    async def describe(self, attempts: Attempts) -> Description:
        """Ask, now. Raises UnavailableError when the server does not answer within Timeouts.connect_s."""
        timeout_s = attempts.remaining_s(at_most=self._timeouts.connect_s)
        try:
            reply = await self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            failure = from_rpc(error, self.target)
            if isinstance(failure, DeadlineError):
                raise UnavailableError(f"no answer within {timeout_s:.3g} s", target=self.target) from error
            raise failure from error
        self._description = self._identity.check(description_from(reply, self.target), self.target)
        return self._description

    async def description(self, attempts: Attempts) -> Description:
        """What the server said when last asked."""
        return self._description or await self.describe(attempts)

    def forget(self) -> None:
        """Ask again before the next lookup: the server may be another one."""
        self._description = None

    async def lookup(self, query: Query, request_id: int, attempts: Attempts) -> Lookup:
        """One try at one lookup, unary or as a stream of its own by the size of the reply."""
        description = await self.description(attempts)
        expected = expect(query, description, self._limits)
        request = request_message(query, request_id, description, self._limits)
        assembler = Assembler(expected, request_id, self.target)
        timeout_s = attempts.remaining_s()
        try:
            if not must_stream(expected, description, self._limits):
                return assembler.whole(await self._stub.Lookup(request, timeout=timeout_s))
            chunks: AsyncChunkCall = self._stub.LookupStream(_only(request), timeout=timeout_s)
            try:
                async for chunk in chunks:
                    if (result := assembler.add(chunk)) is not None:
                        return result
            finally:
                chunks.cancel()
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from error
        raise ProtocolError("the stream ended before the reply did", target=self.target)

    async def prefetch(
        self, query: Query, request_id: int, give_up_s: float | None, attempts: Attempts
    ) -> Prefetched:
        """One try at queueing a query's rows for the server's cache."""
        description = await self.description(attempts)
        expect(query, description, self._limits)
        request = request_message(query, request_id, description, self._limits, give_up_s)
        try:
            return prefetched_from(await self._stub.Prefetch(request, timeout=attempts.remaining_s()))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from error

    def open_stream(self, requests: AsyncIterator[pb.LookupRequest]) -> AsyncChunkCall:
        """A stream without a deadline; iterating the call raises grpc.RpcError when it breaks."""
        call: AsyncChunkCall = self._stub.LookupStream(requests)
        return call

    async def close(self) -> None:
        """End calls under way and disconnect."""
        await self._channel.close()


async def _only(request: pb.LookupRequest) -> AsyncIterator[pb.LookupRequest]:
    yield request


class AsyncPool:
    """The connections of one client; the one in use is left for the next when its server fails."""

    def __init__(
        self,
        targets: tuple[str, ...],
        timeouts: Timeouts,
        retry: Retry,
        limits: Limits,
        credentials: Credentials,
    ) -> None:
        self._targets = targets
        self._credentials = credentials
        self._timeouts = timeouts
        self._retry = retry
        self._limits = limits
        self._identity = Identity()
        self._connections: list[AsyncConnection] = []
        self._current = 0
        self._ids = itertools.count(1)
        self._closed = False

    def next_id(self) -> int:
        """A request id of this client."""
        return next(self._ids)

    def attempts(self, timeout_s: float | None) -> Attempts:
        """The tries that one call may make; timeout_s None = Timeouts.request_s."""
        if timeout_s is None:
            timeout_s = self._timeouts.request_s
        return Attempts(self._retry, len(self._targets), timeout_s)

    def endless_attempts(self) -> Attempts:
        """The tries of a stream that has no deadline."""
        return Attempts(self._retry, len(self._targets), None)

    async def run(self, call: Callable[[AsyncConnection], Awaitable[T]], attempts: Attempts) -> T:
        """Make a call until it succeeds, or fails in a way that trying again would not mend."""
        if (
            not self._connections and not self._closed
        ):  # not in __init__: a channel belongs to the running loop
            self._connections = [
                AsyncConnection(target, self._timeouts, self._limits, self._identity, self._credentials)
                for target in self._targets
            ]
        while not self._closed:
            connection = self._connections[self._current]
            try:
                return await call(connection)
            except EngramError as error:
                await asyncio.sleep(self.leave(connection, error, attempts))
        raise EngramError("the client is closed")

    def leave(self, connection: AsyncConnection, error: EngramError, attempts: Attempts) -> float:
        """After a failure: choose the next connection; returns the seconds to wait, or raises `error`."""
        delay = attempts.delay_after(error)
        connection.forget()
        if self._connections[self._current] is connection:
            self._current = (self._current + 1) % len(self._connections)
        return delay

    async def close(self) -> None:
        """End calls under way and disconnect."""
        self._closed = True
        for connection in self._connections:
            await connection.close()
