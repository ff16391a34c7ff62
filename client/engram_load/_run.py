"""When jobs are sent: closed loops, and open ones that count from when a job was to begin.

An open loop's jobs arrive whatever became of those before. Threads take arrivals in order and wait for the moment of
theirs; when none is free, an arrival is taken late, and the time it waited is part of its latency. So a server that
stalls is seen by everybody who came meanwhile, as real users would see it, and not by one request alone ("coordinated
omission").
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

from engram_client import (
    EngramError,
    InvalidRequestError,
    Lookup,
    MismatchError,
    UnavailableError,
    UnsupportedError,
)
from engram_load._errors import LoadError
from engram_load._forward import Forward
from engram_load._measure import Measurement, Series
from engram_load._patterns import Job, Request
from engram_load._target import Source, Target

_HOPELESS = (InvalidRequestError, MismatchError, UnsupportedError)
"""The same request would fail again, and so would the next."""
_AWAY_S = 0.1
"""Before a server that went away is asked again."""
_TICK_S = 0.25


@dataclass(frozen=True)
class Closed:
    """So many loops, each of which sends a job when its last one was answered."""

    loops: int = 1


@dataclass(frozen=True)
class Open:
    """Jobs arrive at random, so many a second on average (a Poisson process), whatever is answered."""

    rate: float


@dataclass(frozen=True)
class Recorded:
    """Jobs arrive when they did."""

    speed: float = 1.0
    """2 = in half the time."""


@dataclass(frozen=True)
class Stream:
    """Jobs of one kind, and how they arrive."""

    whole: str
    part: str
    jobs: Callable[[int], Iterator[Job]]
    """An endless run of them, or one that ends, for loop number n."""
    arrivals: Closed | Open | Recorded
    background: bool = False
    """Whether it stops when the others have ended."""


@dataclass(frozen=True)
class Plan:
    """How long, and how much at once."""

    duration_s: float | None = None
    """Of what is measured. None: until `count` jobs, or all there are."""
    count: int | None = None
    """Jobs that are measured, of each stream."""
    warmup_s: float = 0.0
    """Before that."""
    threads: int = 64
    """Jobs of an open loop that are under way at once; more wait, and are late."""
    drain_s: float = 60.0
    """After the end, for jobs that have arrived."""
    seed: int = 1
    forward: Forward | None = None
    """None: rows alone are asked for, as fast as they come."""


_Take: TypeAlias = "Callable[[], tuple[int, Job] | None]"
"""The next arrival: a moment (ns of the monotonic clock) and its job; None: there are no more. Called under a lock."""


class Run:
    """One run of some streams against one source. `measure` it once."""

    def __init__(self, target: Target, source: Source, streams: list[Stream], plan: Plan) -> None:
        self._target, self._source, self._streams, self._plan = target, source, streams, plan
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._foreground = _Latch()
        self._pool: ThreadPoolExecutor | None = None
        """For the lookups of forwards, one for each layer at once."""
        self._open: list[tuple[Series, _Take, _Countdown]] = []

    def measure(self, on_begin: Callable[[], None], on_tick: Callable[[Measurement], None]) -> Measurement:
        """Send everything, and return what came of it, also after Ctrl-C.

        on_begin is called when the warm-up is over, on_tick a few times a second.
        Raises LoadError when no request can succeed, and whatever a thread raised.
        """
        began = self._plan.warmup_s == 0
        if began:
            on_begin()
        self._set_clock()
        threads = [thread for stream in self._streams for thread in self._threads(stream)]
        if self._plan.forward is not None:
            self._pool = ThreadPoolExecutor(len(threads) * len(self._plan.forward.reaches))
        try:
            for thread in threads:
                thread.start()
            # No thread is joined yet: Python 3.11 takes one for ended when Ctrl-C interrupts its join.
            while not self._foreground.wait(_TICK_S if began else self._until_begin_s()):
                if not began and time.monotonic_ns() >= self._begin_ns:
                    began = True
                    on_begin()
                on_tick(self.measured)
        except KeyboardInterrupt:
            self.measured.interrupted = True
        finally:
            self._stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            if self._pool is not None:
                self._pool.shutdown()
        if not began:
            on_begin()
        if self._failed is not None:
            raise self._failed
        self._give_up()
        return self.measured

    def _until_begin_s(self) -> float:
        """So that what is noted when the warm-up is over is noted then."""
        return min(_TICK_S, max(0.0, (self._begin_ns - time.monotonic_ns()) / 1e9))

    def _set_clock(self) -> None:
        self._start_ns = time.monotonic_ns()
        self._begin_ns = self._start_ns + int(self._plan.warmup_s * 1e9)
        duration_s = self._plan.duration_s
        self._end_ns = None if duration_s is None else self._begin_ns + int(duration_s * 1e9)
        series = [Series(stream.whole, stream.part) for stream in self._streams]
        self.measured = Measurement(series, self._begin_ns)

    def _give_up(self) -> None:
        """Jobs that had arrived and that nobody took: they waited for nothing, and count with the time they did."""
        now_ns = time.monotonic_ns()
        last_ns = now_ns if self._end_ns is None else min(now_ns, self._end_ns - 1)
        for series, take, left in self._open:
            while not left.done and (arrival := take()) is not None and arrival[0] <= last_ns:
                if arrival[0] >= self._begin_ns:
                    left.one_less()
                    self.measured.gave_up(series, now_ns - arrival[0])

    # ------------------------------------------------------------------------------------------ threads

    def _threads(self, stream: Stream) -> list[threading.Thread]:
        series = self.measured.series[stream.whole]
        left = _Countdown(None if stream.background else self._plan.count)
        if isinstance(stream.arrivals, Closed):
            return [
                self._thread(_at_once(stream.jobs(loop)), series, left, stream)
                for loop in range(stream.arrivals.loops)
            ]
        jobs = stream.jobs(0)
        if isinstance(stream.arrivals, Open):
            take = _poisson(jobs, self._start_ns, stream.arrivals.rate, random.Random(self._plan.seed))
        else:
            take = _as_recorded(jobs, self._start_ns, stream.arrivals.speed)
        self._open.append((series, take, left))
        return [self._thread(take, series, left, stream) for _ in range(self._plan.threads)]

    def _thread(self, take: _Take, series: Series, left: _Countdown, stream: Stream) -> threading.Thread:
        ended = _Latch() if stream.background else self._foreground
        ended.expect_one()
        return threading.Thread(target=self._work, args=(take, series, left, ended), daemon=True)

    def _work(self, take: _Take, series: Series, left: _Countdown, ended: _Latch) -> None:
        try:
            while (arrival := self._next(take, left)) is not None:
                self._one(series, *arrival)
        except BaseException as error:
            self._failed = self._failed or error
            self._stop.set()
        finally:
            ended.one_came()

    def _next(self, take: _Take, left: _Countdown) -> tuple[int, Job] | None:
        """The next arrival, once its moment has come."""
        with left.lock:
            if self._over() or left.done:
                return None
            arrival = take()
            if arrival is None or (self._end_ns is not None and arrival[0] >= self._end_ns):
                return None
            if arrival[0] >= self._begin_ns:
                left.one_less()
        wait_s = (arrival[0] - time.monotonic_ns()) / 1e9
        if wait_s > 0 and self._stop.wait(wait_s):
            return None
        return arrival

    def _one(self, series: Series, at_ns: int, job: Job) -> None:
        """Send one job and measure it, unless it is one of the warm-up."""
        measured = self.measured if at_ns >= self._begin_ns else None
        if measured is not None:
            measured.began(series, time.monotonic_ns() - at_ns)
        part_ns = at_ns  # the first chunk waited with its prompt
        try:
            for number, request in enumerate(job.requests):
                if number and self._over():
                    if measured is not None:
                        measured.gave_up(series, time.monotonic_ns() - at_ns)
                    return
                found, stalls = self._sent(request)
                now_ns = time.monotonic_ns()
                if measured is not None:
                    answer_bytes = sum(map(_bytes_of, found))
                    stats = [part.stats for part in found]
                    measured.answered(series, request, stats, now_ns - part_ns, answer_bytes, stalls)
                part_ns = now_ns
                del found
        except EngramError as error:
            if isinstance(error, _HOPELESS):
                raise LoadError(f"the requests of this test cannot be answered: {error}") from error
            if measured is not None:
                measured.failed(series, error, time.monotonic_ns() - at_ns)
            if isinstance(error, UnavailableError):
                self._stop.wait(_AWAY_S)
            return
        if measured is not None:
            measured.ended(series, time.monotonic_ns() - at_ns)

    def _sent(self, request: Request) -> tuple[list[Lookup], dict[int, int]]:
        """Its rows, and by layer how long a forward stood still for them. Raises EngramError."""

        def send(request: Request) -> Lookup:
            return self._target.send(self._source, request)

        if self._pool is None or self._plan.forward is None:
            return [send(request)], {}
        return self._plan.forward.run(send, self._pool, request)

    def _over(self) -> bool:
        """Whether nothing is sent any more, whatever has arrived."""
        late = self._end_ns is not None and time.monotonic_ns() > self._end_ns + int(self._plan.drain_s * 1e9)
        return late or self._stop.is_set()


class _Countdown:
    """Jobs of a stream that may still begin; None = any number."""

    def __init__(self, count: int | None) -> None:
        self.lock = threading.Lock()
        self._left = count

    @property
    def done(self) -> bool:
        return self._left == 0

    def one_less(self) -> None:
        if self._left is not None:
            self._left -= 1


class _Latch:
    """Opens when all that were expected have come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self._missing = 0

    def expect_one(self) -> None:
        self._missing += 1

    def one_came(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing == 0:
                self._open.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is open."""
        return self._open.wait(timeout_s)


def _bytes_of(found: Lookup) -> int:
    """Of the rows that came, with their index where each came once."""
    if found.unique is None or found.inverse is None:
        return int(found.values.nbytes)
    return sum(int(part.nbytes) for part in (*found.unique.values(), *found.inverse.values()))


# ------------------------------------------------------------------------------------------------ arrivals


def _at_once(jobs: Iterator[Job]) -> _Take:
    """A closed loop's: whenever it asks."""

    def take() -> tuple[int, Job] | None:
        job = next(jobs, None)
        return None if job is None else (time.monotonic_ns(), job)

    return take


def _poisson(jobs: Iterator[Job], begin_ns: int, rate: float, rng: random.Random) -> _Take:
    at_s = 0.0

    def take() -> tuple[int, Job] | None:
        nonlocal at_s
        job = next(jobs, None)
        at_s += rng.expovariate(rate)
        return None if job is None else (begin_ns + int(at_s * 1e9), job)

    return take


def _as_recorded(jobs: Iterator[Job], begin_ns: int, speed: float) -> _Take:
    def take() -> tuple[int, Job] | None:
        job = next(jobs, None)
        return None if job is None else (begin_ns + int(job.at_s / speed * 1e9), job)

    return take
