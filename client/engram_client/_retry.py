"""Whether and when to try a lookup again: the decisions, without the waiting, for both kinds of client."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from engram_client._config import Retry
from engram_client._errors import DeadlineError, EngramError, OverloadedError, UnavailableError

_LONGEST_S = 365 * 86_400.0
"""gRPC and threading overflow on a deadline much further away, math.inf among them."""


class Attempts:
    """The tries of one lookup."""

    def __init__(
        self,
        retry: Retry,
        targets: int,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """timeout_s bounds all tries and waits together."""
        if timeout_s is not None:
            timeout_s = min(timeout_s, _LONGEST_S)
        self._retry = retry
        self._targets = targets
        self._clock = clock
        self._jitter = jitter
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._unavailable = 0
        self._unavailable_since: float | None = None
        self._overloaded = 0
        self._overloaded_since: float | None = None

    def remaining_s(self, at_most: float | None = None) -> float | None:
        """Time the next try may take; None = any. Raises DeadlineError when there is none left."""
        if self._deadline is None:
            return at_most
        left = self._deadline - self._clock()
        if left <= 0:
            raise DeadlineError(f"no answer within {self._timeout_s} s")
        return left if at_most is None else min(left, at_most)

    def delay_after(self, error: EngramError) -> float:
        """Seconds to wait before the next try, or raise `error` when there is to be none.

        A server that is unavailable is left for the next target at once; only a whole round of them is
        followed by a wait. An overloaded one always is: for as long as it says, up to the longest wait there is.
        """
        now = self._clock()
        if isinstance(error, UnavailableError):
            delay = self._after_unavailable(error, now)
        elif isinstance(error, OverloadedError):
            delay = self._after_overload(error, now)
        else:
            raise error
        if self._deadline is not None and now + delay >= self._deadline:
            raise error
        return delay

    def _after_unavailable(self, error: UnavailableError, now: float) -> float:
        if self._unavailable_since is None:
            self._unavailable_since = now
        self._unavailable += 1
        rounds, rest = divmod(self._unavailable, self._targets)
        if rest:
            return 0.0
        waited = now - self._unavailable_since
        if rounds >= self._retry.attempts and waited >= self._retry.wait_for_server_s:
            raise error
        return self._backoff(rounds)

    def _after_overload(self, error: OverloadedError, now: float) -> float:
        if self._overloaded_since is None:
            self._overloaded_since = now
        self._overloaded += 1
        worth_s = self._retry.wait_for_room_s if error.retry_after_s > 0 else 0.0
        if self._overloaded >= self._retry.attempts and now - self._overloaded_since >= worth_s:
            raise error
        told = min(error.retry_after_s, self._retry.backoff_max_s)
        # Later than told by half at most, lest all who were told the same come back at once.
        return max(told * (1 + self._jitter() / 2), self._backoff(self._overloaded))

    def _backoff(self, count: int) -> float:
        delay = min(self._retry.backoff_max_s, self._retry.backoff_s * 2.0 ** min(count - 1, 30))
        return delay * (0.5 + self._jitter())
