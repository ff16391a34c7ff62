"""A long-lived stream of lookups, for asyncio. The twin of _sync_stream.py."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Self

import grpc

from engram_client._aio_pool import AsyncChunkCall, AsyncConnection, AsyncPool
from engram_client._codec import Assembler, expect, request_message
from engram_client._config import Limits
from engram_client._description import Description
from engram_client._errors import (
    DeadlineError,
    EngramError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
    from_rpc,
)
from engram_client._payload import Chunk
from engram_client._proto import engram_pb2 as pb
from engram_client._query import LookupMethods, Query
from engram_client._result import Lookup
from engram_client._retry import Attempts


class AsyncLookupStream(LookupMethods["asyncio.Task[Lookup]"]):
    """One open stream. Its methods start a lookup and return a task; awaiting it gives the rows.

    Replies come in the order of the requests. At most Limits.stream_requests are on the stream without a
    reply; more wait their turn. When the server goes away, the stream opens anew as `Retry` allows and asks
    again for all that has had no reply. An asynchronous context manager.
    """

    def __init__(self, pool: AsyncPool, limits: Limits) -> None:
        """Opens with the first lookup, or with `async with`."""
        self._pool = pool
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.stream_requests)
        self._opening = asyncio.Lock()
        self._flights: deque[_Flight] = deque()
        self._line: _Line | None = None
        self._reader: asyncio.Task[None] | None = None
        self._closed = False

    async def close(self) -> None:
        """End the stream; lookups without a reply fail."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})

    async def __aenter__(self) -> Self:
        await self._open_line(self._pool.attempts(None))
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _run(self, query: Query, timeout: float | None) -> asyncio.Task[Lookup]:
        return asyncio.get_running_loop().create_task(self._lookup(query, self._pool.attempts(timeout)))

    async def _lookup(self, query: Query, attempts: Attempts) -> Lookup:
        while True:
            try:
                async with asyncio.timeout(attempts.remaining_s()):
                    return await (await self._send(query, attempts))
            except OverloadedError as error:
                await asyncio.sleep(attempts.delay_after(error))
            except EngramError:
                raise
            except TimeoutError:
                raise DeadlineError("no answer in the time allowed") from None

    async def _send(self, query: Query, attempts: Attempts) -> asyncio.Future[Lookup]:
        await self._slots.acquire()
        flight = _Flight(query, attempts)
        try:
            line = self._line or await self._open_line(attempts)
            request = flight.request_on(line, self._pool, self._limits)
        except BaseException:
            self._slots.release()
            raise
        self._flights.append(flight)
        line.outbox.put_nowait(request)
        return flight.future

    async def _open_line(self, attempts: Attempts) -> _Line:
        async with self._opening:
            if self._closed:
                raise EngramError("the stream is closed")
            if self._line is None:
                line = await self._pool.run(lambda connection: _open(connection, attempts), attempts)
                if self._closed:
                    line.close()
                    raise EngramError("the stream is closed")
                self._line = line
                self._reader = asyncio.create_task(self._read(self._line))
            return self._line

    # --------------------------------------------------------------------------------------- the reader task

    async def _read(self, line: _Line) -> None:
        attempts = self._pool.endless_attempts()
        failure: EngramError = EngramError("the stream was closed before the reply came")
        try:
            while True:
                try:
                    async for chunk in line.call:
                        if self._take(chunk, line):
                            attempts = self._pool.endless_attempts()  # it works: forget earlier failures
                    failure = UnavailableError("the server ended the stream", target=line.target)
                except grpc.RpcError as error:
                    failure = from_rpc(error, line.target)
                except ProtocolError as error:
                    failure = error
                line.close()
                line = await self._reopen(line, failure, attempts)
        except EngramError as error:
            failure = error
        except asyncio.CancelledError:
            failure = EngramError("the stream was closed before the reply came")
            raise
        finally:
            line.close()
            self._line = None  # the next lookup starts over
            while self._flights:
                self._land(error=failure)

    def _take(self, chunk: Chunk, line: _Line) -> bool:
        """True when the chunk completed a reply."""
        if not self._flights:
            raise ProtocolError("a reply came that nothing asked for", target=line.target)
        assembler = self._flights[0].assembler
        assert assembler is not None
        try:
            result = assembler.add(chunk)
        except ProtocolError:
            raise
        except EngramError as error:
            self._land(error=error)
            return True
        if result is not None:
            self._land(result)
        return result is not None

    def _land(self, result: Lookup | None = None, error: EngramError | None = None) -> None:
        flight = self._flights.popleft()
        self._slots.release()
        flight.settle(result, error)

    async def _reopen(self, line: _Line, failure: EngramError, attempts: Attempts) -> _Line:
        """Open the stream anew and ask again for what had no reply, or raise why not."""
        await asyncio.sleep(self._pool.leave(line.connection, failure, attempts))
        new = await self._pool.run(lambda connection: _open(connection, attempts), attempts)
        flights, self._flights = self._flights, deque()
        for flight in flights:
            try:
                request = flight.request_on(new, self._pool, self._limits)
            except EngramError as error:
                flight.settle(None, error)
                self._slots.release()
            else:
                self._flights.append(flight)
                new.outbox.put_nowait(request)
        self._line = new
        return new


class _Line:
    """One call of LookupStream."""

    def __init__(self, connection: AsyncConnection, description: Description) -> None:
        self.connection = connection
        self.target = connection.target
        self.description = description
        self.outbox: asyncio.Queue[pb.LookupRequest] = asyncio.Queue()
        self.call: AsyncChunkCall = connection.open_stream(self._requests())

    async def _requests(self) -> AsyncIterator[pb.LookupRequest]:
        while True:
            yield await self.outbox.get()

    def close(self) -> None:
        self.call.cancel()


async def _open(connection: AsyncConnection, attempts: Attempts) -> _Line:
    return _Line(connection, await connection.description(attempts))


class _Flight:
    """A request between sending and its reply."""

    def __init__(self, query: Query, attempts: Attempts) -> None:
        self.query = query
        self.attempts = attempts
        self.future: asyncio.Future[Lookup] = asyncio.get_running_loop().create_future()
        self.assembler: Assembler | None = None

    def request_on(self, line: _Line, pool: AsyncPool, limits: Limits) -> pb.LookupRequest:
        """The request as this line's server wants it; whatever came before is void."""
        request_id = pool.next_id()
        expected = expect(self.query, line.description, limits)
        self.assembler = Assembler(expected, request_id, line.target)
        timeout_s = self.attempts.remaining_s()
        return request_message(self.query, request_id, line.description, limits, timeout_s)

    def settle(self, result: Lookup | None, error: EngramError | None) -> None:
        """Tell the waiting task, unless it has given up."""
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        elif result is not None:
            self.future.set_result(result)
