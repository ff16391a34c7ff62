"""What a server looks at while it serves: its table files, what native threads saw, and how loading goes."""

from __future__ import annotations

import asyncio
import logging
import time

from engram_server.generation import Tables
from engram_server.health import Health
from engram_server.logs import ONE_BY_ONE
from engram_server.memory import Memory
from engram_server.metrics import MemoryCollector
from engram_server.shared_memory import SharedMemoryChannel

log = logging.getLogger("engram_server")

_WATCH_S = 1.0
"""Between two looks."""
_LOAD_POLL_S = 0.2


async def log_loading(tables: Tables) -> None:
    """Say how far tables or scales are on their way into memory, each tenth of it, and how it ended."""
    generation, began, tenth = None, 0.0, 1
    while True:
        if tables.current is not generation:
            generation, began, tenth = tables.current, time.monotonic(), 1
        memory = tables.current.memory
        if memory.loads and tenth:
            tenth = _log_load(memory, tenth, time.monotonic() - began)
        await asyncio.sleep(_LOAD_POLL_S if memory.loads and tenth else _WATCH_S)


def _log_load(memory: Memory, tenth: int, seconds: float) -> int:
    """Log the tenth that is due, if it is; returns the next one, 0 when there is nothing more to say."""
    what = memory.loads
    loaded, rows, error = memory.load_progress()
    if error:
        log.error("%s stay on disk from %.0f %% on: %s", what, 100 * loaded / rows, error)
        return 0
    if loaded == rows:
        log.info("%s are in memory after %.1f s", what, seconds)
        return 0
    if loaded * 10 < rows * tenth:
        return tenth
    log.info("%s: %.0f %% in memory", what, 100 * loaded / rows)
    return loaded * 10 // rows + 1


async def beat(condition: Health) -> None:
    """Say that the event loop runs."""
    while True:
        condition.beat()
        await asyncio.sleep(_WATCH_S)


async def watch_tables(
    tables: Tables, channel: SharedMemoryChannel | None, condition: Health, metrics: MemoryCollector
) -> None:
    """Report the first change of a table file, also when nobody asks for its rows, and what native threads saw.

    Files are looked at in a thread: a file system that hangs shall not hang the loop.
    """
    memory, told = tables.current.memory, set[str]()
    while True:
        if memory is not tables.current.memory:
            memory, told = tables.current.memory, set()
        try:
            change = await asyncio.to_thread(memory.reader.change)
            replaced = await asyncio.to_thread(memory.replaced)
        except Exception as error:  # and go on: the next look may be a better one
            change, replaced = "", ""
            _tell(told, logging.ERROR, f"the table files could not be looked at: {error!r}")
        trouble = change or _native_trouble(memory, channel)
        if memory is tables.current.memory:
            if trouble:
                condition.damaged(trouble)
            for path in memory.failed_copies():
                _tell(
                    told,
                    logging.WARNING,
                    f"{path} has rows that could not be read: its copies are asked for them",
                )
            metrics.replaced = bool(replaced)
            if replaced:
                _tell(
                    told,
                    logging.WARNING,
                    f"{replaced}: what was opened is served until a reload (SIGHUP) opens it anew",
                )
        await asyncio.sleep(_WATCH_S)


def _native_trouble(memory: Memory, channel: SharedMemoryChannel | None) -> str:
    damage = "" if channel is None else channel.look()
    broken = f"backend {memory.reader.backend}: {memory.reader.reason}" if memory.reader.broken else ""
    return damage or broken


def _tell(told: set[str], level: int, sentence: str) -> None:
    """Once for one opening of the tables."""
    if sentence not in told:
        log.log(level, "%s", sentence, extra=ONE_BY_ONE)
        told.add(sentence)
