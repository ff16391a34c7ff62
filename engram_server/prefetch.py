"""Reading ahead of need: row groups go into the row cache in the lane behind all others.

    start (any thread, never waits) ──► queue of jobs, bounded ──► one thread ──► engine, two blocks at a time

Nobody waits for a job, so nothing of it is reported but in the log: a row that cannot be read fails the lookup
that needs it, then.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engram_kernels import _core
from engram_server.lookup import Block
from engram_server.terms import DeadlinePassedError, Terms

log = logging.getLogger("engram_server")

BLOCK_BYTES = 8 << 20
"""Packed rows of one block. Small: its rows stay pinned in the cache until all of them are read."""

_BLOCKS_AHEAD = 2
"""Blocks in the engine: one ends while the next keeps the device busy."""
_POLL_S = 0.05
"""How often a wait looks whether the prefetcher was closed, or the engine has room again."""
_BUDGET_WAIT_S = 30.0
"""How long a block waits for room in the engine before the rest of its job is left out."""


@dataclass(frozen=True, eq=False)
class Job:
    """Blocks to read, and until when that is worth it."""

    blocks: Sequence[Block]
    rows: int
    terms: Terms


class Prefetcher:
    """Reads blocks into the row cache on a thread of its own. Safe to share between threads."""

    def __init__(self, engine: _core.Engine, rows_max: int, jobs_max: int) -> None:
        """rows_max, jobs_max: what may be queued, the job being read included."""
        self._engine = engine
        self._rows_max = rows_max
        self._jobs_max = jobs_max
        self._changed = threading.Condition()
        """Guards what follows."""
        self._jobs: deque[Job] = deque()
        self._rows = 0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def queued_rows(self) -> int:
        """Rows of the jobs that have not ended."""
        with self._changed:
            return self._rows

    def start(self, blocks: Sequence[Block], deadline: float | None = None) -> None:
        """Queue blocks. deadline: on the clock of time.monotonic, when to give up what was not read.

        Raises OverloadedError when too much is queued already.
        """
        rows = sum(block.rows for block in blocks)
        if not rows:
            return
        with self._changed:
            if self._closed.is_set():
                raise RuntimeError("the prefetcher is closed")
            if len(self._jobs) >= self._jobs_max or self._rows + rows > self._rows_max:
                raise _core.OverloadedError(
                    f"{len(self._jobs)} prefetches of {self._rows} rows are queued; {rows} rows more would pass "
                    f"the limit of {self._jobs_max} prefetches and {self._rows_max} rows"
                )
            self._jobs.append(Job(blocks, rows, Terms(_core.Lane.PREFETCH, deadline)))
            self._rows += rows
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engram-prefetch", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Give up what is queued and end the thread."""
        with self._changed:
            self._closed.set()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed.is_set())
                if self._closed.is_set():
                    return
                job = self._jobs[0]
            try:
                read_into_cache(self._engine, job.blocks, job.terms, self._closed)
            except DeadlinePassedError:
                log.debug("a prefetch of %d rows was given up at its deadline", job.rows)
            except _core.OverloadedError as error:
                log.warning("a prefetch of %d rows is left out: %s", job.rows, error)
            except Exception:
                log.exception("a prefetch of %d rows failed by a fault of ours", job.rows)
            with self._changed:
                self._jobs.popleft()
                self._rows -= job.rows


def read_into_cache(
    engine: _core.Engine, blocks: Iterable[Block], terms: Terms, stop: threading.Event
) -> None:
    """Read blocks, a few at a time, and drop their rows: what stays is in the cache. `stop` ends it early.

    Rows that cannot be read are logged. Raises DeadlinePassedError, and OverloadedError when the engine had no
    room for a block in half a minute.
    """
    under_way: deque[_core.Batch] = deque()
    for block in blocks:
        if len(under_way) == _BLOCKS_AHEAD:
            _finish(under_way.popleft(), stop)
        if stop.is_set():
            return
        under_way.append(_submit(engine, block, terms, stop))
    while under_way:
        _finish(under_way.popleft(), stop)


def _submit(engine: _core.Engine, block: Block, terms: Terms, stop: threading.Event) -> _core.Batch:
    give_up = time.monotonic() + _BUDGET_WAIT_S
    while True:
        try:
            return block.submit(engine, terms)
        except _core.OverloadedError:
            if stop.wait(_POLL_S) or time.monotonic() >= give_up:
                raise


def _finish(batch: _core.Batch, stop: threading.Event) -> None:
    while not batch.wait(_POLL_S):
        if stop.is_set():
            return  # and drop the batch, which gives its reads up
    try:
        batch.check()
    except _core.RowError as error:
        if error.error not in (errno.ECANCELED, errno.ETIMEDOUT):
            log.warning("prefetching: %s", error)
