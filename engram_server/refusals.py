"""Whom this server turned away, and why: counted each time, logged once a minute for each reason and peer, where all
addresses of one /64 of IPv6 are one."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Literal, get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from engram_server.clients import site_of
from engram_server.logs import ONE_BY_ONE

log = logging.getLogger("engram_server")

Reason = Literal["no_token", "wrong_token", "handshake", "wrong_uid", "admin_over_tcp"]

_QUIET_S = 60.0
_PEERS = 1024
"""Remembered, and told of in a minute: those who come with many addresses fill neither memory nor the log."""


class Refusals(Collector):
    """`engram_refusals_total`. From any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(get_args(Reason), 0)
        self._quiet: OrderedDict[tuple[Reason, str], tuple[float, int]] = OrderedDict()
        """Until when nothing is said of a reason and site, and how often there was something to say."""
        self.strangers: Callable[[], int] = lambda: 0
        """What native code has refused for its uid, and logs by itself."""

    def refused(self, reason: Reason, peer: str, sentence: str, count: int = 1) -> None:
        """Somebody was refused; peer without a port, "" = nobody knows."""
        now, site = self._clock(), site_of(peer)
        with self._lock:
            self._counts[reason] += count
            until, unsaid = self._quiet.get((reason, site), (0.0, 0))
            if speak := now >= until and self._has_room(now):
                self._quiet[reason, site] = (now + _QUIET_S, 0)
                self._quiet.move_to_end((reason, site))
            elif now < until:
                self._quiet[reason, site] = (until, unsaid + count)
        if speak:
            whose = "" if site == peer else f" of {site}"
            more = f" ({unsaid} more{whose} since the last such line)" if unsaid else ""
            log.warning("refused (%s) %s: %s%s", reason, peer or "somebody", sentence, more, extra=ONE_BY_ONE)

    def _has_room(self, now: float) -> bool:
        """For one more to tell of; the one that was told of longest ago makes way, if it has been a minute."""
        if len(self._quiet) < _PEERS:
            return True
        oldest, (until, _) = next(iter(self._quiet.items()))
        if now < until:
            return False
        del self._quiet[oldest]
        return True

    def collect(self) -> Iterator[Metric]:
        """The counter; every reason is there from the start."""
        family = CounterMetricFamily("engram_refusals", "Who was turned away, by reason.", labels=["reason"])
        with self._lock:
            counts = dict(self._counts)
        counts["wrong_uid"] += self.strangers()
        for reason, count in counts.items():
            family.add_metric([reason], count)
        yield family
