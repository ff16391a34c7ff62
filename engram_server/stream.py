"""One LookupStream call: a reader works ahead of a sender.

The reader takes requests off the wire, plans them and submits their blocks, strictly in order; the sender
waits for each block and sends its rows. So the next block, or the next request, is read while rows are sent.
And whatever a stream holds in memory goes out before what it waits for: streams that wait for room in the
engine's budget never wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from engram_client._payload import Chunk
from engram_client._proto import engram_pb2 as pb
from engram_kernels import _core
from engram_server import lookup, wire
from engram_server.fetch import Admission, Fetcher, Hits
from engram_server.limits import Limits
from engram_server.lookup import Plan
from engram_server.metrics import LookupMeter
from engram_server.status import retry_after_ms, status_of
from engram_server.terms import Terms

_BLOCKS_AHEAD = 2
"""Blocks of one request in memory: one is sent while the next is read."""


class Answer:
    """One request on its way from the reader to the sender."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.began = time.perf_counter()
        self.fetcher: Fetcher | None = None
        self.admission: Admission | None = None
        self._room = asyncio.Semaphore(_BLOCKS_AHEAD)
        self._abandoned = False
        self._steps: asyncio.Queue[Plan | _core.Batch | Hits | Exception] = asyncio.Queue()

    @property
    def terms(self) -> Terms:
        """Once there is a plan."""
        assert self.admission is not None
        return self.admission.terms

    def put(self, step: Plan | _core.Batch | Hits | Exception) -> None:
        """From the reader: the plan, then a batch for each of its blocks, or its only block's hits; or an error, which
        ends it."""
        self._steps.put_nowait(step)

    async def wait_for_room(self) -> bool:
        """For the reader, before each block. False: the answer has failed, no more blocks are wanted."""
        await self._room.acquire()
        return not self._abandoned

    def block_sent(self) -> None:
        """From the sender: a block's rows are out of memory."""
        self._room.release()

    def abandon(self) -> None:
        """From the sender: the answer has failed."""
        self._abandoned = True
        self._room.release()

    def forget(self) -> None:
        """When nobody sends it any more. An error among its steps holds the frames it passed, and they hold this."""
        while not self._steps.empty():
            self._steps.get_nowait()

    async def plan(self) -> Plan:
        """For the sender, first. Raises the reader's error."""
        step = await self._next()
        assert isinstance(step, Plan)
        return step

    async def block(self) -> _core.Batch | Hits:
        """For the sender, once per block. Raises the reader's error."""
        step = await self._next()
        assert not isinstance(step, Plan)
        return step

    async def _next(self) -> Plan | _core.Batch | Hits:
        step = await self._steps.get()
        if isinstance(step, Exception):
            try:
                raise step
            finally:
                del step  # whose traceback holds this frame: they would wait for the garbage collector
        return step


class DrainingError(Exception):
    """A stream ended because its server is shutting down."""


class ClientGoneError(Exception):
    """A chunk could not be sent: nobody is left to reply to."""


