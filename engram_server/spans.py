"""OpenTelemetry spans of lookups over gRPC: `serve --otlp`, with the extra `otel`. Nothing of it is imported otherwise.

A span is made when its lookup is over, from what was counted for it anyway, and sent by a thread of its own. What it
belongs to is in the metadata of the call (`traceparent`, as W3C's Trace Context has it). It names no token and no row.
Standard variables of the exporter (OTEL_EXPORTER_OTLP_HEADERS, ..._CERTIFICATE, OTEL_RESOURCE_ATTRIBUTES,
OTEL_SERVICE_NAME) are obeyed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import grpc

import engram_server
from engram_client._proto import engram_pb2 as pb
from engram_server.sockets import ServeError

if TYPE_CHECKING:
    from opentelemetry.context import Context

_SERVICE = pb.DESCRIPTOR.services_by_name["Engram"].full_name
_EXPORT_S = 5.0
"""How long an export may take: at the end, the server waits for the last one."""
_PARENT = ("traceparent", "tracestate")
_FAULTS = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
)
"""Errors of a server's span by OpenTelemetry's conventions for gRPC; others are the client's."""


@dataclass(frozen=True)
class SpanOptions:
    """Where spans go, and of how many lookups."""

    url: str
    """Of an OTLP receiver over gRPC: http://HOST:PORT, or https:// for TLS."""
    ratio: float = 1.0
    """Of the lookups that belong to no span of their client; others have one if their client's is sampled."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port is not None
        except ValueError:  # a port that is no number
            known = False
        if not known:
            raise ValueError(
                f"cannot send spans to {self.url!r}: expected a URL such as http://127.0.0.1:4317"
            )
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"the ratio of lookups with a span is {self.ratio}; expected 0 to 1")


class SpanSender:
    """Makes spans and sends them. Safe to share between threads."""

    def __init__(self, options: SpanOptions) -> None:
        """Raises ServeError when the extra is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ServeError(f"--otlp needs OpenTelemetry: install engram-server[otel] ({error})") from error
        facts = {"service.version": engram_server.__version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            facts["service.name"] = "engram-server"
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(options.ratio)), resource=Resource.create(facts)
        )
        exporter = OTLPSpanExporter(
            endpoint=options.url, insecure=options.url.startswith("http://"), timeout=_EXPORT_S
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("engram_server", engram_server.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def call(self, method: str, peer: str, metadata: Iterable[tuple[str, str | bytes]] | None) -> CallSpans:
        """For the lookups of one call; peer and metadata as gRPC has them."""
        carrier = {key: value for key, value in metadata or () if key in _PARENT and isinstance(value, str)}
        return CallSpans(self, method, peer, self._propagator.extract(carrier))

    def span(
        self,
        parent: Context,
        method: str,
        began_ns: int,
        attributes: Mapping[str, str | int],
        code: grpc.StatusCode,
    ) -> None:
        """Of what began then, and is over now; in ns since 1970."""
        from opentelemetry.trace import SpanKind, StatusCode

        span = self._tracer.start_span(
            f"{_SERVICE}/{method}",
            parent,
            SpanKind.SERVER,
            {
                "rpc.system": "grpc",
                "rpc.service": _SERVICE,
                "rpc.method": method,
                "rpc.grpc.status_code": code.value[0],
                **attributes,
            },
            start_time=began_ns,
        )
        if code in _FAULTS:
            span.set_status(StatusCode.ERROR, code.name)
        span.end()

    async def close(self) -> None:
        """Send what has not been sent, if the receiver takes it now."""
        await asyncio.to_thread(self._provider.shutdown)


class CallSpans:
    """What the lookups of one call belong to."""

    def __init__(self, sender: SpanSender, method: str, peer: str, parent: Context) -> None:
        self._sender = sender
        self._method = method
        self._peer = peer
        self._parent = parent

    def ended(
        self,
        began: float,
        attributes: Mapping[str, str | int],
        code: grpc.StatusCode = grpc.StatusCode.OK,
    ) -> None:
        """A lookup, or what else the call asked for, is over; `began` on the clock of time.perf_counter()."""
        began_ns = time.time_ns() - int((time.perf_counter() - began) * 1e9)
        client = {"client.address": self._peer}
        self._sender.span(self._parent, self._method, began_ns, client | dict(attributes), code)


def attributes_of(stats: pb.LookupStats) -> dict[str, str | int]:
    """Its numbers, by their names."""
    return {f"engram.{field.name}": getattr(stats, field.name) for field in stats.DESCRIPTOR.fields}
