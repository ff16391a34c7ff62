"""Benchmarks: one small file per question, each beside its ceiling or rival; `python -m bench` runs them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this thread: a move to another core between the halves of a pair would count against one."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
