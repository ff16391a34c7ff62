"""The life of a server process: open the tables, prove they can be read, bind, serve, drain.

    open (and test read) -> bind -> SERVING -> (SIGTERM, SIGINT) -> NOT_SERVING, drain -> close

Nothing is bound before a row was read, so a server that can be reached can answer.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import engram_server
from engram_server.device import DeviceConverter, check_name, open_converter
from engram_server.hotset_keeper import HotSetKeeper
from engram_server.http import HttpServer
from engram_server.limits import Limits
from engram_server.memory import Memory, MemoryOptions
from engram_server.metrics import MemoryCollector, ServerMetrics
from engram_server.recorder import RecordOptions
from engram_server.service import SERVICE_NAME, EngramService
from engram_server.shared_memory import SharedMemoryChannel, SharedMemoryOptions, open_channel
from engram_server.sockets import ServeError, make_way
from engram_server.systemd import notify

log = logging.getLogger("engram_server")

DEFAULT_LISTEN = "127.0.0.1:50051"

_WATCH_S = 1.0
"""Between two looks at the table files."""
_LOAD_POLL_S = 0.2
_STILL_S = 30.0
"""An event loop that has not run for so long will not run again."""


@dataclass(frozen=True)
class ServeOptions:
    """What to serve and where."""

    path: Path
    """A checkpoint directory, or one of its shards."""
    listen: str | None = DEFAULT_LISTEN
    """HOST:PORT; port 0 takes a free one. None: no TCP."""
    uds: Path | None = None
    """UNIX socket to listen on as well."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    limits: Limits = field(default_factory=Limits)
    shared_memory: SharedMemoryOptions = field(default_factory=SharedMemoryOptions)
    record: RecordOptions | None = None
    """A trace of all lookups that come over gRPC."""
    grace_s: float = 10.0
    """How long calls under way may take to finish after SIGTERM. A second signal ends them at once."""
    device: str = "cpu"
    """What makes bf16 of packed rows: cpu, cuda or cuda:N."""
    metrics: str | None = None
    """HOST:PORT for /metrics, /healthz and /readyz over HTTP; port 0 takes a free one. None: none."""
    keepalive_s: float = 60.0
    """A connection silent for this long is asked whether its client is still there."""


