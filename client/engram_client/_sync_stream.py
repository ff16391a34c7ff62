"""A long-lived stream of lookups, for threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Self

import grpc

from engram_client._codec import Assembler, expect, request_message
from engram_client._config import Limits
from engram_client._errors import (
    DeadlineError,
    EngramError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
    from_rpc,
)
from engram_client._payload import Chunk
from engram_client._pool import ChunkCall, Connection, Pool
from engram_client._proto import engram_pb2 as pb
from engram_client._query import LookupMethods, Query
from engram_client._result import Lookup
from engram_client._retry import Attempts


class PendingLookup:
    """A lookup under way on a stream."""

    def __init__(self, stream: LookupStream, query: Query, attempts: Attempts) -> None:
        self._stream = stream
        self._query = query
        self._attempts = attempts
        self._future = stream.send(query, attempts)

    def result(self) -> Lookup:
        """Wait for the rows. Raises what the lookup failed with; DeadlineError when its time ran out."""
        while True:
            try:
                wait_s = 0.0 if self._future.done() else self._attempts.remaining_s()
                return self._future.result(wait_s)
            except OverloadedError as error:
                time.sleep(self._attempts.delay_after(error))
                self._future = self._stream.send(self._query, self._attempts)
            except EngramError:
                raise
            except TimeoutError:
                raise DeadlineError("no answer in the time allowed") from None

    def done(self) -> bool:
        """Whether a reply has come."""
        return self._future.done()


class LookupStream(LookupMethods[PendingLookup]):
    """One open stream. Its methods send a lookup and return at once; `PendingLookup.result` has the rows.

    Replies come in the order of the requests. At most Limits.stream_requests may be without a reply: sending
    one more waits. When the server goes away, the stream opens anew as `Retry` allows and asks again for all
    that has had no reply. Safe to share between threads. A context manager.
    """

    def __init__(self, pool: Pool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self._slots = threading.Semaphore(limits.stream_requests)
        self._lock = threading.Lock()
        """Guards what follows."""
        self._closed = threading.Event()
        self._flights: deque[_Flight] = deque()
        self._line: _Line | None = None
        self._reader: threading.Thread | None = None
        with self._lock:
            self._start(pool.attempts(None))

    def close(self) -> None:
        """End the stream; lookups without a reply fail."""
        self._closed.set()  # before the lock, which a sender holds while it opens a line
        with self._lock:
            line, reader = self._line, self._reader
        if line is not None:
            line.close()
        if reader is not None:
            reader.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, query: Query, timeout: float | None) -> PendingLookup:
        return PendingLookup(self, query, self._pool.attempts(timeout))

    def send(self, query: Query, attempts: Attempts) -> Future[Lookup]:
        """Send a query, once there is room. For PendingLookup."""
        if not self._slots.acquire(timeout=attempts.remaining_s()):
            raise DeadlineError(
                f"{self._limits.stream_requests} lookups of this stream had no reply in the time allowed"
            )
        flight = _Flight(query, attempts)
        try:
            with self._lock:
                if self._closed.is_set():
                    raise EngramError("the stream is closed")
                line = self._line or self._start(attempts)
                request = flight.request_on(line, self._pool, self._limits)
                self._flights.append(flight)
                line.outbox.put(request)
        except BaseException:
            self._slots.release()
            raise
        return flight.future

    def _start(self, attempts: Attempts) -> _Line:
        self._line = self._open(attempts)
        self._reader = threading.Thread(target=self._read, name="engram-lookup-stream", daemon=True)
        self._reader.start()
        return self._line

    def _open(self, attempts: Attempts) -> _Line:
        def call(connection: Connection) -> _Line:
            if self._closed.is_set():
                raise EngramError("the stream is closed")
            return _Line(connection, attempts)

        return self._pool.run(call, attempts)

    # ------------------------------------------------------------------------------------- the reader thread

    def _read(self) -> None:
        attempts = self._pool.endless_attempts()
        while True:
            line = self._line
            assert line is not None
            try:
                for chunk in line.call:
                    if self._take(chunk, line):
                        attempts = (
                            self._pool.endless_attempts()
                        )  # the server works: forget its earlier failures
                failure: EngramError = UnavailableError("the server ended the stream", target=line.target)
            except grpc.RpcError as error:
                failure = from_rpc(error, line.target)
            except ProtocolError as error:
                line.close()
                failure = error
            try:
                self._reopen(line, failure, attempts)
            except EngramError as error:
                self._end(error)
                return

    def _take(self, chunk: Chunk, line: _Line) -> bool:
        """True when the chunk completed a reply."""
        if not self._flights:
            raise ProtocolError("a reply came that nothing asked for", target=line.target)
        flight = self._flights[0]
        assert flight.assembler is not None
        try:
            result = flight.assembler.add(chunk)
        except ProtocolError:
            raise
        except EngramError as error:
            self._land().set_exception(error)
            return True
        if result is not None:
            self._land().set_result(result)
        return result is not None

    def _land(self) -> Future[Lookup]:
        future = self._flights.popleft().future
        self._slots.release()
        return future

    def _reopen(self, line: _Line, failure: EngramError, attempts: Attempts) -> None:
        """Open the stream anew and ask again for what had no reply, or raise why not."""
        if self._closed.is_set():
            raise EngramError("the stream was closed before the reply came")
        self._closed.wait(self._pool.leave(line.connection, failure, attempts))
        new = self._open(attempts)
        with self._lock:
            self._line = new
            flights, self._flights = self._flights, deque()
            for flight in flights:
                try:
                    request = flight.request_on(new, self._pool, self._limits)
                except EngramError as error:
                    flight.future.set_exception(error)
                    self._slots.release()
                else:
                    self._flights.append(flight)
                    new.outbox.put(request)
            if self._closed.is_set():
                new.close()

    def _end(self, error: EngramError) -> None:
        with self._lock:
            self._line = None  # the next lookup starts over
            while self._flights:
                self._land().set_exception(error)


class _Line:
    """One call of LookupStream."""

    def __init__(self, connection: Connection, attempts: Attempts) -> None:
        self.connection = connection
        self.target = connection.target
        self.description = connection.description(attempts)
        self.outbox: SimpleQueue[pb.LookupRequest | None] = SimpleQueue()
        self.call: ChunkCall = connection.open_stream(iter(self.outbox.get, None))

    def close(self) -> None:
        self.outbox.put(None)
        self.call.cancel()


class _Flight:
    """A request between sending and its reply."""

    def __init__(self, query: Query, attempts: Attempts) -> None:
        self.query = query
        self.attempts = attempts
        self.future: Future[Lookup] = Future()
        self.assembler: Assembler | None = None

    def request_on(self, line: _Line, pool: Pool, limits: Limits) -> pb.LookupRequest:
        """The request as this line's server wants it; whatever came before is void."""
        request_id = pool.next_id()
        expected = expect(self.query, line.description, limits)
        self.assembler = Assembler(expected, request_id, line.target)
        timeout_s = self.attempts.remaining_s()
        return request_message(self.query, request_id, line.description, limits, timeout_s)
