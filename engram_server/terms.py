"""On what terms a request is worked on: whose reads go first, and until when anybody wants the answer."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

from engram_kernels import _core


class DeadlinePassedError(Exception):
    """Nobody waits for the answer any more."""


class UnsupportedError(Exception):
    """What is asked for is switched off here."""


@dataclass(frozen=True)
class Terms:
    """Urgency of one request."""

    lane: _core.Lane
    deadline: float | None = None
    """On the clock of time.monotonic; None = never."""
    admission: _core.Admission | None = None
    """What let it in; None: nobody was asked."""

    def left_s(self) -> float | None:
        """Seconds until the deadline, None = any. Raises DeadlinePassedError when there are none."""
        if self.deadline is None:
            return None
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassedError("the time allowed for the request ran out")
        return left

    def explain(self, error: _core.RowError) -> None:
        """Raise DeadlinePassedError when a row was given up for that; a device may be out of time as well."""
        if error.error == errno.ETIMEDOUT:
            self.left_s()


def lane_by_size(rows: int, decode_rows: int) -> _core.Lane:
    """The lane of a request that names none."""
    return _core.Lane.DECODE if rows <= decode_rows else _core.Lane.PREFILL
