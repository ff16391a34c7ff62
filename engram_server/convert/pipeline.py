"""Chunks handed to a few threads, each of which reads, converts and writes its own.

Nothing is passed between threads: while one waits for the disk, another's native call has a core, and memory is
bounded by the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")

THREADS_MAX = 8


def default_threads() -> int:
    """Two for each core, so that one computes while the other's reads and writes are under way."""
    return max(2, min(THREADS_MAX, 2 * len(os.sched_getaffinity(0))))


def in_parallel(
    items: Iterable[Item], make_worker: Callable[[], Callable[[Item], None]], threads: int = 0
) -> None:
    """Call a worker for every item, in order, on a few threads (0 = default_threads()).

    make_worker is called once in each thread, for buffers of its own. Re-raises the first error after all
    threads have ended; Ctrl-C too ends them at their next item.
    """
    pending = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def run() -> None:
        work = make_worker()
        while not stop.is_set():
            with lock:
                item = next(pending, None)
            if item is None:
                return
            work(item)

    threads = threads or default_threads()
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(run) for _ in range(threads)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for future in futures:
        future.result()