def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns 0 after a clean drain.

    Prints one line to stdout when ready. Raises ServeError, DeviceError, and what Memory.open raises.
    """
    check_name(options.device)
    options = replace(options, shared_memory=_shared_memory(options))
    # The tables outlive the loop: only when its last task has dropped its rows is there nothing to wait for.
    claims = options.shared_memory.claims()
    with Memory.open(options.path, options.memory, claims) as memory, ExitStack() as closing:
        converter = open_converter(options.device, {table.kind for table in memory.tables.values()})
        memory.engine.populate_cache()
        keeper = None
        if options.memory.hot_set is not None:
            keeper = HotSetKeeper(memory, options.memory.hot_set)
            closing.callback(keeper.close)
        asyncio.run(_serve(options, memory, keeper, converter))
    log.info("stopped")
    return 0


async def _serve(
    options: ServeOptions, memory: Memory, keeper: HotSetKeeper | None, converter: DeviceConverter | None
) -> None:
    stop = _stop_signals()
    async with AsyncExitStack() as closing:
        server = grpc.aio.server(
            options=_channel_options(options), maximum_concurrent_rpcs=options.limits.concurrent_rpcs
        )
        status = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        metrics = ServerMetrics(memory)
        health_state = _Health(status, metrics.server)
        service = EngramService(memory, options.limits, health_state.damaged, converter, metrics.lookups)
        closing.callback(service.close)
        service.register(server)
        addresses = _bind(server, options)
        if options.record is not None:
            closing.push_async_callback((await service.record(options.record)).close)
        channel = open_channel(
            memory,
            options.limits,
            options.shared_memory,
            uds=options.uds,
            port=_port_of(options, addresses),
            server_id=service.server_id,
        )
        if channel is not None:
            closing.callback(channel.close)
            service.advertise(channel.info())
            metrics.server.channel = channel
        http = None
        if options.metrics is not None:
            http = HttpServer(
                options.metrics, metrics.registry, health_state.not_alive, health_state.not_ready
            )
            closing.callback(http.close)
        await server.start()
        await health_state.serving()
        print(_ready_line(options, memory, addresses, channel, http), flush=True)
        loading = asyncio.create_task(_log_loading(memory))
        watching = asyncio.create_task(_watch(memory, channel, health_state))
        for task in (loading, watching):
            closing.callback(task.cancel)
        if keeper is not None:
            keeper.start()

        await stop.wait()
        log.info("draining: calls under way have %.0f s to finish", options.grace_s)
        stop.clear()
        await health_state.draining()
        service.drain()
        drained = asyncio.create_task(_drained(server, channel, options.grace_s))
        impatient = asyncio.create_task(stop.wait())
        await asyncio.wait({drained, impatient}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            await server.stop(0)
        impatient.cancel()
        await drained


def _shared_memory(options: ServeOptions) -> SharedMemoryOptions:
    """What was asked for, unless a trace would miss what nobody asked for by name: lookups pass no Python there."""
    chosen = options.shared_memory
    if options.record is None or chosen.socket is None:
        return chosen
    if chosen.socket == "auto":
        log.info("no shared memory while lookups are recorded: what goes through it is not seen")
        return replace(chosen, socket=None)
    log.warning("lookups through shared memory at %s are not recorded", chosen.socket)
    return chosen


def _stop_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _log_loading(memory: Memory) -> None:
    """Say how far tables or scales are on their way into memory, each tenth of it, and how it ended."""
    what = memory.loads
    if not what:
        return
    began, tenth = time.monotonic(), 1
    while True:
        loaded, rows, error = memory.load_progress()
        if error:
            log.error("%s stay on disk from %.0f %% on: %s", what, 100 * loaded / rows, error)
            return
        if loaded == rows:
            log.info("%s are in memory after %.1f s", what, time.monotonic() - began)
            return
        if loaded * 10 >= rows * tenth:
            log.info("%s: %.0f %% in memory", what, 100 * loaded / rows)
            tenth = loaded * 10 // rows + 1
        await asyncio.sleep(_LOAD_POLL_S)


async def _drained(server: grpc.aio.Server, channel: SharedMemoryChannel | None, grace_s: float) -> None:
    stopped = asyncio.create_task(server.stop(grace_s))
    if channel is not None:
        await channel.drain(grace_s)
    await stopped


async def _watch(memory: Memory, channel: SharedMemoryChannel | None, health_state: _Health) -> None:
    """Report the first change of a table file, also when nobody asks for its rows, and what native threads saw."""
    fault = ""
    while True:
        health_state.beat()
        try:
            damage = "" if channel is None else channel.look()
            if change := memory.reader.change() or damage:
                health_state.damaged(change)
        except Exception as error:  # and go on: who asks whether the loop runs must hear that it does
            if repr(error) != fault:
                fault = repr(error)
                log.error("the table files could not be looked at: %s", fault)
        await asyncio.sleep(_WATCH_S)


async def _set_status(status: health.aio.HealthServicer, state: int) -> None:
    for service in (health.OVERALL_HEALTH, SERVICE_NAME):
        await status.set(service, state)


class _Health:
    """What gRPC's health service, HTTP's probes and `engram_ready` say."""

    def __init__(self, status: health.aio.HealthServicer, collector: MemoryCollector) -> None:
        self._status = status
        self._collector = collector
        self._trouble = "it is starting"
        self._damaged: asyncio.Task[None] | None = None
        self._beat = time.monotonic()

    async def serving(self) -> None:
        """Tables are open, a row was read, addresses are bound."""
        notify("READY=1")
        if self._damaged is not None:  # by now
            return
        await _set_status(self._status, health_pb2.HealthCheckResponse.SERVING)
        self._say("")

    async def draining(self) -> None:
        """No new requests, please."""
        notify("STOPPING=1")
        self._say("it is shutting down")
        await self._status.enter_graceful_shutdown()

    def damaged(self, sentence: str) -> None:
        """A table can no longer be trusted to be whole. Lookups go on failing closed."""
        if self._damaged is None:
            log.critical("health is NOT_SERVING from now on, restart with a whole table: %s", sentence)
            state = health_pb2.HealthCheckResponse.NOT_SERVING
            self._damaged = asyncio.create_task(_set_status(self._status, state))
            self._say(sentence)

    def beat(self) -> None:
        """The event loop runs."""
        notify("WATCHDOG=1")
        self._beat = time.monotonic()

    def not_ready(self) -> str:
        """Why no lookups should come; from any thread."""
        return self._trouble

    def not_alive(self) -> str:
        """Why only a restart helps; from any thread."""
        still_s = time.monotonic() - self._beat
        return f"its event loop has not run for {still_s:.0f} s" if still_s > _STILL_S else ""

    def _say(self, trouble: str) -> None:
        self._trouble = trouble
        self._collector.ready = not trouble


# ------------------------------------------------------------------------------------------------- binding


def _channel_options(options: ServeOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", options.limits.message_bytes),
        ("grpc.max_send_message_length", options.limits.message_bytes),
        # Two servers on one port would share its connections at random; the second must fail instead.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Clients ask too; gRPC would take more than one question in five minutes for an attack.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ]


def _bind(server: grpc.aio.Server, options: ServeOptions) -> list[str]:
    """Bind every address asked for; returns them as clients would name them."""
    if options.listen is None and options.uds is None:
        raise ServeError("there is nothing to listen on: give an address, a UNIX socket or both")
    addresses = []
    if options.listen is not None:
        host, _, port = options.listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise ServeError(
                f"cannot listen on {options.listen!r}: expected HOST:PORT, such as {DEFAULT_LISTEN}"
            )
        try:
            bound = server.add_insecure_port(options.listen)
        except RuntimeError as error:
            raise ServeError(f"cannot listen on {options.listen}: {_bind_reason(host, int(port))}") from error
        addresses.append(f"{host}:{bound}")
    if options.uds is not None:
        if odd := sorted(set(str(options.uds)) & set("%?#")):
            raise ServeError(
                f"cannot listen on the UNIX socket {options.uds}: gRPC reads {' and '.join(odd)} as parts of a URI; "
                "choose another path"
            )
        make_way(options.uds, socket.SOCK_STREAM)
        target = f"unix:{options.uds}"
        try:
            server.add_insecure_port(target)
        except RuntimeError as error:
            raise ServeError(f"cannot listen on the UNIX socket {options.uds}: {error}") from error
        addresses.append(target)
    return addresses


def _bind_reason(host: str, port: int) -> str:
    """gRPC keeps the reason to itself; ask the system."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "the address could not be bound"


def _port_of(options: ServeOptions, addresses: list[str]) -> int | None:
    """The TCP port that was bound."""
    return None if options.listen is None else int(addresses[0].rpartition(":")[2])


def _ready_line(
    options: ServeOptions,
    memory: Memory,
    addresses: list[str],
    channel: SharedMemoryChannel | None,
    http: HttpServer | None,
) -> str:
    tables = ", ".join(
        f"layer {layer} {table.kind.name.lower()} {table.rows:,} rows"
        for layer, table in memory.tables.items()
    )
    reader, scales = memory.reader, memory.scale_decision
    cache_bytes = memory.cache_state().capacity_bytes
    kept = f"cache {cache_bytes / (1 << 20):,.0f} MiB" if cache_bytes else "no cache"
    return (
        f"engram-server {engram_server.__version__} serves {options.path} on {' and '.join(addresses)}: "
        f"{tables}; backend {reader.backend} ({reader.reason}); scales {scales.mode} ({scales.reason}); "
        + ("tables load into memory" if memory.options.resident else kept)
        + ("; no shared memory" if channel is None else f"; shared memory at {channel.path}")
        + ("" if http is None else f"; metrics at http://{http.address}/metrics")
        + ("" if options.record is None else f"; recording to {options.record.path}")
    )
