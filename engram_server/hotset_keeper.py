"""Keeps the hot set of a server: restores it after a start, saves it while serving and at the end.

One thread does both, and saves nothing before all has been restored: a server that is stopped early must not
replace a full hot set by what little it had read.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import numpy as np

from engram_kernels import _core
from engram_server.hotset import HotGroups, HotSetError, blocks_of, check_place, read_hot_set, write_hot_set
from engram_server.lookup import GROUP_ROWS
from engram_server.memory import Memory
from engram_server.prefetch import read_into_cache
from engram_server.terms import Terms

log = logging.getLogger("engram_server")

SAVE_PERIOD_S = 600.0
"""Between two saves; a server that is killed loses what it learnt since the last."""


class HotSetKeeper:
    """The hot set at `path`, kept for as long as the server runs."""

    def __init__(self, memory: Memory, path: Path, save_period_s: float = SAVE_PERIOD_S) -> None:
        """Raises HotSetError when no hot set can be kept there."""
        check_place(path)
        if not memory.has_cache:
            raise HotSetError(f"the hot set {path} needs a row cache: give --cache-bytes, or no --hot-set")
        self._memory = memory
        self._path = path
        self._save_period_s = save_period_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to restore; returns at once."""
        self._thread = threading.Thread(target=self._run, name="engram-hot-set", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give up what is not restored yet; save, if all was. Before the memory is closed."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._restore()
        except Exception:
            log.exception("the hot set %s was not restored by a fault of ours", self._path)
        if self._stop.is_set():
            return
        while not self._stop.wait(self._save_period_s):
            self._save()
        self._save()

    def _restore(self) -> None:
        memory = self._memory
        try:
            hot = read_hot_set(self._path, memory.tables, _groups_max(memory))
        except FileNotFoundError:
            log.info("there is no hot set %s yet: the cache starts empty", self._path)
            return
        except (HotSetError, OSError) as error:
            log.warning("the cache starts empty: %s", error)
            return
        began = time.monotonic()
        try:
            terms = Terms(_core.Lane.PREFETCH)
            read_into_cache(memory.engine, blocks_of(hot, memory.tables), terms, self._stop)
        except _core.OverloadedError as error:
            log.warning("the rest of the hot set is left out: %s", error)
        if not self._stop.is_set():
            groups, seconds = sum(len(part) for part in hot), time.monotonic() - began
            log.info("hot set: %d row groups are in the cache after %.1f s", groups, seconds)

    def _save(self) -> None:
        try:
            hot = cached_groups(self._memory)
            if hot:
                write_hot_set(self._path, self._memory.tables, hot)
                log.debug("hot set: %d row groups saved", sum(len(part) for part in hot))
        except OSError as error:
            log.warning("the hot set %s was not saved: %s", self._path, error.strerror)
        except Exception:
            log.exception("the hot set %s was not saved by a fault of ours", self._path)


def cached_groups(memory: Memory) -> list[HotGroups]:
    """What the row cache holds now, hottest first, layer by layer."""
    found = []
    for layer in memory.tables:
        group_rows, ids, masks, hotness = memory.engine.cached_groups(layer)
        order = np.argsort(-hotness.astype(np.int16), kind="stable")
        found.append(HotGroups(layer, group_rows[order], masks[order], ids[order]))
    return found


def _groups_max(memory: Memory) -> int:
    """More groups of one layer than the cache has room for are not worth reading."""
    row_bytes = min(table.row_bytes for table in memory.tables.values())
    return max(1, memory.options.cache_bytes // (GROUP_ROWS * row_bytes))
