"""The least that one process can wait for another: a futex ping-pong."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_PING, _PONG = 0, 1
"""Words of the shared page: rounds begun, rounds answered."""
_END = 0xFFFFFFFF


class _Page:
    """Two words that both processes map."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._words = (ctypes.c_uint32 * 2).from_buffer(self.memory)
        self._at = ctypes.addressof(self._words)
        self._libc = ctypes.CDLL(None)
        self._number = _SYS_FUTEX[platform.machine()]

    def wait_for(self, word: int, value: int) -> int:
        """Until the word is no longer `value`; what it is then."""
        while (now := self._words[word]) == value:
            self._libc.syscall(
                self._number, ctypes.c_void_p(self._at + 4 * word), _WAIT, value, None, None, 0
            )
        return now

    def put(self, word: int, value: int) -> None:
        self._words[word] = value
        self._libc.syscall(self._number, ctypes.c_void_p(self._at + 4 * word), _WAKE, 1, None, None, 0)


@contextmanager
def ping_pong() -> Iterator[Callable[[], float]]:
    """A call that wakes a process which wakes this one; it returns the seconds that took."""
    page, rounds = _Page(), 0
    other = multiprocessing.get_context("fork").Process(target=_answer, args=(page,), daemon=True)
    other.start()

    def once() -> float:
        nonlocal rounds
        begin = time.perf_counter()
        page.put(_PING, rounds + 1)
        page.wait_for(_PONG, rounds)
        rounds += 1
        return time.perf_counter() - begin

    try:
        yield once
    finally:
        page.put(_PING, _END)
        other.join()


def _answer(page: _Page) -> None:
    seen = 0
    while (seen := page.wait_for(_PING, seen)) != _END:
        page.put(_PONG, seen)
