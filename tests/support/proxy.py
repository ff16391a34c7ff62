"""A server in front of a server: it passes everything on as it is, counts what the answers say they cost, and can be
slow, stall or refuse."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from engram_client._proto import engram_pb2 as pb

_STATS = [field.name for field in pb.LookupStats.DESCRIPTOR.fields]
_METHODS = {"Describe": False, "Lookup": False, "LookupStream": True}


class Proxy:
    """What it has seen, and how it behaves."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """Sums of LookupStats over all answers, and `requests`."""
        self.requests: list[pb.LookupRequest] = []
        self.service_s = 0.0
        """One lookup at a time, each of which takes so long: a server of that capacity."""
        self.stall: tuple[int, float] | None = None
        """Lookup number n takes so many seconds, and the others wait for it."""
        self.refuse_every = 0
        self.room: int | None = None
        """Lookups that may be here at once, each for 20 ms at least; more are refused."""
        self._inside = 0
        self._one = threading.Lock()
        self._lookups = 0

    def saw(self, request: bytes, context: grpc.ServicerContext) -> None:
        """A lookup came."""
        if self.room is not None:
            self._wait_in_the_room(self.room, context)
        with self._one:
            self._lookups += 1
            self.requests.append(pb.LookupRequest.FromString(request))
            if self.refuse_every and self._lookups % self.refuse_every == 0:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "planted: there is no room")
            if self.stall is not None and self._lookups == self.stall[0]:
                time.sleep(self.stall[1])
            time.sleep(self.service_s)

    def _wait_in_the_room(self, room: int, context: grpc.ServicerContext) -> None:
        with self._one:
            self._inside += 1
            full = self._inside > room
        try:
            if full:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "planted: the room is full")
            time.sleep(0.02)
        finally:
            with self._one:
                self._inside -= 1

    def answered(self, stats: pb.LookupStats) -> None:
        """It was answered."""
        with self._one:
            self.counts["requests"] += 1
            self.counts.update({name: getattr(stats, name) for name in _STATS})


@contextmanager
def proxied(target: str) -> Iterator[tuple[str, Proxy]]:
    """(target of a proxy, the proxy) in front of a target."""
    proxy = Proxy()
    channel = grpc.insecure_channel(target, options=[("grpc.max_receive_message_length", -1)])

    def unary(name: str) -> Any:
        call = channel.unary_unary(f"/engram.v1.Engram/{name}")

        def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
            if name == "Lookup":
                proxy.saw(request, context)
            reply: bytes = call(request)
            if name == "Lookup":
                proxy.answered(pb.LookupReply.FromString(reply).stats)
            return reply

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(name: str) -> Any:
        call = channel.stream_stream(f"/engram.v1.Engram/{name}")

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            def seen() -> Iterator[bytes]:
                for request in requests:
                    proxy.saw(request, context)
                    yield request

            for reply in call(seen()):
                chunk = pb.LookupChunk.FromString(reply)
                if chunk.last:
                    proxy.answered(chunk.stats)
                yield reply

        return grpc.stream_stream_rpc_method_handler(handle)

    handlers = {name: (stream if streamed else unary)(name) for name, streamed in _METHODS.items()}
    server = grpc.server(
        futures.ThreadPoolExecutor(128),
        options=[("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)],
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("engram.v1.Engram", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", proxy
    finally:
        server.stop(None).wait()
        channel.close()
