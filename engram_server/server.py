"""The life of a server process: open the tables, prove they can be read, bind, serve, drain.

    open (and test read) -> bind -> SERVING -> (SIGTERM, SIGINT) -> NOT_SERVING, drain -> close
                                    └─ SIGHUP: open anew beside, turn over

Nothing is bound before a row was read, so a server that can be reached can answer.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import engram_server
from engram_server.admin import AdminServer
from engram_server.device import check_name
from engram_server.generation import Generation, Tables
from engram_server.health import Health
from engram_server.http import HttpServer
from engram_server.limits import Limits
from engram_server.memory import Memory, MemoryOptions
from engram_server.metrics import ServerMetrics
from engram_server.recorder import RecordOptions
from engram_server.refusals import Refusals
from engram_server.reload import Reloader
from engram_server.security import Security, SecurityOptions
from engram_server.service import SERVICE_NAME, EngramService
from engram_server.shared_memory import SharedMemoryChannel, SharedMemoryOptions, open_channel
from engram_server.sockets import ServeError, make_way, open_to_group
from engram_server.spans import SpanOptions, SpanSender
from engram_server.systemd import notify
from engram_server.watching import beat, log_loading, watch_tables

log = logging.getLogger("engram_server")

DEFAULT_LISTEN = "127.0.0.1:50051"

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAVE_S = 30.0
"""How long signals are not heeded while the hot set is saved: a disk takes seconds, and one that hangs would keep the
process for ever."""


@dataclass(frozen=True)
class ServeOptions:
    """What to serve and where."""

    path: Path
    """A checkpoint directory, or one of its shards."""
    listen: str | None = DEFAULT_LISTEN
    """HOST:PORT; port 0 takes a free one. None: no TCP."""
    uds: Path | None = None
    """UNIX socket to listen on as well."""
    uds_group: str | None = None
    """Members of this group, by its name or number, may connect to it. None: as the umask has it."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    limits: Limits = field(default_factory=Limits)
    shared_memory: SharedMemoryOptions = field(default_factory=SharedMemoryOptions)
    record: RecordOptions | None = None
    """A trace of all lookups."""
    drain_s: float = 10.0
    """How long calls under way may take to finish after SIGTERM. A second signal ends them at once."""
    device: str = "cpu"
    """What makes bf16 of packed rows: cpu, cuda or cuda:N."""
    metrics: str | None = None
    """HOST:PORT for /metrics, /healthz and /readyz over HTTP; port 0 takes a free one. None: none."""
    security: SecurityOptions = field(default_factory=SecurityOptions)
    """What callers over TCP must bring."""
    admin: Path | None = None
    """UNIX socket for the administrator. None: none."""
    spans: SpanOptions | None = None
    """OpenTelemetry spans of lookups over gRPC."""
    keepalive_s: float = 60.0
    """A connection silent for this long is asked whether its client is still there."""
    idle_s: float = 3600.0
    """A connection without a call for this long is closed. Clients on gRPC's C core, ours among them, hang up by
    themselves after half of it (`grpc.client_idle_timeout_ms`), and connect anew for their next call."""


def serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns 0 after a clean drain.

    Prints one line to stdout when ready. Raises ServeError, DeviceError, and what Memory.open raises.
    """
    check_name(options.device)
    security = Security(options.security, Refusals())
    # Until tables are open there is nothing to reload, nor a reason to die of being asked to.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    claims = options.shared_memory.claims()
    tables = Tables(
        lambda: Generation.open(options.path, options.memory, options.device, claims), options.drain_s
    )
    # The tables outlive the loop: only when its last task has dropped its rows is there nothing to wait for.
    with closing(tables):
        asyncio.run(_serve(options, tables, security))
    log.info("stopped")
    return 0


async def _serve(options: ServeOptions, tables: Tables, security: Security) -> None:
    stop = _stop_signals()
    async with AsyncExitStack() as stack:
        server = grpc.aio.server(
            interceptors=security.interceptors(),
            options=_channel_options(options),
            maximum_concurrent_rpcs=options.limits.concurrent_rpcs,
        )
        status = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(status, server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        condition = Health(status, (health.OVERALL_HEALTH, SERVICE_NAME))
        metrics = ServerMetrics(tables.current.memory, condition.not_ready, tables.current.converter)
        if options.spans is not None:
            metrics.lookups.spans = SpanSender(options.spans)
            stack.push_async_callback(metrics.lookups.spans.close)

        def start(generation: Generation) -> None:
            generation.start(options.limits, _on_damage(tables, generation.memory, condition))

        start(tables.current)
        stack.push_async_callback(_save_hot_set, tables)
        stack.callback(lambda: tables.current.stop())
        stack.push_async_callback(tables.retired)
        service = EngramService(tables.current, options.limits, metrics.lookups)
        metrics.registry.register(security.refusals)
        if security.certificates is not None:
            metrics.registry.register(security.certificates)
        service.register(server)
        addresses = _bind(server, options, security)
        recorder = None
        if options.record is not None:
            recorder = await service.record(options.record)
            stack.push_async_callback(recorder.close)
        channel = open_channel(
            tables.current.memory,
            options.limits,
            options.shared_memory,
            uds=options.uds,
            port=_port_of(options, addresses),
            server_id=service.server_id,
        )
        if channel is not None:
            stack.callback(channel.close)
            service.advertise(channel.info())
            metrics.server.channel = channel
            if recorder is not None:
                recorder.follow(channel)
            security.refusals.strangers = lambda: channel.counts()["strangers"]

        def turn_over(generation: Generation) -> None:
            service.turn_over(generation)
            if channel is not None:
                channel.reopen(generation.memory)
            metrics.server.reopened(generation.memory, generation.converter)
            condition.serving()

        async def settled() -> None:
            if channel is not None:
                await channel.settled()

        def trusted() -> bool:
            return not condition.not_ready()

        reloader = Reloader(
            [security.reload, lambda: tables.reopen(start, turn_over, settled, trusted)], metrics.reloads
        )
        stack.push_async_callback(reloader.close)
        stack.callback(_ignore_hang_ups)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
        http = None
        if options.metrics is not None:
            http = HttpServer(
                options.metrics,
                metrics.registry,
                condition.not_alive,
                condition.not_ready,
                security.refusals,
            )
            stack.callback(http.close)
        if options.admin is not None:
            admin = AdminServer(
                options.admin,
                reloader.reload,
                lambda: _status(options, tables.current.memory, addresses, condition, security),
                security.refusals,
            )
            stack.callback(admin.close)
        condition.serving()
        await server.start()
        notify("READY=1")
        print(_ready_line(options, tables.current.memory, addresses, channel, http, security), flush=True)
        for watch in (
            log_loading(tables),
            beat(condition),
            watch_tables(tables, channel, condition, metrics.server),
            security.watch(),
        ):
            stack.callback(asyncio.create_task(watch).cancel)
        tables.current.keep_hot_set()

        await stop.wait()
        log.info("draining: calls under way have %.0f s to finish", options.drain_s)
        stop.clear()
        reloader.stop()
        await condition.draining()
        service.drain()
        drained = asyncio.create_task(_drained(server, channel, options.drain_s))
        impatient = asyncio.create_task(stop.wait())
        await asyncio.wait({drained, impatient}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            await server.stop(0)
        impatient.cancel()
        await drained


def _on_damage(tables: Tables, memory: Memory, condition: Health) -> Callable[[str], None]:
    """What lookups of these tables find is of no concern once others are served."""

    def damaged(sentence: str) -> None:
        if tables.current.memory is memory:
            condition.damaged(sentence)

    return damaged


def _stop_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    return stop


def _ignore_hang_ups() -> None:
    """Until the process is gone: what the loop leaves behind would end it, before tables are closed and the hot set is
    saved."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


async def _save_hot_set(tables: Tables) -> None:
    """While the loop's handlers are there: a signal is for what can be given up, and from here on ends the process."""
    saving = asyncio.create_task(asyncio.to_thread(tables.current.leave_hot_set))
    await asyncio.wait({saving}, timeout=_SAVE_S)
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.remove_signal_handler(number)
    if not saving.done():
        log.warning(
            "the hot set takes more than %.0f s to save: a signal ends the server without it", _SAVE_S
        )


def _status(
    options: ServeOptions, memory: Memory, addresses: list[str], condition: Health, security: Security
) -> dict[str, Any]:
    """For the administrator."""
    return {
        "version": engram_server.__version__,
        "path": str(options.path),
        "addresses": addresses,
        "security": security.summary,
        "ready": not condition.not_ready(),
        "not_ready": condition.not_ready(),
        "backend": memory.reader.backend,
        "backend_reason": memory.reader.reason,
        "tables": [
            {
                "layer": layer,
                "kind": table.kind.name.lower(),
                "rows": table.rows,
                "digest": table.digest.hex(),
            }
            for layer, table in memory.tables.items()
        ],
    }


async def _drained(server: grpc.aio.Server, channel: SharedMemoryChannel | None, drain_s: float) -> None:
    stopped = asyncio.create_task(server.stop(drain_s))
    if channel is not None:
        await channel.drain(drain_s)
    await stopped


# ------------------------------------------------------------------------------------------------- binding


def _channel_options(options: ServeOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", options.limits.message_bytes),
        ("grpc.max_send_message_length", options.limits.message_bytes),
        # Two servers on one port would share its connections at random; the second must fail instead.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_connection_idle_ms", int(options.idle_s * 1000)),
        # Clients ask too; gRPC would take more than one question in five minutes for an attack.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ]


def _bind(server: grpc.aio.Server, options: ServeOptions, security: Security) -> list[str]:
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
            if security.certificates is None:
                bound = server.add_insecure_port(options.listen)
            else:
                bound = server.add_secure_port(options.listen, security.certificates.credentials())
        except RuntimeError as error:
            raise ServeError(f"cannot listen on {options.listen}: {_bind_reason(host, int(port))}") from error
        addresses.append(f"{host}:{bound}")
        security.warn_of(addresses[-1])
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
        if options.uds_group is not None:
            open_to_group(options.uds, options.uds_group)
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
    security: Security,
) -> str:
    return (
        f"engram-server {engram_server.__version__} serves {options.path} on {' and '.join(addresses)}: "
        + memory.summary()
        + ("; no shared memory" if channel is None else f"; shared memory at {channel.path}")
        + (f"; {security.summary} over TCP" if security.summary and options.listen is not None else "")
        + ("" if options.admin is None else f"; administered at {options.admin}")
        + ("" if http is None else f"; metrics at http://{http.address}/metrics")
        + ("" if options.record is None else f"; recording to {options.record.path}")
    )
