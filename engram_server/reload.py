"""Taking up files anew while serving, by SIGHUP or as the admin asks: all that a server has opened, part by part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

from prometheus_client import Counter

from engram_server.logs import ONE_BY_ONE
from engram_server.run import is_operators, sentence_of

log = logging.getLogger("engram_server")

Part: TypeAlias = Callable[[], Awaitable[str]]
"""Opens its files anew and says what it has now, "" = it has none. On an error it goes on with those it had."""


class ReloadError(Exception):
    """What was not reloaded, and why, and what was: a line for each part."""


class Reloader:
    """Reloads parts one after another, one reload at a time. Belongs to the event loop that serves."""

    def __init__(self, parts: Sequence[Part], reloads: Counter) -> None:
        """reloads: by `result`, done or refused."""
        self._parts = parts
        self._reloads = reloads
        self._turn = asyncio.Lock()
        self._asked: asyncio.Task[None] | None = None
        self._closing = False

    def ask(self) -> None:
        """Reload soon: once, however often this is called until it begins."""
        if self._asked is None and not self._closing:
            self._asked = asyncio.create_task(self._as_asked())

    async def reload(self) -> str:
        """Reload now; what there is afterwards, a line for each part. Raises ReloadError."""
        async with self._turn:
            return await self._reload()

    def stop(self) -> None:
        """Begin nothing any more: the server is shutting down."""
        self._closing = True

    async def close(self) -> None:
        """Reload nothing any more, and wait for what has begun: a file half opened would be nobody's."""
        self.stop()
        if self._asked is not None:
            await self._asked
        async with self._turn:
            pass

    async def _as_asked(self) -> None:
        async with self._turn:
            self._asked = None
            with suppress(ReloadError):  # it was logged
                await self._reload()

    async def _reload(self) -> str:
        if self._closing:
            raise ReloadError("nothing was reloaded: the server is shutting down")
        done, refused = [], []
        for part in self._parts:
            try:
                if has := await part():
                    done.append(has)
            except Exception as error:
                if is_operators(error):
                    refused.append(sentence_of(error))
                else:
                    log.exception("a reload failed by a fault of the server")
                    refused.append(f"a fault of the server, see its log: {type(error).__name__}: {error}")
        for sentence in done:
            log.info("reloaded: %s", sentence)
        for sentence in refused:
            log.error("not reloaded, and as it was: %s", sentence, extra=ONE_BY_ONE)
        self._reloads.labels("refused" if refused else "done").inc()
        if refused:
            lines = [f"not reloaded, and as it was: {sentence}" for sentence in refused]
            raise ReloadError("\n".join(lines + [f"reloaded: {sentence}" for sentence in done]))
        return "\n".join(done)
