"""The gRPC service: Describe, Lookup, LookupStream and Prefetch of engram.proto.

A request becomes a `Plan` (wire.py, lookup.py), its blocks are fetched (fetch.py), and their bytes go out.
Whatever goes wrong fails that request alone, with a status that tells the caller what to do (status.py).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, TypeAlias
from weakref import WeakSet

import grpc
import grpc.aio

from engram_client._payload import CHUNKS, REPLIES, Reply
from engram_client._proto import engram_pb2 as pb
from engram_server import lookup, wire
from engram_server.clients import client_name
from engram_server.fetch import Fetcher
from engram_server.generation import Generation
from engram_server.limits import Limits
from engram_server.lookup import InvalidRequestError, Plan
from engram_server.metrics import LookupMetrics
from engram_server.recorder import Recorder, RecordOptions
from engram_server.status import status_of, trailers_of
from engram_server.stream import ClientGoneError, DrainingError, ReplyStream
from engram_server.terms import Terms, UnsupportedError

log = logging.getLogger("engram_server")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Engram"].full_name

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class EngramService:
    """Answers lookups. Make it on the event loop that serves; `register` it with a server."""

    def __init__(self, generation: Generation, limits: Limits, metrics: LookupMetrics) -> None:
        """generation: what requests are answered from, started; metrics: where lookups are counted."""
        self.generation = generation
        """What requests that begin now are answered from."""
        self._limits = limits
        self._metrics = metrics
        self.server_id = secrets.token_hex(16)
        self._shared_memory: pb.SharedMemoryInfo | None = None
        self._streams: WeakSet[ReplyStream] = WeakSet()

    def turn_over(self, generation: Generation) -> None:
        """Answer requests that begin from now on from these tables; a trace goes on if they hold the same rows."""
        recorder = self.generation.fetcher.recorder
        if recorder is not None and _digests(generation) != _digests(self.generation):
            log.warning("the trace ends here: it is of other tables than those that are served from now on")
            recorder.leave()
            recorder = None
        generation.fetcher.recorder = recorder
        self.generation = generation

    def advertise(self, shared_memory: pb.SharedMemoryInfo) -> None:
        """Say in Describe where clients on this host find the shared-memory channel."""
        self._shared_memory = shared_memory

    async def record(self, options: RecordOptions) -> Recorder:
        """Begin a trace of all lookups that come from now on; close it after them. Raises ServeError."""
        description = wire.describe(self.generation.memory, self._limits, self.server_id)
        recorder = self.generation.fetcher.recorder = await Recorder.open(options, description)
        return recorder

    def register(self, server: grpc.aio.Server) -> None:
        """What the generated add_EngramServicer_to_server does, but with a parser of ours for requests, and payloads
        that are spliced into replies."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self.Describe,
                request_deserializer=pb.DescribeRequest.FromString,
                response_serializer=pb.DescribeReply.SerializeToString,
            ),
            "Lookup": grpc.unary_unary_rpc_method_handler(
                self.Lookup,
                request_deserializer=wire.parse_request,
                response_serializer=REPLIES.serialize,
            ),
            "LookupStream": grpc.stream_stream_rpc_method_handler(
                self.LookupStream,
                request_deserializer=wire.parse_request,
                response_serializer=CHUNKS.serialize,
            ),
            "Prefetch": grpc.unary_unary_rpc_method_handler(
                self.Prefetch,
                request_deserializer=wire.parse_request,
                response_serializer=pb.PrefetchReply.SerializeToString,
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeReply:  # noqa: N802
        """What is served, as of now."""
        return wire.describe(self.generation.memory, self._limits, self.server_id, self._shared_memory)

    async def Lookup(self, received: wire.Received, context: Context) -> Reply:  # noqa: N802
        """One request, one reply of bounded size."""
        began = time.perf_counter()
        meter = self._metrics.of(context.peer(), "Lookup", context.invocation_metadata)
        try:
            request = wire.well_formed(received)
            fetcher = self.generation.fetcher
            admission = await fetcher.admit(request, client_name(context), context.time_remaining())
            try:
                plan = await fetcher.plan(request, admission)
                reply = await self._reply(fetcher, request.request_id, plan, admission.terms)
            finally:
                fetcher.release(admission)
            meter.done(admission.terms, plan.shape.format, began, reply.message.stats)
            return reply
        except asyncio.CancelledError:
            meter.failed(grpc.StatusCode.CANCELLED, began)
            raise
        except Exception as error:
            code, text = status_of(error)
            trailers = trailers_of(error)
            meter.failed(code, began)
        await context.abort(code, text, trailers)
        raise AssertionError("abort raises")

    async def LookupStream(  # noqa: N802
        self, requests: AsyncIterator[wire.Received], context: Context
    ) -> None:
        """Many requests, their replies in order and in chunks."""
        stream = ReplyStream(
            lambda: self.generation.fetcher,
            self._limits,
            requests,
            context.write,
            self._metrics.of(context.peer(), "LookupStream", context.invocation_metadata),
            client_name(context),
            call_left_s=context.time_remaining,
        )
        self._streams.add(stream)
        try:
            with suppress(ClientGoneError):
                await stream.run()
        except DrainingError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def Prefetch(self, received: wire.Received, context: Context) -> pb.PrefetchReply:  # noqa: N802
        """Queue a request's rows for the cache; they are read after this has answered."""
        began = time.perf_counter()
        spans = self._metrics.spans_of(context.peer(), "Prefetch", context.invocation_metadata)
        try:
            message = wire.well_formed(received)
            generation = self.generation
            if not generation.memory.has_cache:
                raise UnsupportedError(
                    "there is no row cache here to fetch rows into: start the server with --cache-bytes"
                )
            admission = await generation.fetcher.admit(message, client_name(context))
            try:
                request, blocks = await generation.fetcher.plan_prefetch(message, admission)
                generation.prefetcher.start(blocks, admission.terms.deadline)
            finally:
                generation.fetcher.release(admission)
            if spans is not None:
                spans.ended(began, {"engram.rows": request.rows, "engram.groups": request.groups})
            return pb.PrefetchReply(
                request_id=message.request_id,
                rows=request.rows,
                groups=request.groups,
                queued_rows=generation.prefetcher.queued_rows,
            )
        except Exception as error:
            code, text = status_of(error)
            trailers = trailers_of(error)
            if spans is not None:
                spans.ended(began, {}, code)
        await context.abort(code, text, trailers)
        raise AssertionError("abort raises")

    def drain(self) -> None:
        """End every stream as soon as the requests it has taken are replied to."""
        for stream in self._streams:
            stream.drain()

    async def _reply(self, fetcher: Fetcher, request_id: int, plan: Plan, terms: Terms) -> Reply:
        if plan.shape.payload_bytes > self._limits.unary_reply_bytes:
            raise InvalidRequestError(
                f"the answer has {plan.shape.payload_bytes} bytes, over the "
                f"{self._limits.unary_reply_bytes} that Lookup may send: use LookupStream"
            )
        parts: list[bytes | memoryview] = []
        totals = lookup.NO_STATS
        for block in plan.blocks:
            if hits := fetcher.hits(block, plan.shape.format, terms):
                parts.append(hits.payload)
                totals = lookup.add_stats(totals, hits.stats)
                continue
            batch = await fetcher.submit(block, terms, patient=bool(parts))
            await fetcher.rows_read(batch, terms)
            parts.append(await fetcher.gather(batch, block, 0, block.items, plan.shape.format, terms))
            totals = lookup.add_stats(totals, batch.stats)
        parts.extend(wire.inverse_bytes(plan))
        reply = pb.LookupReply(
            request_id=request_id,
            shape=wire.shape_message(plan),
            mask=wire.mask_bytes(plan.request),
            stats=wire.stats_message(plan, totals),
        )
        return Reply(reply, parts[0] if len(parts) == 1 else b"".join(parts))


def _digests(generation: Generation) -> tuple[object, ...]:
    """What a client relies on."""
    memory = generation.memory
    return [table.digest for table in memory.tables.values()], memory.hash_digest
