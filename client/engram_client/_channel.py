"""gRPC channels, and what is known about the servers behind them."""

from __future__ import annotations

from typing import Any

import grpc

from engram_client._config import Limits, Timeouts
from engram_client._credentials import Bearer, Credentials
from engram_client._description import Description
from engram_client._errors import MismatchError
from engram_client._payload import CHUNKS, REPLIES
from engram_client._proto import engram_pb2 as pb
from engram_client._proto import engram_pb2_grpc as pb_grpc


def channel_options(limits: Limits, timeouts: Timeouts) -> list[tuple[str, int]]:
    """For sync and async channels alike."""
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        # Checked before sending, with a better sentence than gRPC has.
        ("grpc.max_send_message_length", -1),
        # Rows come from a machine of ours: a proxy meant for the web has no place in between.
        ("grpc.enable_http_proxy", 0),
        # gRPC would wait up to two minutes between attempts to reconnect; a restart takes seconds.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
        # Also how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", int(timeouts.connect_s * 1000)),
        ("grpc.keepalive_time_ms", int(timeouts.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeouts.keepalive_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(timeouts.keepalive_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # 0 = as many as it takes
        # Clients must not share the back-off of another client's dead connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def open_channel(target: str, options: list[tuple[str, int]], credentials: Credentials) -> grpc.Channel:
    """For threads. Raises OSError for certificates that cannot be read."""
    tls = None if target.startswith("unix:") else credentials.channel()
    if tls is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, tls, options=options)


def open_aio_channel(
    target: str, options: list[tuple[str, int]], credentials: Credentials
) -> grpc.aio.Channel:
    """For asyncio."""
    tls = None if target.startswith("unix:") else credentials.channel()
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls, options=options)


def stub(channel: grpc.Channel | grpc.aio.Channel, bearer: Bearer | None) -> Any:
    """The methods of the service, where lookups answer with a Chunk or a Reply, and calls bring a token."""
    methods: Any = pb_grpc.EngramStub(channel)  # type: ignore[no-untyped-call]
    serialize = pb.LookupRequest.SerializeToString
    name = f"/{pb.DESCRIPTOR.services_by_name['Engram'].full_name}/"
    methods.Lookup = channel.unary_unary(f"{name}Lookup", serialize, REPLIES.parse)
    methods.LookupStream = channel.stream_stream(f"{name}LookupStream", serialize, CHUNKS.parse)
    return methods if bearer is None else _Bearing(methods, bearer)


class _Bearing:
    """The methods of a stub, each call with a token."""

    def __init__(self, methods: Any, bearer: Bearer) -> None:
        for name in ("Describe", "Lookup", "LookupStream", "Prefetch"):
            setattr(self, name, _bearing(getattr(methods, name), bearer))


def _bearing(method: Any, bearer: Bearer) -> Any:
    def call(request: Any, timeout: float | None = None, wait_for_ready: bool | None = None) -> Any:
        return method(request, timeout=timeout, metadata=bearer.metadata(), wait_for_ready=wait_for_ready)

    return call


class Identity:
    """What the first server a client met serves: all that follow, restarted ones too, must serve the same."""

    def __init__(self) -> None:
        self._first: Description | None = None
        self._first_target = ""

    def check(self, description: Description, target: str) -> Description:
        """Raises MismatchError naming what differs."""
        if self._first is None:
            self._first, self._first_target = description, target
            return description
        ours, theirs = self._first.identity(), description.identity()
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                raise MismatchError(
                    f"the digest of its {name} is {theirs.get(name, b'').hex() or '(none)'}, but at "
                    f"{self._first_target} it was {ours.get(name, b'').hex() or '(none)'}: they serve "
                    "different rows; make a new client if that is intended",
                    target=target,
                )
        return description
