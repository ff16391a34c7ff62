"""What gRPC's health service, HTTP's probes and `engram_ready` say of a server."""

from __future__ import annotations

import asyncio
import logging
import time

from grpc_health.v1 import health, health_pb2

from engram_server.logs import ONE_BY_ONE
from engram_server.systemd import notify

log = logging.getLogger("engram_server")

_STILL_S = 30.0
"""An event loop that has not run for so long will not run again."""


class Health:
    """Why a server should get no lookups, if so. Belongs to the event loop that serves."""

    def __init__(self, status: health.aio.HealthServicer, services: tuple[str, ...]) -> None:
        """services: names that gRPC's health service is asked for."""
        self._status = status
        self._services = services
        self._trouble = "it is starting"
        self._draining = False
        self._beat = time.monotonic()
        self._telling: set[asyncio.Task[None]] = set()

    def serving(self) -> None:
        """Tables are open and a row of each was read: before the first lookup of these tables."""
        if not self._draining:
            self._trouble = ""
            self._tell()

    def damaged(self, sentence: str) -> None:
        """A table can no longer be trusted to be whole. Lookups go on failing closed."""
        if not self._trouble:
            log.critical(
                "health is NOT_SERVING until whole tables are opened, by SIGHUP or a restart: %s",
                sentence,
                extra=ONE_BY_ONE,
            )
            self._trouble = sentence
            self._tell()

    async def draining(self) -> None:
        """No new requests, please."""
        notify("STOPPING=1")
        self._draining = True
        self._trouble = "it is shutting down"
        await self._status.enter_graceful_shutdown()

    def beat(self) -> None:
        """The event loop runs."""
        notify("WATCHDOG=1")
        self._beat = time.monotonic()

    def not_ready(self) -> str:
        """Why no lookups should come, "" = they should; from any thread."""
        return self._trouble

    def not_alive(self) -> str:
        """Why only a restart helps; from any thread."""
        still_s = time.monotonic() - self._beat
        return f"its event loop has not run for {still_s:.0f} s" if still_s > _STILL_S else ""

    def _tell(self) -> None:
        task = asyncio.create_task(self._set_status())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _set_status(self) -> None:
        for service in self._services:
            states = health_pb2.HealthCheckResponse
            # As of now: in whatever order two of these tasks end, the last word is true.
            await self._status.set(service, states.NOT_SERVING if self._trouble else states.SERVING)
