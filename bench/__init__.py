"""Benchmarks: one small file per question, each beside its ceiling or rival; `python -m bench` runs them.

README.md in this folder says what each asks and how to read the answers.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def one_core() -> Iterator[None]:
    """Pin the whole process, native threads included, to one core.

    A move to another core between the halves of a pair would count against one, and help from a thread on another
    core would be counted as speed.
    """
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    core = {max(os.sched_getaffinity(0))}
    for thread in before:
        _pin(thread, core)
    try:
        yield
    finally:
        for thread in _threads():  # those started meanwhile, too
            _pin(thread, before.get(thread, before[os.getpid()]))


def _threads() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]


def _pin(thread: int, cores: set[int]) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, cores)
