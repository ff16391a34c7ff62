"""Open tables and all that answers from them, from one opening to the next.

    open (any thread) ─► start (on the loop) ─► takes requests ─► retire: those under way end ─► closed

A server has one generation that takes requests. To open its tables anew it opens the next beside it, and turns over
what comes from then on; a request keeps the generation it began with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from engram_server.device import DeviceConverter, open_converter
from engram_server.fetch import Fetcher
from engram_server.hotset_keeper import HotSetKeeper
from engram_server.limits import Limits
from engram_server.memory import Memory, MemoryOptions
from engram_server.prefetch import Prefetcher

log = logging.getLogger("engram_server")


class ReopenError(ValueError):
    """The tables cannot be opened anew now; the text is a sentence for the operator."""


class Generation:
    """One opening of the tables."""

    fetcher: Fetcher
    prefetcher: Prefetcher

    def __init__(
        self, memory: Memory, converter: DeviceConverter | None = None, keeper: HotSetKeeper | None = None
    ) -> None:
        """For `open`."""
        self.memory = memory
        self.converter = converter
        self._keeper = keeper

    @classmethod
    def open(
        cls, path: Path, options: MemoryOptions, device: str = "cpu", claims: Mapping[str, int] | None = None
    ) -> Generation:
        """Open the tables, and take the memory of their cache. Takes a second or two; in any thread.

        Raises DeviceError, and what Memory.open raises.
        """
        memory = Memory.open(path, options, claims)
        try:
            converter = open_converter(device, {table.kind for table in memory.tables.values()})
            memory.engine.populate_cache()
            keeper = None if options.hot_set is None else HotSetKeeper(memory, options.hot_set)
        except BaseException:
            memory.close()
            raise
        return cls(memory, converter, keeper)

    def start(self, limits: Limits, on_damage: Callable[[str], None]) -> None:
        """Be ready for requests. On the event loop that serves, which knows nothing of it when this fails."""
        self.prefetcher = Prefetcher(self.memory.engine, limits.prefetch_rows, limits.prefetches)
        self.fetcher = Fetcher(self.memory, limits, on_damage, self.converter)

    def keep_hot_set(self) -> None:
        """Fill the cache from the hot set, if there is one, and save it from now on."""
        if self._keeper is not None:
            self._keeper.start()

    def leave_hot_set(self) -> None:
        """Save it for the last time."""
        if self._keeper is not None:
            self._keeper.close()

    async def retire(self) -> None:
        """Close once all that was begun is over. Nothing may begin any more."""
        await self.fetcher.idle()
        await asyncio.to_thread(self.prefetcher.close)
        self.fetcher.close()
        await asyncio.to_thread(self.close)

    def stop(self) -> None:
        """When the server ends: give up what is queued, on the loop that served; `close` it after the loop."""
        self.prefetcher.close()
        self.fetcher.close()

    def close(self) -> None:
        """Wait for reads in flight and give the memory back. In any thread."""
        self.leave_hot_set()
        self.memory.close()


class Tables:
    """The generation that takes requests, and the one before it until its last request is over.

    Of the event loop that serves, but for `close`.
    """

    def __init__(self, open_next: Callable[[], Generation], patience_s: float) -> None:
        """Opens the first. open_next is called in any thread, and raises what Generation.open raises; patience_s: how
        long a generation waits for the one before it to end, of which there is no third."""
        self.current = open_next()
        self._open_next = open_next
        self._patience_s = patience_s
        self._retiring: asyncio.Task[None] | None = None

    async def reopen(
        self,
        start: Callable[[Generation], None],
        turn_over: Callable[[Generation], None],
        settled: Callable[[], Awaitable[None]],
        trusted: Callable[[], bool],
    ) -> str:
        """Open the files of the tables anew and answer from them; what is served then, in words.

        Files that are the same go on as they are, with their cache, if what is served is trusted. start makes a
        generation ready; turn_over lets requests begin on it, at once, and does not fail; settled waits until no
        request outside of the generation's own fetcher needs the one before. On an error all is as before: raises what
        Generation.open and start raise, ReopenError.
        """
        if trusted() and await asyncio.to_thread(self.current.memory.is_current):
            return "the tables, whose files are the same, go on with their cache"
        await self._only_one()
        opened = await asyncio.to_thread(self._open_next)
        try:
            start(opened)
        except BaseException:
            await asyncio.to_thread(opened.close)
            raise
        before = self.current
        await asyncio.to_thread(before.leave_hot_set)
        turn_over(opened)
        self.current = opened
        opened.keep_hot_set()
        self._retiring = asyncio.create_task(_retire(before, settled))
        return opened.memory.summary()

    async def retired(self) -> None:
        """Wait until the generation before is gone."""
        if self._retiring is not None:
            await self._retiring

    def close(self) -> None:
        """After the loop."""
        self.current.close()

    async def _only_one(self) -> None:
        if self._retiring is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._retiring), self._patience_s)
        except TimeoutError:
            raise ReopenError(
                "requests that began before the tables were last opened are still under way, and they need the tables "
                "from before: there is no memory for a third opening; ask again when they are over"
            ) from None


async def _retire(generation: Generation, settled: Callable[[], Awaitable[None]]) -> None:
    try:
        await settled()
        await generation.retire()
        log.debug("the tables from before are closed")
    except Exception:
        log.exception("the tables from before were not closed by a fault of ours")
