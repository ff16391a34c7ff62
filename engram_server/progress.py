"""A progress bar over bytes, for commands that move many."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def byte_progress(wanted: bool, what: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """What to call with bytes just moved, from any thread.

    Shows `what`, rate and time left on stderr when `wanted` and that is a terminal; `done` of `total` were moved
    before.
    """
    hidden = not (wanted and sys.stderr.isatty())
    lock = threading.Lock()
    with tqdm(
        total=total, initial=done, desc=what, unit="B", unit_scale=True, leave=False, disable=hidden
    ) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance
