"""Connections to the targets of a client for threads, and the loop that tries them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import grpc

from engram_client._channel import Identity, channel_options, open_channel, stub
from engram_client._codec import Assembler, Expected, expect, must_stream, prefetched_from, request_message
from engram_client._config import Limits, Retry, SharedMemory, Timeouts
from engram_client._credentials import Credentials
from engram_client._description import Description, description_from
from engram_client._errors import (
    AuthenticationError,
    DeadlineError,
    EngramError,
    InvalidRequestError,
    ProtocolError,
    UnavailableError,
    from_rpc,
)
from engram_client._payload import Chunk
from engram_client._proto import engram_pb2 as pb
from engram_client._query import Query
from engram_client._result import Lookup, Prefetched
from engram_client._retry import Attempts
from engram_client._shared import Attachment, NoRoomError, SharedChannel, SharedLookup

T = TypeVar("T")

_REVIVE_S = 60.0
"""How long a server is waited for after a call has failed, calls or none: reconnecting for ever helps nobody."""


class ChunkCall(Protocol):
    """A stream call of gRPC, as far as it is used here."""

    def __iter__(self) -> Iterator[Chunk]: ...
    def cancel(self) -> object: ...


class Connection:
    """One target: a channel, which reconnects by itself, and what is known of the server behind it."""

    def __init__(
        self,
        target: str,
        timeouts: Timeouts,
        limits: Limits,
        identity: Identity,
        shared_memory: SharedMemory,
        credentials: Credentials,
    ) -> None:
        self.target = target
        self.silence_s = timeouts.keepalive_s
        self._shared = Attachment(shared_memory, target, self)
        self._timeouts = timeouts
        self._limits = limits
        self._identity = identity
        self._channel = open_channel(target, channel_options(limits, timeouts), credentials)
        self._stub = stub(self._channel, credentials.bearer(target))
        self._description: Description | None = None
        self._reviving = threading.Lock()

    def describe(self, attempts: Attempts) -> Description:
        """Ask, now. Raises UnavailableError when the server does not answer within Timeouts.connect_s."""
        timeout_s = attempts.remaining_s(at_most=self._timeouts.connect_s)
        try:
            reply = self._stub.Describe(pb.DescribeRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            failure = from_rpc(error, self.target)
            if isinstance(failure, DeadlineError):
                raise UnavailableError(f"no answer within {timeout_s:.3g} s", target=self.target) from error
            raise failure from error
        self._description = self._identity.check(description_from(reply, self.target), self.target)
        return self._description

    def description(self, attempts: Attempts) -> Description:
        """What the server said when last asked."""
        return self._description or self.describe(attempts)

    def forget(self) -> None:
        """The server is unavailable. Ask again before the next lookup: it may be another one."""
        self._description = None
        if not self._reviving.acquire(blocking=False):
            return
        try:
            threading.Thread(target=self._revive, name="engram-revive", daemon=True).start()
        except RuntimeError:  # no thread is to be had; gRPC finds the server in the end
            self._reviving.release()

    def _revive(self) -> None:
        """Wait for the server. gRPC looks at a channel's sockets while somebody waits for a call, and else every five
        seconds, which is as long as it gives an attempt to connect; lookups do not wait for a server that is gone."""
        try:
            self._stub.Describe(pb.DescribeRequest(), timeout=_REVIVE_S, wait_for_ready=True)
        except (grpc.RpcError, ValueError):  # the latter is gRPC's, when the channel was closed meanwhile
            pass
        finally:
            self._reviving.release()

    def lives(self, at_most_s: float) -> bool:
        """Whether the server says so within that time."""
        try:
            self._stub.Describe(pb.DescribeRequest(), timeout=at_most_s)
        except grpc.RpcError as error:
            return isinstance(from_rpc(error, self.target), AuthenticationError)  # it answers
        return True

    def lookup(self, query: Query, request_id: int, attempts: Attempts) -> Lookup:
        """One try at one lookup: through shared memory where there is some, else over gRPC, unary or as a stream of
        its own by the size of the reply."""
        description = self.description(attempts)
        expected = expect(query, description, self._limits)
        if (found := self._lookup_shared(expected, description, attempts)) is not None:
            return found
        request = request_message(query, request_id, description, self._limits)
        assembler = Assembler(expected, request_id, self.target)
        timeout_s = attempts.remaining_s()
        try:
            if not must_stream(expected, description, self._limits):
                return assembler.whole(self._stub.Lookup(request, timeout=timeout_s))
            chunks = self._stub.LookupStream(iter([request]), timeout=timeout_s)
            try:
                for chunk in chunks:
                    if (result := assembler.add(chunk)) is not None:
                        return result
            finally:
                chunks.cancel()
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from error
        raise ProtocolError("the stream ended before the reply did", target=self.target)

    def _lookup_shared(
        self, expected: Expected, description: Description, attempts: Attempts
    ) -> Lookup | None:
        channel = self._shared.channel(description, attempts.remaining_s())
        if channel is None or not channel.carries(expected):
            return None
        try:
            return channel.lookup(expected, attempts.remaining_s())
        except UnavailableError:
            self._shared.drop(channel)
            raise
        except (NoRoomError, InvalidRequestError):
            return None  # gRPC says, of the whole request, what is wrong with one piece of it

    def begin_in_place(self, query: Query, attempts: Attempts) -> tuple[SharedChannel, SharedLookup] | None:
        """Begin a lookup in shared memory; None when it has to go over gRPC. Raises NoRoomError."""
        description = self.description(attempts)
        expected = expect(query, description, self._limits)
        channel = self._shared.channel(description, attempts.remaining_s())
        if channel is None or not channel.carries(expected):
            return None
        try:
            return channel, channel.start(expected, attempts.remaining_s())
        except UnavailableError:
            self._shared.drop(channel)
            raise
        except ValueError as error:
            raise InvalidRequestError(
                f"{error}: split the request, or ask for more (SharedMemory.data_bytes)", target=self.target
            ) from error

    def prefetch(
        self, query: Query, request_id: int, give_up_s: float | None, attempts: Attempts
    ) -> Prefetched:
        """One try at queueing a query's rows for the server's cache."""
        description = self.description(attempts)
        expect(query, description, self._limits)
        request = request_message(query, request_id, description, self._limits, give_up_s)
        try:
            return prefetched_from(self._stub.Prefetch(request, timeout=attempts.remaining_s()))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from error

    def open_stream(self, requests: Iterator[pb.LookupRequest]) -> ChunkCall:
        """A stream without a deadline; iterating the call raises grpc.RpcError when it breaks."""
        call: ChunkCall = self._stub.LookupStream(requests)
        return call

    def close(self) -> None:
        """End calls under way and disconnect."""
        self._shared.close()
        self._channel.close()


class Pool:
    """The connections of one client; the one in use is left for the next when its server fails."""

    def __init__(
        self,
        targets: tuple[str, ...],
        timeouts: Timeouts,
        retry: Retry,
        limits: Limits,
        shared_memory: SharedMemory,
        credentials: Credentials,
    ) -> None:
        identity = Identity()
        self._connections = [
            Connection(target, timeouts, limits, identity, shared_memory, credentials) for target in targets
        ]
        self._current = 0
        self._timeouts = timeouts
        self._retry = retry
        self._ids = itertools.count(1)
        self._closed = threading.Event()

    def next_id(self) -> int:
        """A request id of this client."""
        return next(self._ids)

    def attempts(self, timeout_s: float | None, retry: Retry | None = None) -> Attempts:
        """The tries that one call may make; timeout_s None = Timeouts.request_s, retry None = the client's."""
        if timeout_s is None:
            timeout_s = self._timeouts.request_s
        return Attempts(retry or self._retry, len(self._connections), timeout_s)

    def endless_attempts(self) -> Attempts:
        """The tries of a stream that has no deadline."""
        return Attempts(self._retry, len(self._connections), None)

    def run(self, call: Callable[[Connection], T], attempts: Attempts) -> T:
        """Make a call until it succeeds, or fails in a way that trying again would not mend."""
        while not self._closed.is_set():
            connection = self._connections[self._current]
            try:
                return call(connection)
            except EngramError as error:
                self._closed.wait(self.leave(connection, error, attempts))
            except ValueError:  # gRPC's, when another thread has closed the channel meanwhile
                if not self._closed.is_set():
                    raise
        raise EngramError("the client is closed")

    def leave(self, connection: Connection, error: EngramError, attempts: Attempts) -> float:
        """After a failure: choose the next connection; returns the seconds to wait, or raises `error`."""
        if isinstance(error, UnavailableError):
            connection.forget()  # also when this call makes no other try: the next one must see a new server
        delay = attempts.delay_after(error)
        if self._connections[self._current] is connection:
            self._current = (self._current + 1) % len(self._connections)
        return delay

    def close(self) -> None:
        """End calls under way and disconnect."""
        self._closed.set()
        for connection in self._connections:
            connection.close()