class ReplyStream:
    """The replies to one stream of requests."""

    def __init__(
        self,
        fetcher: Callable[[], Fetcher],
        limits: Limits,
        requests: AsyncIterator[wire.Received],
        write: Callable[[Chunk], Awaitable[None]],
        meter: LookupMeter,
        client: str = "",
        call_left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """fetcher gives what a request that begins now is answered by. write sends a chunk and returns when the
        transport has room for the next; it raises, with whatever exception, when the client is gone. meter counts the
        replies. client: its name. call_left_s: seconds until the deadline of the call, None = none."""
        self._fetcher = fetcher
        self._chunk_bytes = limits.chunk_bytes
        self._requests = requests
        self._transport_write = write
        self._meter = meter
        self._client = client
        self._call_left_s = call_left_s
        self._slots = asyncio.Semaphore(limits.stream_requests)
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()
        self._unsent = 0
        self._counted = 0  # of these, by the meter
        self._admitted: dict[Admission, Fetcher] = {}
        self._reader: asyncio.Task[None] | None = None
        self._waits_for_request = False
        self._draining = False

    async def run(self) -> None:
        """Reply to every request in order, until the client has no more. Cancel it at any time.

        Raises DrainingError when `drain` was called and every request taken was replied to, ClientGoneError
        when there is nobody to reply to.
        """
        reader = self._reader = asyncio.create_task(self._read_ahead())
        answer: Answer | None = None
        try:
            while (answer := await self._answers.get()) is not None:
                await self._send(answer)
                self._release(answer.admission)
                self._unsent -= 1
                self._counted = 0
                self._slots.release()
            if self._draining:
                raise DrainingError("the server is shutting down")
            await reader
        finally:
            reader.cancel()
            for _ in range(self._unsent - self._counted):  # nobody waits for them any more
                self._meter.failed(grpc.StatusCode.CANCELLED)
            if answer is not None:
                answer.forget()
            while not self._answers.empty():
                if (answer := self._answers.get_nowait()) is not None:
                    answer.forget()
            # A task holds its exception, that the frames it passed, and they the rows of this stream: out of
            # that circle, or the rows stay until the garbage collector happens to run.
            del reader
            self._reader = None
            for admission in tuple(self._admitted):
                self._release(admission)

    def drain(self) -> None:
        """Take no more requests. What the client has sent and got no reply to, it may send to another server."""
        self._draining = True
        if self._reader is not None and self._waits_for_request:
            self._reader.cancel()

    async def _read_ahead(self) -> None:
        try:
            while True:
                self._waits_for_request = True
                await self._slots.acquire()
                request = await anext(self._requests, None)
                self._waits_for_request = False
                if request is None:
                    return
                answer = Answer(request.request_id)
                self._unsent += 1
                self._answers.put_nowait(answer)
                try:
                    await self._begin(answer, request)
                except Exception as error:
                    answer.put(error)
                if self._draining:
                    return
        finally:
            self._answers.put_nowait(None)

    async def _begin(self, answer: Answer, received: wire.Received) -> None:
        request = wire.well_formed(received)
        fetcher = answer.fetcher = self._fetcher()
        # A stream that has nothing under way is refused at once, and may ask elsewhere; one that has waits its turn.
        admission = answer.admission = await fetcher.admit(
            request, self._client, self._call_left_s(), patient=lambda: self._unsent > 1
        )
        self._admitted[admission] = fetcher
        plan = await fetcher.plan(request, admission)
        answer.put(plan)
        # With nothing to be read, and no other reply in memory, there is nothing to work ahead of.
        alone = self._unsent == 1 and len(plan.blocks) == 1
        if alone and (hits := fetcher.hits(plan.blocks[0], plan.shape.format, admission.terms)):
            answer.put(hits)
            return
        for index, block in enumerate(plan.blocks):
            if not await answer.wait_for_room():
                return
            # A full engine refuses a new request, unless it is this stream's own replies that fill it.
            patient = index > 0 or self._unsent > 1
            answer.put(await fetcher.submit(block, admission.terms, patient=patient))

    async def _write(self, chunk: Chunk) -> None:
        try:
            await self._transport_write(chunk)
        except Exception as error:
            raise ClientGoneError from error

    async def _send(self, answer: Answer) -> None:
        try:
            await self._reply(answer)
        except ClientGoneError:
            raise
        except Exception as error:
            answer.abandon()
            code, text = status_of(error)
            self._meter.failed(code, answer.began)
            self._counted = 1
            failure = pb.Error(code=code.value[0], message=text, retry_after_ms=retry_after_ms(error))
            await self._write(Chunk(pb.LookupChunk(request_id=answer.request_id, last=True, error=failure)))

    async def _reply(self, answer: Answer) -> None:
        plan = await answer.plan()
        fetcher = answer.fetcher
        assert fetcher is not None
        terms, format = answer.terms, plan.shape.format
        sender = _ChunkSender(self._write, answer.request_id, plan)
        for block in plan.blocks:
            batch = await answer.block()
            if isinstance(batch, Hits):
                sender.add_stats(batch.stats)
                await sender.send(batch.payload)
                continue
            await fetcher.rows_read(batch, terms)
            sender.add_stats(batch.stats)
            for first, count in block.spans(self._chunk_bytes):
                await sender.send(await fetcher.gather(batch, block, first, count, format, terms))
            del batch  # and with it its rows, before the reader may submit another block
            answer.block_sent()
        for inverse in wire.inverse_bytes(plan):
            for first in range(0, len(inverse), self._chunk_bytes):
                await sender.send(inverse[first : first + self._chunk_bytes])
        stats = sender.stats()
        try:
            await sender.end(stats)
        finally:
            # Handed over. A client that has read it may be gone before gRPC says that it went.
            self._meter.done(terms, format, answer.began, stats)
            self._counted = 1

    def _release(self, admission: Admission | None) -> None:
        if admission is not None:
            self._admitted.pop(admission).release(admission)


class _ChunkSender:
    """Sends the payload of one reply. The chunk that completes it is kept for the statistics, so that a small
    reply is one message."""

    def __init__(self, write: Callable[[Chunk], Awaitable[None]], request_id: int, plan: Plan) -> None:
        self._write = write
        self._plan = plan
        self._totals = lookup.NO_STATS
        self._left = plan.shape.payload_bytes
        self._chunk = Chunk(
            pb.LookupChunk(
                request_id=request_id, shape=wire.shape_message(plan), mask=wire.mask_bytes(plan.request)
            )
        )

    def add_stats(self, stats: lookup.BatchStats) -> None:
        self._totals = lookup.add_stats(self._totals, stats)

    async def send(self, payload: bytes | memoryview) -> None:
        self._left -= len(payload)
        self._chunk.payload = payload
        if self._left:
            await self._write(self._chunk)
            self._chunk = Chunk(pb.LookupChunk(request_id=self._chunk.message.request_id))

    def stats(self) -> pb.LookupStats:
        """Once all of the payload is there."""
        return wire.stats_message(self._plan, self._totals)

    async def end(self, stats: pb.LookupStats) -> None:
        assert self._left == 0
        self._chunk.message.stats.CopyFrom(stats)
        self._chunk.message.last = True
        await self._write(self._chunk)
